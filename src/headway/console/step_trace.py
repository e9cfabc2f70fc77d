"""Chrome traces of steps: torch's export with the engine's own spans on a track of their own, and its summary.

While a profile runs, each span of `headway.tracing` is also an annotation of torch's profiler, under a prefixed name.
So host spans and kernels share torch's clock, and its exporter writes both. This module moves the annotations from the
crowded track of their thread to a track named "headway" at the top, where a viewer shows the steps and their parts.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.errors import ConfigError, HeadwayError
from headway.tracing import HostSpan

SPAN_PREFIX = "headway."
"""The prefix of a span's name in torch's annotations."""
SPAN_CATEGORY = "headway"
STEP_SPAN = "step"
"""The span around a whole step of the engine."""

DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
HOST_OPERATOR_CATEGORY = "cpu_op"

# A process id that no process has, so that the track cannot coincide with a real one.
_TRACK = 1_000_000_007
_TRACK_NAME = "headway"

OTHER = "other"

# The first matching pattern decides: attention kernels are often built from matmul templates, and fused linear layers
# carry the name of the norm before them. Patterns at a name's start match Headway's own kernels.
_PATTERNS: Mapping[str, str] = {
    "attention": r"attn|attention|flash|fmha|paged|^decode_|^prefill_|^merge_",
    "sampling": r"sampl|argmax|gumbel|multinomial|topk|top_k|sort|softmax|^_pick|^_threshold|^_edit|^_penalty",
    "linear": r"gemm|gemv|cublas|nvjet|cutlass|wmma|splitk|linear|addmm|matmul|::b?mm|^one_row|^split_|^scaled_|swiglu",
    "norm/rope/activation": r"norm|rope|rotary|silu|sigmoid|gelu|activation",
    "copy": r"memcpy|memset|copy|fill|clone|::to$|cat|index|gather|scatter|embedding|zero|^seat_|^append_",
}
KINDS = (*_PATTERNS, OTHER)
_COMPILED = {kind: re.compile(pattern, re.IGNORECASE) for kind, pattern in _PATTERNS.items()}

MAX_KERNELS = 12


@dataclass(frozen=True)
class TraceEvent:
    """A timed event. Times are microseconds on the trace's clock."""

    name: str
    start_us: float
    duration_us: float
    thread: str = ""

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us


@dataclass(frozen=True)
class Trace:
    """The parts of a trace that are summarised and drawn. Each list is in order of time."""

    spans: Sequence[TraceEvent]
    """The engine's own spans."""
    kernels: Sequence[TraceEvent]
    """Kernels and copies of the device."""
    operators: Sequence[TraceEvent]
    """The outermost torch operators of each host thread."""

    @property
    def steps(self) -> list[TraceEvent]:
        return [event for event in self.spans if event.name == STEP_SPAN]

    @property
    def has_kernels(self) -> bool:
        """Whether device kernels were recorded; otherwise the host's operators are used instead."""
        return bool(self.kernels)

    @property
    def computing(self) -> Sequence[TraceEvent]:
        """The events that did the arithmetic: kernels, or torch operators on a CPU."""
        return self.kernels or self.operators


def move_spans(raw: dict[str, Any], recorded: Sequence[HostSpan]) -> dict[str, Any]:
    """torch's exported trace with the engine's spans on their own track, with the arguments they were given."""
    annotations = sorted(filter(_is_span, raw["traceEvents"]), key=lambda event: float(event["ts"]))
    others = [event for event in raw["traceEvents"] if not _is_span(event) and not _is_shadow(event)]
    arguments: dict[str, deque[Mapping[str, object]]] = defaultdict(deque)
    for span in sorted(recorded, key=lambda span: span.start_ns):
        arguments[span.name].append(span.args)
    moved = []
    for event in annotations:
        name = event["name"].removeprefix(SPAN_PREFIX)
        moved.append(_track_event(event, name, arguments[name].popleft() if arguments[name] else {}))
    return {**raw, "traceEvents": [*_track_names(annotations), *moved, *others]}


def write_trace(path: str, raw: dict[str, Any]) -> None:
    """Write a trace file for Perfetto and chrome://tracing."""
    try:
        Path(path).write_text(json.dumps(raw), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"Cannot write the profile '{path}': {error.strerror}.") from error


def read_trace(path: str) -> Trace:
    """Read a trace that `--profile` has written."""
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
        return parse_trace(raw)
    except OSError as error:
        raise ConfigError(f"Cannot read the trace '{path}': {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"'{path}' is not a trace written by --profile.") from error


def parse_trace(raw: dict[str, Any]) -> Trace:
    """Sort the events of a trace into spans, kernels and operators."""
    by_category: dict[str, list[TraceEvent]] = defaultdict(list)
    for event in raw["traceEvents"]:
        if event.get("ph") == "X":
            by_category[event.get("cat", "")].append(
                TraceEvent(event["name"], float(event["ts"]), float(event["dur"]), str(event.get("tid", "")))
            )
    kernels = [event for category in DEVICE_CATEGORIES for event in by_category[category]]
    return Trace(
        spans=_in_order(by_category[SPAN_CATEGORY]),
        kernels=_in_order(kernels),
        operators=_in_order(_outermost(by_category[HOST_OPERATOR_CATEGORY])),
    )


def _is_span(event: dict[str, Any]) -> bool:
    return event.get("cat") == "user_annotation" and str(event["name"]).startswith(SPAN_PREFIX)


def _is_shadow(event: dict[str, Any]) -> bool:
    """Whether this is torch's copy of an annotation on a device track, stretched over the kernels it launched."""
    return event.get("cat") == "gpu_user_annotation" and str(event["name"]).startswith(SPAN_PREFIX)


def _track_event(event: dict[str, Any], name: str, args: Mapping[str, object]) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": SPAN_CATEGORY,
        "name": name,
        "pid": _TRACK,
        "tid": event["tid"],
        "ts": event["ts"],
        "dur": event["dur"],
        "args": {key: value if isinstance(value, (int, float)) else str(value) for key, value in args.items()},
    }


def _track_names(annotations: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    threads = dict.fromkeys(event["tid"] for event in annotations)
    names = [
        {"ph": "M", "name": "process_name", "pid": _TRACK, "tid": 0, "args": {"name": _TRACK_NAME}},
        {"ph": "M", "name": "process_sort_index", "pid": _TRACK, "tid": 0, "args": {"sort_index": -1}},
    ]
    for number, thread in zip(itertools.count(1), threads):
        name = "engine" if number == 1 else f"engine, thread {number}"
        names.append({"ph": "M", "name": "thread_name", "pid": _TRACK, "tid": thread, "args": {"name": name}})
    return names


def _in_order(events: Sequence[TraceEvent]) -> list[TraceEvent]:
    return sorted(events, key=lambda event: event.start_us)


def _outermost(events: Sequence[TraceEvent]) -> list[TraceEvent]:
    """Operators that no other operator of the same thread contains."""
    ends: dict[str, float] = {}
    found = []
    for event in sorted(events, key=lambda event: (event.start_us, -event.duration_us)):
        if event.start_us >= ends.get(event.thread, float("-inf")):
            found.append(event)
            ends[event.thread] = event.end_us
    return found


def kind_of(name: str) -> str:
    """One of `KINDS`."""
    for kind, pattern in _COMPILED.items():
        if pattern.search(name):
            return kind
    return OTHER


def short_name(name: str, width: int = 56) -> str:
    """A kernel's name without return type, namespaces' boilerplate and template arguments, cut to `width`."""
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "").replace("at::native::", "")
    head = plain.split("<", 1)[0].split("(", 1)[0] or plain
    return head if len(head) <= width else head[: width - 1] + "…"


@dataclass(frozen=True)
class TimeShare:
    """The time of one name per step."""

    name: str
    kind: str
    us_per_step: float
    calls_per_step: float


@dataclass(frozen=True)
class StepSummary:
    """Means over the steps of a trace. The device's times are those inside the window of the steps."""

    num_steps: int
    step_us: float
    """From the start of a step to the start of the next."""
    host: Sequence[TimeShare]
    """Spans by name, the longest first. A span inside another counts in both."""
    has_kernels: bool
    """False on a CPU: then the shares below are of the host's torch operators."""
    computing: Sequence[TimeShare]
    """All names, the longest first."""
    busy_us: float
    """Time in which at least one kernel ran."""
    gaps_per_step: float
    longest_gap_us: float

    @property
    def idle_us(self) -> float:
        return max(0.0, self.step_us - self.busy_us)

    @property
    def busy_share(self) -> float:
        return min(1.0, self.busy_us / self.step_us) if self.step_us else 0.0

    def by_kind(self) -> dict[str, float]:
        """Microseconds per step of each kind of kernel, the longest first."""
        kinds: dict[str, float] = defaultdict(float)
        for share in self.computing:
            kinds[share.kind] += share.us_per_step
        return dict(sorted(kinds.items(), key=lambda item: -item[1]))


def summarise(trace: Trace) -> StepSummary:
    """Sum up a trace that has at least one step."""
    steps = trace.steps
    if not steps:
        raise HeadwayError("The trace has no step of the engine in it.")
    start_us, end_us = steps[0].start_us, max(step.end_us for step in steps)
    inside = [clipped for event in trace.computing if (clipped := _clip(event, start_us, end_us)) is not None]
    spans = [event for event in trace.spans if event.name != STEP_SPAN]
    busy = _union(inside)
    gaps = [later[0] - earlier[1] for earlier, later in itertools.pairwise(busy)]
    return StepSummary(
        num_steps=len(steps),
        step_us=(end_us - start_us) / len(steps),
        host=_shares(spans, len(steps)),
        has_kernels=trace.has_kernels,
        computing=_shares(inside, len(steps)),
        busy_us=sum(end - start for start, end in busy) / len(steps),
        gaps_per_step=len(gaps) / len(steps),
        longest_gap_us=max(gaps, default=0.0),
    )


def _clip(event: TraceEvent, start_us: float, end_us: float) -> TraceEvent | None:
    """The part of an event inside the window, if there is one."""
    start, end = max(event.start_us, start_us), min(event.end_us, end_us)
    return TraceEvent(event.name, start, end - start, event.thread) if end > start else None


def _union(events: Iterable[TraceEvent]) -> list[tuple[float, float]]:
    """The intervals in which any of the events ran, in order."""
    merged: list[tuple[float, float]] = []
    for event in sorted(events, key=lambda event: event.start_us):
        if merged and event.start_us <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], event.end_us))
        else:
            merged.append((event.start_us, event.end_us))
    return merged


def _shares(events: Iterable[TraceEvent], num_steps: int) -> list[TimeShare]:
    durations: dict[str, list[float]] = defaultdict(list)
    for event in events:
        durations[event.name].append(event.duration_us)
    shares = [
        TimeShare(short_name(name), kind_of(name), sum(times) / num_steps, len(times) / num_steps)
        for name, times in durations.items()
    ]
    return sorted(shares, key=lambda share: -share.us_per_step)
