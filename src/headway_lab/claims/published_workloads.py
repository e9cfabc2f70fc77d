"""The published workloads: their lengths, arrivals and predicted lengths.

Real data is used where it is given, else a stand-in of the same lengths. A made-up prediction is the true length times
lognormal noise, with as much noise as gives the wanted rank correlation.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.errors import ConfigError
from headway_lab.bench.capacity_search import Capacity, Limits, find_capacity
from headway_lab.bench.online_metrics import Objective, OnlineMetrics
from headway_lab.claims.context import Context, NormalisedMetrics, Span
from headway_lab.predictor.training import count_pairs
from headway_lab.workload import BenchRequest, Work, workload_from_options

AZURE = "azure_conv_first2000.csv"
SARATHI = "sarathi_sharegpt4_lengths_first2048.csv"
CHAT_MAX_INPUT, CHAT_MAX_OUTPUT = 7_000, 1_000
FACTORS = (0.2, 0.5, 1.0, 1.2, 2.0, 3.0)
"""By application, the tokens of an answer for each token of its prompt."""

PREDICTED = "predicted_lengths.jsonl"
"""Lines with prompt_token_ids, num_output_tokens and predicted_tokens, as benchmarks/policies.py writes them."""
TAU = 0.46
"""Kendall's rank correlation of a trained ranker with the lengths of answers to prompts it has not seen."""


@dataclass(frozen=True)
class Drawn:
    """Requests at a rate of one a second, and the source of their lengths."""

    work: list[BenchRequest]
    text: str

    def at_rate(self, rate: float, count: int | None = None) -> list[BenchRequest]:
        """The first `count` requests, arriving at another rate."""
        return [dataclasses.replace(one, arrival_s=one.arrival_s / rate) for one in self.work[:count]]

    def at_once(self, count: int | None = None) -> list[BenchRequest]:
        """The first `count` requests, all there from the start."""
        return [dataclasses.replace(one, arrival_s=0.0) for one in self.work[:count]]


def anyscale(context: Context, count: int) -> Drawn:
    """Prompts of 512, answers exponential with mean 128, drawn again above 1,536."""
    part = context.divisor
    output = {"kind": "exponential", "mean": 128 / part, "cap": 1536 // part}
    text = f"{count} prompts of {512 // part} tokens, answers exponential with mean {128 // part} up to {1536 // part}"
    return draw(context, count, {"input": 512 // part, "output": output}, text)


def orca(context: Context, count: int) -> Drawn:
    """Prompts of 32 to 512 tokens, answers of 1 to 128."""
    part = context.divisor
    lengths = {
        "input": {"kind": "uniform", "low": max(1, 32 // part), "high": 512 // part},
        "output": {"kind": "uniform", "low": 1, "high": 128 // part},
    }
    return draw(context, count, lengths, f"in U({max(1, 32 // part)}, {512 // part}), out U(1, {128 // part})")


def chat(context: Context, count: int) -> Drawn:
    """A chat service: the recorded lengths of Azure's, or lognormal ones with the same means."""
    part = context.divisor
    limits = {"max_input": CHAT_MAX_INPUT // part, "min_output": 2, "max_output": CHAT_MAX_OUTPUT // part}
    if (file := context.data_file(AZURE)) is not None and part == 1:
        trace = {"file": str(file), "order": "random"}
        return draw(context, count, {"trace": trace, "limits": limits}, "lengths of the Azure chat trace")
    lengths = {
        "input": {"kind": "lognormal", "mean": 1105 / part, "sigma": 0.8, "cap": CHAT_MAX_INPUT // part},
        "output": {"kind": "lognormal", "mean": 265 / part, "sigma": 0.7, "cap": CHAT_MAX_OUTPUT // part},
        "limits": limits,
    }
    text = f"lognormal lengths with the means of the Azure chat trace ({1105 // part} in, {265 // part} out)"
    return draw(context, count, lengths, text)


def applications(context: Context, count: int) -> Drawn:
    """Requests in turn from several applications: an answer has about `FACTORS` times the tokens of its prompt."""
    part = context.divisor
    prompts = {"kind": "lognormal", "median": 150 / part, "sigma": 0.9, "cap": 1000 // part}
    # The answers of this draw are not lengths: they are the true lengths in percent of the usual ones.
    drawn = draw(context, count, {"input": prompts, "output": {"kind": "lognormal", "median": 100, "sigma": 0.25}}, "")
    work = [
        dataclasses.replace(
            one,
            num_output_tokens=max(
                1, round(one.num_prompt_tokens * FACTORS[place % len(FACTORS)] * one.num_output_tokens / 100)
            ),
        )
        for place, one in enumerate(drawn.work)
    ]
    text = (
        f"{len(FACTORS)} applications whose answers are {FACTORS[0]:g} to {FACTORS[-1]:g} times as long as their "
        f"prompts (median {150 // part} tokens)"
    )
    return Drawn(work, text)


def spread_answers(context: Context, count: int) -> Drawn:
    """Answers of 10 to 500 tokens with a mean near 100, to prompts with a mean of 256."""
    part = context.divisor
    low, high = max(1, 10 // part), 500 // part
    lengths = {
        "input": {"kind": "lognormal", "mean": 256 / part, "sigma": 0.8, "cap": 1536 // part},
        "output": {"kind": "exponential", "mean": 100 / part, "cap": high},
        "limits": {"min_output": low},
    }
    text = (
        f"{count} prompts of lognormal length (mean {256 // part}, sigma 0.8), answers of {low} to {high} tokens, mean "
        f"near {100 // part}"
    )
    return draw(context, count, lengths, text)


def sharegpt(context: Context, count: int) -> Drawn:
    """The chat lengths of the Sarathi-Serve paper: in P50 1730, P90 5696; out P50 415, P90 834; 8,192 together."""
    limits = {"max_total": 8192}
    if (file := context.data_file(SARATHI)) is not None:
        trace = {"file": str(file), "order": "random"}
        return draw(context, count, {"trace": trace, "limits": limits}, "the paper's own lengths")
    lengths = {
        "input": {"kind": "lognormal", "median": 1730, "sigma": 0.93, "cap": 8000},
        "output": {"kind": "lognormal", "median": 415, "sigma": 0.545, "cap": 2000},
        "limits": limits,
    }
    return draw(context, count, lengths, "lognormal lengths with the paper's P50 and P90")


def mixed(context: Context, count: int) -> Drawn:
    """Nine short prompts for each long document; both get answers of a chat's lengths."""
    part = context.divisor
    short = draw(
        context,
        count,
        {
            "input": {"kind": "lognormal", "median": 200 / part, "sigma": 0.6, "cap": 1000 // part},
            "output": {"kind": "lognormal", "median": 150 / part, "sigma": 0.6, "cap": 600 // part},
        },
        "",
    )
    long_input = {"kind": "uniform", "low": 4000 // part, "high": 7000 // part}
    documents = draw(context, count, {"input": long_input, "output": 150 // part}, "")
    work = [
        dataclasses.replace(one, prompt_token_ids=documents.work[place].prompt_token_ids) if place % 10 == 5 else one
        for place, one in enumerate(short.work)
    ]
    text = (
        f"nine prompts of about {200 // part} tokens to one of {4000 // part} to {7000 // part}, "
        f"answers of about {150 // part}"
    )
    return Drawn(work, text)


def shared_prefix(context: Context, count: int, *, prefix: int, tail: int, out: int) -> Drawn:
    """Requests that all begin with the same tokens."""
    content = {"kind": "shared_prefix", "prefixes": 1, "prefix_tokens": prefix}
    text = f"{count} requests, {prefix:,} common + {tail} own tokens in, {out} out"
    return draw(context, count, {"input": tail, "output": out, "content": content}, text)


def power_law(context: Context, count: int) -> Drawn:
    """Many short and a few very long requests: Zipf-like lengths with means near 256, up to 6,000 tokens together."""
    lengths = {"kind": "zipf", "exponent": 1.4, "low": 16, "high": 3000}
    text = "power-law lengths (16 to 3,000 in and out)"
    return draw(context, count, {"input": lengths, "output": lengths}, text)


def equal(context: Context, count: int, *, num_in: int, num_out: int) -> Drawn:
    return draw(context, count, {"input": num_in, "output": num_out}, f"{num_in} tokens in, {num_out} out")


def with_options(work: Work, options: Sequence[dict[str, Any]]) -> list[BenchRequest]:
    """The same requests, each with these further options."""
    return [
        dataclasses.replace(one, options=dataclasses.replace(one.options, **more))
        for one, more in zip(work, options, strict=True)
    ]


def draw(context: Context, count: int, options: dict[str, Any], text: str) -> Drawn:
    """A workload with these options, one request a second. The `text` says what it is."""
    workload = workload_from_options({"arrivals": {"kind": "poisson", "rate": 1.0}, **options})
    return Drawn(workload.draw(vocab_size=context.testbed.vocab_size, num_requests=count), text)


@dataclass(frozen=True)
class Predicted:
    """Requests with a predicted length for each."""

    drawn: Drawn
    lengths: list[float]
    text: str

    @property
    def tau(self) -> float:
        """Kendall's tau of the predictions with the true lengths."""
        return _tau(self.lengths, [one.num_output_tokens for one in self.drawn.work])


def predicted_chat(context: Context, count: int) -> Predicted:
    """Chat requests with the predictions in the data directory, or made-up ones if it has none."""
    file = context.data_file(PREDICTED)
    if file is not None and context.divisor == 1:
        return _from_file(context, file, count)
    drawn = chat(context, count)
    lengths = noisy_lengths([one.num_output_tokens for one in drawn.work], tau=TAU)
    made = Predicted(drawn, lengths, "")
    return Predicted(drawn, lengths, f"predictions made up, with a Kendall tau of {made.tau:.2f}")


def predicted_applications(context: Context, count: int) -> Predicted:
    """Requests of several applications, such as translating or summing up. An answer's length is about its
    application's factor times that of its prompt, and this product is the prediction."""
    drawn = applications(context, count)
    lengths = [max(1.0, one.num_prompt_tokens * FACTORS[place % len(FACTORS)]) for place, one in enumerate(drawn.work)]
    made = Predicted(drawn, lengths, "")
    return Predicted(drawn, lengths, f"predicted from application and prompt, with a Kendall tau of {made.tau:.2f}")


def noisy_lengths(lengths: Sequence[int], *, tau: float, seed: int = 0) -> list[float]:
    """Predictions with this rank correlation, as close as bisecting the noise gets."""
    rng = random.Random(f"{seed}/predictions")
    noise = [rng.gauss(0.0, 1.0) for _ in lengths]

    def predictions(sigma: float) -> list[float]:
        return [length * math.exp(sigma * one) for length, one in zip(lengths, noise)]

    low, high = 0.0, 8.0
    for _ in range(30):
        middle = (low + high) / 2
        if _tau(predictions(middle), lengths) > tau:
            low = middle
        else:
            high = middle
    return predictions((low + high) / 2)


def _tau(predicted: Sequence[float], actual: Sequence[int]) -> float:
    return count_pairs(predicted, actual).kendall_tau


def _from_file(context: Context, file: Path, count: int) -> Predicted:
    rows = [row for row in map(json.loads, file.read_text(encoding="utf-8").splitlines()) if "predicted_tokens" in row]
    if not rows:
        raise ConfigError(f"'{file}' has no row with predicted_tokens.")
    rng, arrival_s = random.Random("predicted chat"), 0.0
    work, lengths = [], []
    for row in rng.choices(rows, k=count):
        arrival_s += rng.expovariate(1.0)
        ids = [token_id % context.testbed.vocab_size for token_id in row["prompt_token_ids"]]
        work.append(BenchRequest(ids, max(1, row["num_output_tokens"]), arrival_s=arrival_s))
        lengths.append(max(1e-6, float(row["predicted_tokens"])))
    drawn = Drawn(work, f"prompts and answer lengths of {file.name}")
    made = Predicted(drawn, lengths, "")
    return Predicted(drawn, lengths, f"predictions of that file, with a Kendall tau of {made.tau:.2f}")


def saturation(context: Context, label: str, drawn: Drawn, **options: Any) -> float:
    """Requests served each second when all of them are there at once."""
    return context.run(f"{label}, all at once", drawn.at_once(), **options).requests_s


def capacity_of(
    context: Context,
    label: str,
    drawn: Drawn,
    objectives: Sequence[Objective],
    *,
    start: float,
    span: Span,
    **options: Any,
) -> Capacity:
    """The highest rate that meets the objectives."""

    def measure(rate: float) -> OnlineMetrics:
        work = drawn.at_rate(rate, span.count(rate))
        return NormalisedMetrics.of_run(context.run(f"{label}, {rate:.3g} requests/s", work, **options))

    precision = 0.1 if context.is_quick else 0.05
    limits = Limits(start=start, lowest=start / 256, highest=start * 64, precision=precision, max_probes=14)
    return find_capacity(measure, objectives, limits=limits)
