"""The fixed scenarios: everything about a measurement but the model and the machine, under a short name.

Common to all: temperature 0.6, end-of-sequence ignored, nothing detokenised, prompts of random ids from seed 0, all
requests there at once (`online` apart), the engine warm.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from headway.errors import ConfigError
from headway.lab.workload.requests import BenchRequest, LengthRange, TraceLimits, draw_work, trace_work

SCENARIO_TEMPERATURE = 0.6


@dataclass(frozen=True)
class Scenario:
    """A fixed piece of work."""

    name: str
    num_requests: int
    input_len: LengthRange
    output_len: LengthRange
    max_model_len: int = 4096
    is_online: bool = False
    """Requests arrive as in a recorded trace; the lengths above are the limits that the trace's own are clamped to."""
    num_rounds: int = 3
    num_warmup_rounds: int = 1

    @property
    def summary(self) -> str:
        """What it is, in a line."""
        plural = "s" if self.num_requests != 1 else ""
        arrivals = ", arriving as in a trace" if self.is_online else ""
        return f"{self.num_requests:,} request{plural}, {self.input_len} in, {self.output_len} out{arrivals}"

    def draw(
        self, seed: int, vocab_size: int, *, trace: str | None = None, speedup: float = TraceLimits.speedup
    ) -> list[BenchRequest]:
        """The requests. An online scenario needs the file of its trace."""
        rng = random.Random(seed)
        if self.is_online:
            if trace is None:
                raise ConfigError(f"The scenario '{self.name}' replays a trace: name the file with --trace.")
            limits = TraceLimits(self.num_requests, speedup, self.input_len, self.output_len)
            return trace_work(trace, rng, vocab_size=vocab_size, limits=limits)
        return draw_work(
            rng, self.num_requests, input_len=self.input_len, output_len=self.output_len, vocab_size=vocab_size
        )


SCENARIOS: Mapping[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario("b1", 1, LengthRange.exactly(128), LengthRange.exactly(256)),
        Scenario("b64", 64, LengthRange.exactly(128), LengthRange.exactly(256)),
        Scenario("nano", 256, LengthRange(100, 1024), LengthRange(100, 1024)),
        Scenario("prefill", 128, LengthRange.exactly(2048), LengthRange.exactly(1)),
        Scenario(
            "online",
            TraceLimits.num_requests,
            TraceLimits.input_len,
            TraceLimits.output_len,
            max_model_len=8192,
            is_online=True,
            num_rounds=1,
        ),
    )
}

LATENCY_SCENARIOS = ("b1", "b64")
"""Those that make one batch of equal requests."""
