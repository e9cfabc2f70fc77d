"""The runs that three claims are about: the same requests from static batching to paged, chunked continuous batching.

Memory is what the published comparison had: OPT-13B on a 40 GB GPU leaves room for the keys and values of some 12,000
tokens. Whoever reserves memory reserves it for the longest request there can be, 2,048 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from headway.lab.claims.context import Context
from headway.lab.claims.place import Run
from headway.lab.claims.turns import Turns, Way, take_turns
from headway.lab.claims.works import anyscale
from headway.lab.workload.requests import BenchRequest

KV_TOKENS = 12_288
MAX_MODEL_LEN = 2_048

STATIC = "static, reserved"
RESERVED = "continuous, reserved"
PAGED = "continuous, paged"
CHUNKED = "continuous, paged, chunked"

MODES: dict[str, dict[str, Any]] = {
    STATIC: {"batching": "static", "kv_allocation": "contiguous-max", "prefill_mode": "prefill-first"},
    RESERVED: {"kv_allocation": "contiguous-max", "prefill_mode": "prefill-first"},
    PAGED: {"prefill_mode": "prefill-first"},
    CHUNKED: {"prefill_mode": "chunked"},
}


@dataclass(frozen=True)
class EraRuns:
    """By mode."""

    turns: Turns
    work: Sequence[BenchRequest]
    workload: str
    kv_tokens: int
    max_model_len: int

    @cached_property
    def runs(self) -> dict[str, Run]:
        """The fastest round of each mode."""
        return self.turns.best

    def ratio(self, mode: str, base: str = STATIC) -> float:
        """Of throughput."""
        return self.runs[mode].total_tok_s / self.runs[base].total_tok_s

    @property
    def numbers(self) -> dict[str, dict[str, float]]:
        """Side by side."""
        return {
            mode: {
                "tokens/s": run.total_tok_s,
                "to static": self.ratio(mode),
                "requests in the batch": run.mean_batch,
                "KV memory wasted, %": 100 * run.mean_waste,
            }
            for mode, run in self.runs.items()
        }


def era_runs(context: Context) -> EraRuns:
    """Measured once for all claims that need them."""
    return context.once("eras", lambda: _measure(context))


def _measure(context: Context) -> EraRuns:
    kv_tokens, max_model_len = KV_TOKENS // context.divisor, MAX_MODEL_LEN // context.divisor
    drawn = anyscale(context, context.sized(tiny=20, short=300, full=1000, gpu=300))
    work = drawn.at_once()
    room = {"kv_tokens": kv_tokens, "max_model_len": max_model_len}
    turns = take_turns(context, {mode: Way(work, {**room, **options}) for mode, options in MODES.items()})
    workload = (
        f"{drawn.text}, all at once; KV memory for {kv_tokens:,} tokens, requests of up to {max_model_len:,}"
        f"{context.divided}"
    )
    return EraRuns(turns, work, workload, kv_tokens, max_model_len)
