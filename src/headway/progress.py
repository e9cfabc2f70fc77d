"""Progress of long work: a bar on a terminal, or a line every few seconds if stderr is a file or a pipe.

If pieces of work are nested, only the innermost is shown, because it is the one that takes the time. Inside a bar it is
shown as lines above the bar.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

LINE_EVERY_S = 5.0
_LEAST_SHARE = 0.05
"""The remaining time is not estimated before this share is done."""
_BAR = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"


class Meter(Protocol):
    """Shows the progress of a long piece of work, which calls it. All progress callbacks have this form."""

    def advance(self) -> None:
        """Count one more unit as done."""
        ...

    def at(self, done: float, total: float | None = None) -> None:
        """Report how much is done, and the `total` if it was not known before."""
        ...


@contextlib.contextmanager
def meter(total: float | None, title: str, *, unit: str = "", is_shown: bool = True) -> Iterator[Meter]:
    """Show the progress of the work inside the context. `total` is the amount of work, `None` if not known yet. With a
    `unit`, the numbers are shown and not only the share; bytes are shown in MB."""
    if is_shown and sys.stderr.isatty() and not _shown:
        with showing(), _bar(total, title, unit) as bar:
            yield bar
        return
    lines = ProgressLines(total, title, unit)
    if not is_shown:
        yield lines
        return
    with showing() as is_innermost, lines.shown(_to_stderr, every_s=LINE_EVERY_S, is_due=is_innermost):
        yield lines


_shown: list[object] = []
"""The displays that are active now, the innermost last."""


@contextlib.contextmanager
def showing() -> Iterator[Callable[[], bool]]:
    """Register a display while the context lasts. Yields a function that says whether it is the innermost one."""
    own = object()
    _shown.append(own)
    try:
        yield lambda: _shown[-1] is own
    finally:
        _shown.remove(own)


@contextlib.contextmanager
def first_use(what: str, title: str, *, unit: str = "") -> Iterator[Meter]:
    """Show work that is done only once per machine and that the user did not ask for: say what will be done before it
    begins, and afterwards how long it took."""
    _to_stderr(what)
    started_s = time.monotonic()
    with meter(None, title, unit=unit) as shown:
        yield shown
    _to_stderr(f"{title}: done in {_time(time.monotonic() - started_s)}")


def progress_bar(num_requests: int, title: str = "", *, is_shown: bool = True) -> AbstractContextManager[Meter]:
    """As `meter`, for requests, which are counted as they end."""
    return meter(num_requests, title, unit="requests", is_shown=is_shown)


class ProgressLines:
    """A meter that prints lines of text: the amount done, the time taken, and the estimated time left."""

    def __init__(
        self, total: float | None, title: str = "", unit: str = "", *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._total, self._title, self._unit, self._now = total, title, unit, now
        self._done = 0.0
        self._started_s = now()

    def advance(self) -> None:
        self._done += 1

    def at(self, done: float, total: float | None = None) -> None:
        self._done = done
        self._total = self._total if total is None else total

    @property
    def line(self) -> str:
        """The current line."""
        elapsed_s = self._now() - self._started_s
        parts = [self._amount, _time(elapsed_s)]
        if self._total and self._total * _LEAST_SHARE <= self._done < self._total:
            parts.append(f"about {_time(elapsed_s * (self._total - self._done) / self._done)} left")
        return f"{self._title or 'Progress'}: {', '.join(parts)}"

    @property
    def _amount(self) -> str:
        scale, unit = (1e6, "MB") if self._unit == "bytes" else (1.0, self._unit)
        if not self._total:
            return f"{self._done / scale:,.0f}{f' {unit}' if unit else ''}"
        share = f"{100 * self._done / self._total:.0f}%"
        return f"{self._done / scale:,.0f} of {self._total / scale:,.0f} {unit} ({share})" if unit else share

    @contextlib.contextmanager
    def shown(
        self, write: Callable[[str], object], *, every_s: float, is_due: Callable[[], bool] = lambda: True
    ) -> Iterator[None]:
        """Within this context, write the line whenever it is due. A thread does this, so that lines also appear during
        a step of minutes and the measured code need not check the clock."""
        is_over = threading.Event()

        def show() -> None:
            while not is_over.wait(every_s):
                if is_due():
                    write(self.line)

        thread = threading.Thread(target=show, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


class _Bar:
    """A meter shown as a bar on a terminal."""

    def __init__(self, total: float | None, title: str, unit: str) -> None:
        from tqdm import tqdm

        layout: dict[str, Any] = {} if unit else {"bar_format": _BAR}
        if unit == "bytes":
            layout, unit = {"unit_scale": True, "unit_divisor": 1000}, "B"
        self._bar = tqdm(
            total=total,
            desc=title or None,
            unit=unit if unit == "B" else f" {unit}" if unit else "",
            leave=False,
            mininterval=0.5,
            dynamic_ncols=True,
            **layout,
        )

    def advance(self) -> None:
        self._bar.update()

    def at(self, done: float, total: float | None = None) -> None:
        if total is not None:
            self._bar.total = total
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        self._bar.close()


def _bar(total: float | None, title: str, unit: str) -> contextlib.closing[_Bar]:
    return contextlib.closing(_Bar(total, title, unit))


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
