"""Named spans of host work, which a profile can show: `with span("schedule"): ...`.

While no recorder is installed, a span is one function call that returns the same empty object: cheap enough to stay in
the loop. A recorder keeps the spans of all threads, and may write them to a second place (a profiler's own
annotations), so that host spans and device kernels end up on one time line.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

Annotate = Callable[[str], AbstractContextManager[Any]]
"""Maps a span's name to a context that another tool records."""


@dataclass(frozen=True, slots=True)
class HostSpan:
    """One stretch of host work, on the clock of `time.perf_counter_ns`."""

    name: str
    start_ns: int
    end_ns: int
    thread_id: int
    args: Mapping[str, object]


@dataclass
class Recorder:
    """Keeps spans in the order in which they ended."""

    annotate: Annotate | None = None
    spans: list[HostSpan] = field(default_factory=list)

    def span(self, name: str, args: Mapping[str, object]) -> AbstractContextManager[None]:
        """A span that is recorded here, even if this recorder is no longer installed when it ends."""
        return _RecordedSpan(self, name, args)


_recorder: Recorder | None = None


def record_into(recorder: Recorder | None) -> None:
    """Send spans to `recorder` from now on; `None`: do not record them."""
    global _recorder
    _recorder = recorder


def span(name: str, **args: object) -> AbstractContextManager[None]:
    """A context whose duration is recorded, if a recorder is installed. `args` are shown beside it."""
    recorder = _recorder
    return _NO_SPAN if recorder is None else recorder.span(name, args)


class _NoSpan:
    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


_NO_SPAN = _NoSpan()


class _RecordedSpan:
    __slots__ = ("_annotation", "_args", "_name", "_recorder", "_start_ns")

    def __init__(self, recorder: Recorder, name: str, args: Mapping[str, object]) -> None:
        self._recorder = recorder
        self._name = name
        self._args = args
        self._annotation = nullcontext() if recorder.annotate is None else recorder.annotate(name)
        self._start_ns = 0

    def __enter__(self) -> None:
        self._annotation.__enter__()
        self._start_ns = time.perf_counter_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end_ns = time.perf_counter_ns()
        self._annotation.__exit__(kind, error, trace)
        self._recorder.spans.append(HostSpan(self._name, self._start_ns, end_ns, threading.get_ident(), self._args))
