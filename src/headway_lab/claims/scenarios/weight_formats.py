"""Weights in 8 and 4 bits: what they are worth by the size of the batch.

On an engine the formats are measured in turn, each loaded anew. Elsewhere the outcome is what an H200 gave before: the
rows of `recorded/h200_weight_formats.json`, of docs/results/quantization.md, each with its commit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway_lab.claims.claim import Chart, Line, Outcome, sentences, times
from headway_lab.claims.context import Claim, Context, Variant, run_alternating
from headway_lab.claims.published_workloads import equal

RECORDED = Path(__file__).parents[1] / "recorded" / "h200_weight_formats.json"


@dataclass(frozen=True)
class FormatsSetup:
    """The formats by kind of device, the first of which is the base, and the batches."""

    formats: Mapping[str, Mapping[str, str]]
    """Kind of device → name → the option `quantization`."""
    batches: Mapping[str, tuple[int, ...]]
    num_in: int = 128
    num_out: int = 128


SETUP = FormatsSetup(
    formats={
        "cpu": {"float32": "none", "int8": "int8", "4 bits": "int4"},
        "cuda": {"bf16": "none", "FP8": "fp8", "INT4": "int4"},
    },
    batches={"cpu": (1, 4, 16), "cuda": (1, 64, 256)},
)
Speeds = dict[str, dict[int, float]]
"""Format → requests at once → output tokens per second; the base first."""


def measure_weight_formats(context: Context) -> Outcome:
    return _measured(context) if context.where == "engine" else _recorded()


def _measured(context: Context) -> Outcome:
    device = "cpu" if context.testbed.is_cpu else "cuda"
    batches = SETUP.batches[device]
    drawn = equal(
        context, batches[-1], num_in=SETUP.num_in // context.divisor, num_out=SETUP.num_out // context.divisor
    )
    speeds: Speeds = {}
    try:
        for name, quantization in SETUP.formats[device].items():
            context.testbed.use(quantization=quantization)
            best = run_alternating(
                context, {f"{name}, {size} at once": Variant(drawn.at_once(size), {}) for size in batches}
            ).best
            speeds[name] = {size: run.output_tok_s for size, run in zip(batches, best.values())}
    finally:
        context.testbed.use()
    return _outcome(
        speeds,
        workload=f"{drawn.text}, {_listed(batches)} requests at once{context.divided}",
        bound="",
        where="engine",
        place="",
    )


def _recorded() -> Outcome:
    document = json.loads(RECORDED.read_text(encoding="utf-8"))
    runs = _by_run(document["rows"])
    commits = [commit for model, commit in runs if model == "llama31-8b"]
    speeds = runs["llama31-8b", commits[-1]]
    gib = document["weights_gib"]["llama31-8b"]
    ideal = ", ".join(f"{times(gib['bf16'] / gib[name])} for {name}" for name in ("FP8", "INT4"))
    others = {
        f"{name}, {model}, {commit}": _columns(own, base)
        for (model, commit), formats in runs.items()
        for base in [next(iter(formats.values()))]
        for name, own in formats.items()
    }
    small = runs["qwen3-0.6b", commits[-1]]
    return _outcome(
        speeds,
        workload="Llama 3.1 8B: 128 tokens in and 256 out, 1 and 64 requests at once; 256 of 100 to 1,024 tokens "
        "in and out",
        bound=f"Reading the weights alone would give {ideal}: the output layer stays in bf16, and attention and the "
        f"sampler read as before. A model of 0.6B gains {times(small['FP8'][1] / small['bf16'][1])} with one request: "
        "its step is launches and latency more than weights.",
        where="recorded",
        place=f"recorded: {document['machine']}, {document['date']}, {' and '.join(commits)}; {document['command']}",
        numbers=others,
    )


def _by_run(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], Speeds]:
    """(model, commit) → speeds. A lone request's is recorded as milliseconds per token."""
    sizes = {"b1": 1, "b64": 64, "nano": 256}
    runs: dict[tuple[str, str], Speeds] = {}
    for row in rows:
        speed = 1e3 / row["value"] if row["scenario"] == "b1" else row["value"]
        formats = runs.setdefault((row["model"], row["commit"]), {})
        formats.setdefault(row["format"], {})[sizes[row["scenario"]]] = speed
    return runs


def _outcome(
    speeds: Speeds,
    *,
    workload: str,
    bound: str,
    where: Any,
    place: str,
    numbers: Mapping[str, Mapping[str, float]] | None = None,
) -> Outcome:
    base_name, base = next(iter(speeds.items()))
    gains = {
        name: {size: speed / base[size] for size, speed in own.items()}
        for name, own in speeds.items()
        if name != base_name
    }
    best = max(gains, key=lambda name: gains[name][1])
    return Outcome(
        value=gains[best][1],
        unit="× at 1",
        ours="; ".join(
            f"{name} {' / '.join(times(gain) for gain in own.values())} at {_listed(own)}"
            for name, own in gains.items()
        ),
        workload=workload,
        differs=_differs(gains, base_name, best, bound),
        where=where,
        chart=Chart(
            f"Throughput with quantised weights over that with {base_name}",
            f"times the throughput with {base_name}",
            lines=tuple(Line(name, list(own), list(own.values())) for name, own in gains.items()),
            x="requests in the batch",
            log_x=True,
            levels={"published, from": 2.0, "published, to": 4.0, base_name: 1.0},
        ),
        numbers=numbers or {name: _columns(own, base) for name, own in speeds.items()},
        place=place,
    )


def _columns(own: Mapping[int, float], base: Mapping[int, float]) -> dict[str, float]:
    columns: dict[str, float] = {}
    for size, speed in own.items():
        columns |= {f"{size} at once: output tokens/s": speed, f"{size} at once: ratio": speed / base[size]}
    return columns


def _listed(sizes: Sequence[int] | Mapping[int, float]) -> str:
    return " / ".join(map(str, sizes))


def _differs(gains: Mapping[str, Mapping[int, float]], base: str, best: str, bound: str) -> str:
    own = gains[best]
    last = list(own)[-1]
    if abs(own[last] / own[1] - 1) < 0.1:
        trend = f"as much to {last}: bytes and arithmetic of a product shrink alike"
    elif own[last] < own[1]:
        trend = f"{times(own[last])} to {last}: there codes are turned into numbers for more arithmetic than they save"
    else:
        trend = f"{times(own[last])} to {last}: there products of codes are cheaper arithmetic, too"
    return sentences(
        [
            f"Published ratios are against 16-bit weights in other programs; the base here is {base} with kernels as "
            "good as those of the codes.",
            f"{best} is worth {times(own[1])} to a lone request, whose step is mostly reading weights, and {trend}.",
            bound,
        ]
    )


WEIGHT_FORMATS = Claim(
    id="weight-formats",
    title="Quantised weights by the size of the batch",
    published="Weights in 8 or 4 bits make generation 2–4× as fast, most where memory bandwidth is the limit.",
    source="Lin et al., AWQ (MLSys 2024); Frantar et al., GPTQ (ICLR 2023); guides to serving engines",
    workload="few and many requests at once",
    method="The same requests with each format, loaded anew; without an engine, the rows that an H200 gave.",
    measure=measure_weight_formats,
    engine="always",
)
