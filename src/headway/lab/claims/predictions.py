"""Chats with predicted lengths: those of a file, or made up to be as good as a trained ranker is.

A made-up prediction is the true length times lognormal noise, with as much noise as gives the wanted rank correlation.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.errors import ConfigError
from headway.lab.claims.context import Context
from headway.lab.claims.works import FACTORS, Drawn, applications, chat
from headway.lab.workload.requests import BenchRequest
from headway.predict.training import count_pairs

PREDICTED = "predicted_lengths.jsonl"
"""Lines with prompt_token_ids, num_output_tokens and predicted_tokens, as benchmarks/policies.py writes them."""
TAU = 0.46
"""Kendall's rank correlation of a trained ranker with the lengths of answers to prompts it has not seen."""


@dataclass(frozen=True)
class Predicted:
    """Work, and a predicted length for each of its requests."""

    drawn: Drawn
    lengths: list[float]
    text: str

    @property
    def tau(self) -> float:
        """Kendall's, of the predictions with the true lengths."""
        return _tau(self.lengths, [one.num_output_tokens for one in self.drawn.work])


def predicted_chat(context: Context, count: int) -> Predicted:
    """From the data directory if there are predictions in it."""
    file = context.data_file(PREDICTED)
    if file is not None and context.divisor == 1:
        return _from_file(context, file, count)
    drawn = chat(context, count)
    lengths = noisy_lengths([one.num_output_tokens for one in drawn.work], tau=TAU)
    made = Predicted(drawn, lengths, "")
    return Predicted(drawn, lengths, f"predictions made up, with a Kendall tau of {made.tau:.2f}")


def predicted_applications(context: Context, count: int) -> Predicted:
    """Several applications, such as translating or summing up: an answer is about so many times as long as its prompt,
    which is what is predicted."""
    drawn = applications(context, count)
    lengths = [max(1.0, one.num_prompt_tokens * FACTORS[place % len(FACTORS)]) for place, one in enumerate(drawn.work)]
    made = Predicted(drawn, lengths, "")
    return Predicted(drawn, lengths, f"predicted from application and prompt, with a Kendall tau of {made.tau:.2f}")


def noisy_lengths(lengths: Sequence[int], *, tau: float, seed: int = 0) -> list[float]:
    """Predictions with this rank correlation, as near as halving the noise finds it."""
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
        ids = [token_id % context.place.vocab_size for token_id in row["prompt_token_ids"]]
        work.append(BenchRequest(ids, max(1, row["num_output_tokens"]), arrival_s=arrival_s))
        lengths.append(max(1e-6, float(row["predicted_tokens"])))
    drawn = Drawn(work, f"prompts and answer lengths of {file.name}")
    made = Predicted(drawn, lengths, "")
    return Predicted(drawn, lengths, f"predictions of that file, with a Kendall tau of {made.tau:.2f}")
