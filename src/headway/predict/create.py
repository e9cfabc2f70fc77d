"""Predictors by name, as options give them."""

from __future__ import annotations

from pathlib import Path

from headway.config import LENGTH_PREDICTORS
from headway.errors import ConfigError
from headway.predict.base import LengthPredictor
from headway.predict.learned_ranker import LearnedRanker
from headway.predict.oracle import OraclePredictor
from headway.predict.running_statistics import RunningStatistics


def create_predictor(choice: str) -> LengthPredictor | None:
    """The predictor of that name, or the learned one from that file; None for "none".

    "oracle" is right about requests that ignore the end-of-sequence token, such as those of replayed traces; one that
    looks lengths up is made by the program that knows them.
    """
    if choice == "none":
        return None
    if choice == "statistics":
        return RunningStatistics()
    if choice == "oracle":
        return OraclePredictor.of_fixed_lengths()
    if not Path(choice).exists():
        names = ", ".join(LENGTH_PREDICTORS)
        raise ConfigError(f"length_predictor must be {names} or a file, and there is no file '{choice}'.")
    return LearnedRanker.load(choice)
