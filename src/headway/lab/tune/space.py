"""Which options are searched, and over which values. What is given on the command line stays as it is.

Values are limited to what the calibration can tell about: steps twice as large as those that were measured, no further.
The block size is not searched: steps were measured with one, and how another changes their time is not known.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.errors import ConfigError
from headway.lab.sim.calibration import Calibration
from headway.lab.sim.setup import set_up
from headway.lab.workload.requests import BenchRequest

Options = Mapping[str, Any]

_SEQS = (4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_TOKENS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
_ITLS = (0.0, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 75.0, 100.0, 150.0, 200.0, 300.0, 500.0)
_CHUNKS = (None, 32, 64, 128, 256, 512, 1024, 2048)


@dataclass(frozen=True)
class Space:
    """Values of each knob, in order where they have one."""

    calibration: Calibration
    default: Options
    """The calibrated engine's options, with those that were given."""
    knobs: Mapping[str, Sequence[Any]]
    fixed: Mapping[str, Any]
    """Options that were given; all else that is not a knob is as calibrated."""

    @staticmethod
    def of(calibration: Calibration, work: Sequence[BenchRequest], fixed: Options) -> Space:
        """What can be searched for this work on this machine."""
        setup = set_up(calibration, fixed)
        limits = setup.scheduler.limits
        default = {
            "max_num_seqs": limits.max_num_seqs,
            "max_num_batched_tokens": limits.max_num_batched_tokens,
            "target_itl_ms": limits.target_itl_ms,
            "max_chunk_tokens": setup.scheduler.max_chunk_tokens,
            "scheduling_policy": setup.scheduler.scheduling_policy,
            "prefill_mode": setup.scheduler.prefill_mode,
        }
        knobs: dict[str, Sequence[Any]] = {
            "max_num_seqs": _up_to(_SEQS, 2 * limits.max_num_seqs),
            "max_num_batched_tokens": _up_to(_TOKENS, 2 * limits.max_num_batched_tokens),
            "target_itl_ms": _ITLS,
            "max_chunk_tokens": [c for c in _CHUNKS if c is None or c < 2 * limits.max_num_batched_tokens],
            "scheduling_policy": _policies(work),
            "prefill_mode": ("chunked", "prefill-first", "decode-first"),
        }
        searched = {name: _with(values, default[name]) for name, values in knobs.items() if name not in fixed}
        return Space(calibration, default, searched, dict(fixed))

    def is_valid(self, options: Options) -> bool:
        """Whether the engine would take them, and no two of them are one thing twice."""
        if options["max_num_batched_tokens"] < options["max_num_seqs"]:
            return False
        if options["prefill_mode"] != "chunked" and options != self.default and options["target_itl_ms"]:
            return "target_itl_ms" not in self.knobs  # whole prompts are in no hurry: 0 says the same
        chunk = options["max_chunk_tokens"]
        if chunk is not None and chunk >= options["max_num_batched_tokens"] and "max_chunk_tokens" in self.knobs:
            return options == self.default
        try:
            set_up(self.calibration, {**self.fixed, **options})
        except ConfigError:
            return False
        return True

    def draw(self, rng: random.Random) -> dict[str, Any]:
        """Some valid options."""
        while True:
            drawn = {**self.default, **{name: rng.choice(values) for name, values in self.knobs.items()}}
            if self.is_valid(drawn):
                return drawn

    def neighbours(self, options: Options) -> Iterator[dict[str, Any]]:
        """Valid options that differ in one knob: of ordered ones the two next values, of others all."""
        for name, values in self.knobs.items():
            place = list(values).index(options[name])
            is_ordered = name not in ("scheduling_policy", "prefill_mode")
            near = range(max(place - 1, 0), min(place + 2, len(values))) if is_ordered else range(len(values))
            for other in near:
                changed = {**options, name: values[other]}
                if other != place and self.is_valid(changed):
                    yield changed

    def changes(self, options: Options) -> dict[str, Any]:
        """What is not as by default."""
        return {name: value for name, value in options.items() if value != self.default[name]}


def _policies(work: Sequence[BenchRequest]) -> list[str]:
    """Those that have something to go by in this work."""
    options = [request.options for request in work]
    found = ["fcfs", "mlfq", "prefix"]
    if any(one.predicted_tokens is not None for one in options):
        found += ["sjf", "srpt", "hrrn"]
    if any(one.ttft_target_s is not None or one.tpot_target_s is not None for one in options):
        found.append("slo")
    if len({one.priority for one in options}) > 1:
        found.append("priority")
    if len({one.tenant for one in options}) > 1:
        found.append("fair")
    return found


def _up_to(values: Sequence[int], most: int) -> list[int]:
    return [value for value in values if value <= most]


def _with(values: Sequence[Any], default: Any) -> Sequence[Any]:
    """The default is among the values, at its place."""
    if default in values:
        return list(values)
    if all(isinstance(value, int | float) for value in [*values, default]):
        return sorted([*values, default])
    return [*values, default]
