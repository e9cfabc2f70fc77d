"""Which of the core's measured numbers matter: each is doubled and halved, and simulated rows say what that changes.

    python benchmarks/tuning.py --trace azure_conv_first2000.csv            a line for every number
    python benchmarks/tuning.py --trace azure_conv_first2000.csv --only stretch free_tokens
    python benchmarks/tuning.py --trace azure_conv_first2000.csv --rows     the rows as they are, to compare two trees

The rows are those that the numbers were chosen with (`headway.core.tuning`), on a calibrated machine. Steps take what
the cost model says, without noise, so a difference is the number's. `online` has no target for the time between tokens;
with `target`, that of the engine is kept (20 ms). `long` mixes prompts of 8,000 to 30,000 tokens into chat requests.
`guess` has as many requests at once as its name says, and guesses that bring 2.5 tokens a step, or none.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from headway.core.tuning import SPECULATION, STEP_TIME
from headway_lab.bench.offline_bench import SCENARIOS
from headway_lab.bench.online_metrics import OnlineMetrics
from headway_lab.sim.calibration import Calibration
from headway_lab.sim.setup import set_up
from headway_lab.sim.simulate import Simulation, simulate
from headway_lab.workload.bench_requests import BenchRequest, LengthRange, draw_work

RECORDS = {"STEP_TIME": STEP_TIME, "SPECULATION": SPECULATION}
VOCAB_SIZE = 10_000
GUESSING = (1, 4, 16, 64, 256)
Row = dict[str, float]


class Rows:
    """The work of all rows, drawn once."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._calibration = Calibration.find(options.calibration)
        self._online = {
            speedup: SCENARIOS["online"].draw(0, VOCAB_SIZE, trace=options.trace, speedup=speedup)[: options.requests]
            for speedup in (2.5, 4.4)
        }

    def of(self, record: str) -> dict[str, Callable[[], Row]]:
        """Those that a record's numbers were chosen with."""
        if record == "SPECULATION":
            return {
                f"guess {size} at {mean:g}": lambda size=size, mean=mean: self._guess(size, mean)  # type: ignore[misc]
                for size in GUESSING
                for mean in (2.5, 1.0)
            }
        rows: dict[str, Callable[[], Row]] = {
            f"{name} {speedup:g}": lambda work=work, options=options: self._arriving(work, **options)  # type: ignore[misc]
            for name, options in (("online", {"target_itl_ms": 1000.0}), ("target", {}))
            for speedup, work in self._online.items()
        }
        return {**rows, "long": lambda: self._arriving(self._with_long_prompts()), "nano": self._nano}

    def _run(self, work: list[BenchRequest], **options: Any) -> Simulation:
        setup = set_up(self._calibration, options)
        return simulate(work, setup.machine, setup.scheduler, setup.cache, seed=None)

    def _arriving(self, work: list[BenchRequest], **options: Any) -> Row:
        run = self._run(work, **options)
        metrics = OnlineMetrics.of(run.timelines, run.duration_s)
        latencies = {
            f"{name} P{percent}": metrics.latencies[name].percentiles[percent]
            for name in ("ttft", "itl")
            for percent in (50, 99)
        }
        return {**latencies, "tpot P50": metrics.latencies["tpot"].percentiles[50], "tok/s": metrics.output_tok_s}

    def _with_long_prompts(self) -> list[BenchRequest]:
        rng, work = random.Random(0), list(self._online[2.5])
        for place in range(20, len(work), 40):
            prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(8_000, 30_000))]
            work[place] = dataclasses.replace(work[place], prompt_token_ids=prompt)
        return work

    def _nano(self) -> Row:
        run = self._run(SCENARIOS["nano"].draw(0, VOCAB_SIZE), target_itl_ms=1000.0)
        return {"tok/s": sum(len(timeline.token_times_s) for timeline in run.timelines) / run.duration_s}

    def _guess(self, size: int, mean: float) -> Row:
        """The mean of a few works: which guesses are right is drawn."""
        guessing, ratios = {"speculation": "ngram", "spec_synthetic_acceptance": mean}, []
        for num_in in (96, 112, 128, 144):
            lengths = {"input_len": LengthRange.exactly(num_in), "output_len": LengthRange.exactly(256)}
            work = draw_work(random.Random(0), size, vocab_size=VOCAB_SIZE, **lengths)
            plain_s, guessing_s = (
                self._run(work, target_itl_ms=1000.0, **options).duration_s for options in ({}, guessing)
            )
            ratios.append(plain_s / guessing_s)
        return {"ratio": statistics.fmean(ratios)}


@contextmanager
def replaced(record: str, **numbers: float) -> Iterator[None]:
    """In all modules that go by the record."""
    before = RECORDS[record]
    users = [module for module in list(sys.modules.values()) if getattr(module, record, None) is before]
    for module in users:
        setattr(module, record, dataclasses.replace(before, **numbers))
    try:
        yield
    finally:
        for module in users:
            setattr(module, record, before)


def measured(rows: dict[str, Callable[[], Row]]) -> dict[str, float]:
    return {f"{name}: {key}": value for name, row in rows.items() for key, value in row().items()}


def differences(found: dict[str, float], base: dict[str, float], most: int = 4) -> str:
    """The largest ones."""
    changes = {key: found[key] / value - 1.0 for key, value in base.items() if value}
    largest = sorted(changes, key=lambda key: -abs(changes[key]))[:most]
    return ", ".join(f"{key} {changes[key]:+.1%}" for key in largest if abs(changes[key]) >= 0.005) or "–"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", required=True, help="a CSV file with arrival_s, input_tokens, output_tokens")
    parser.add_argument("--calibration", default="h200-llama31-8b")
    parser.add_argument("--requests", type=int, default=600, help="of the trace")
    parser.add_argument("--records", nargs="+", choices=RECORDS, default=list(RECORDS))
    parser.add_argument("--only", nargs="+", help="names of numbers")
    parser.add_argument("--rows", action="store_true", help="print the rows, and change nothing")
    options = parser.parse_args()
    rows = Rows(options)
    for record in options.records:
        base = measured(rows.of(record))
        if options.rows:
            print(*(f"{name:<32}{value:>12.4f}" for name, value in base.items()), sep="\n")
            continue
        print(f"| {record.lower()} | | doubled | halved |\n|---|--:|---|---|", flush=True)
        for field in dataclasses.fields(RECORDS[record]):
            if options.only and field.name not in options.only:
                continue
            value, cells = getattr(RECORDS[record], field.name), []
            for factor in (2, 0.5):
                with replaced(record, **{field.name: type(value)(value * factor)}):
                    cells.append(differences(measured(rows.of(record)), base))
            print(f"| `{field.name}` | {value:g} | {cells[0]} | {cells[1]} |", flush=True)


if __name__ == "__main__":
    main()
