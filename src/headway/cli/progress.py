"""How far a long command is: a bar on a terminal, a line every few seconds where stderr goes into a file or a pipe."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

LINE_EVERY_S = 5.0
_LEAST_SHARE = 0.05
"""Before so much is done, the time that is left would be a bad guess."""
_BAR = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"


class Meter(Protocol):
    """Shows how far a long piece of work is. The work calls it: the one form of progress callbacks."""

    def advance(self) -> None:
        """One more of them is done."""
        ...

    def at(self, done: float, total: float | None = None) -> None:
        """This much is done; `total`, where it was not known before, is how much there is."""
        ...


@contextlib.contextmanager
def meter(total: float | None, title: str, *, unit: str = "", is_shown: bool = True) -> Iterator[Meter]:
    """Show how far the work inside is. `total`: how much there is of it, `None` if that is not known yet; `unit`: what
    is counted, where people want to read the numbers and not only the share."""
    if is_shown and sys.stderr.isatty():
        with _bar(total, title, unit) as bar:
            yield bar
        return
    lines = ProgressLines(total, title, unit)
    if not is_shown:
        yield lines
        return
    with lines.shown(_to_stderr, every_s=LINE_EVERY_S):
        yield lines


def progress_bar(num_requests: int, title: str = "", *, is_shown: bool = True) -> AbstractContextManager[Meter]:
    """The same for requests, which are counted as they end."""
    return meter(num_requests, title, unit="requests", is_shown=is_shown)


class ProgressLines:
    """A meter as lines of text: what is done, the time that took, and the time that the rest will take at that pace."""

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
        """How things stand."""
        elapsed_s = self._now() - self._started_s
        parts = [self._amount, _time(elapsed_s)]
        if self._total and self._total * _LEAST_SHARE <= self._done < self._total:
            parts.append(f"about {_time(elapsed_s * (self._total - self._done) / self._done)} left")
        return f"{self._title or 'Progress'}: {', '.join(parts)}"

    @property
    def _amount(self) -> str:
        if not self._total:
            return f"{self._done:,.0f}{f' {self._unit}' if self._unit else ''}"
        share = f"{100 * self._done / self._total:.0f}%"
        return f"{self._done:,.0f} of {self._total:,.0f} {self._unit} ({share})" if self._unit else share

    @contextlib.contextmanager
    def shown(self, write: Callable[[str], object], *, every_s: float) -> Iterator[None]:
        """Write the line every so often while inside. A thread does it, so that a step that takes minutes is not silent
        and the measured code looks at no clock."""
        is_over = threading.Event()

        def show() -> None:
            while not is_over.wait(every_s):
                write(self.line)

        thread = threading.Thread(target=show, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


class _Bar:
    """The same on a terminal."""

    def __init__(self, total: float | None, title: str, unit: str) -> None:
        from tqdm import tqdm

        layout = {} if unit else {"bar_format": _BAR}
        self._bar = tqdm(
            total=total,
            desc=title or None,
            unit=f" {unit}" if unit else "",
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
