"""Training of the learned ranker: which objective and how many trees is decided by measurement, not by taste.

Two objectives are tried. `regression` fits a root of the length; `lambdarank` fits the order inside random
groups of requests, as a scheduler sees them in its queue. Each is trained on all folds but one and asked about that
one, in turn; folds do not divide conversations. The objective and the number of trees with the highest Kendall tau
there win, and the final model is trained on everything. The scores of the held-back folds also make the table from
score to length, because the scores of requests that a model was trained on are too good.

Everything is decided by the seed, and one thread is used: the same log gives the same model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.predict.calibration import calibrate, centred
from headway.predict.censoring import log_lengths
from headway.predict.errors import TrafficLogError
from headway.predict.evaluation import count_pairs
from headway.predict.features import feature_matrix
from headway.predict.groups import group_draws
from headway.predict.learned_ranker import import_lightgbm
from headway.predict.lightgbm_text import without_parameters
from headway.predict.ranker_file import RankerModel
from headway.predict.traffic_log import TrafficRecord

OBJECTIVES = ("regression", "lambdarank")
LEAST_RECORDS = 100
NUM_FOLDS = 4
NUM_TREES = (50, 100, 150, 200, 300, 400)
"""Numbers of trees that are tried."""
QUEUE_SIZE = 64
"""Requests that lambdarank compares with each other."""
ROOT = 0.25
"""Regression fits this power of the length. The mean wait is least in order of expected lengths, to which the rare very
long answers add much, and Kendall tau is highest in order of logarithms, to which they add little. This is in between:
it loses a hundredth of tau and wins a tenth of the wait for the first token (benchmarks/RESULTS.md)."""
NUM_GRADES = 31
"""Into so many grades of length lambdarank's requests are sorted; LightGBM allows no more without a table of gains."""

_COMMON = {
    "learning_rate": 0.05,
    "num_leaves": 15,
    "min_data_in_leaf": 20,
    "feature_fraction": 0.2,
    "path_smooth": 10.0,
    "bagging_fraction": 0.8,
    "bagging_freq": 1,
    "lambda_l2": 1.0,
    "max_bin": 63,
    "num_threads": 1,
    "deterministic": True,
    "force_col_wise": True,
    "verbosity": -1,
}
_OWN: dict[str, dict[str, Any]] = {
    "regression": {"objective": "regression"},
    "lambdarank": {
        "objective": "lambdarank",
        "lambdarank_truncation_level": QUEUE_SIZE,
        "label_gain": list(range(NUM_GRADES)),
    },
}

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TrainedRanker:
    """The model, and the Kendall tau that each objective reached on held-back folds."""

    model: RankerModel
    tau_by_objective: dict[str, float]


@dataclass(frozen=True)
class _Trial:
    tau: float
    num_trees: int
    scores: Floats
    """Of each request, from a model that had not seen it."""


def split_records(
    records: Sequence[TrafficRecord], share: float, seed: int
) -> tuple[list[TrafficRecord], list[TrafficRecord]]:
    """Records to train on, and about that share of them held out. Conversations stay together."""
    is_held_out = [draw < share for draw in group_draws([record.features for record in records], seed)]
    kept = [record for record, out in zip(records, is_held_out) if not out]
    return kept, [record for record, out in zip(records, is_held_out) if out]


def train_ranker(
    records: Sequence[TrafficRecord],
    *,
    seed: int = 0,
    objectives: Sequence[str] = OBJECTIVES,
    progress: Callable[[int, int], None] | None = None,
) -> TrainedRanker:
    """Train on these records; `TrafficLogError` if they are too few or all alike. `progress`: (models trained, of how
    many)."""
    if len(records) < LEAST_RECORDS:
        raise TrafficLogError(f"{len(records)} usable requests are too few to learn from; {LEAST_RECORDS} are needed.")
    features = [record.features for record in records]
    matrix = feature_matrix(features)
    actual = np.array([record.num_output_tokens for record in records], dtype=np.float64)
    targets = log_lengths(actual, [record.is_cut for record in records])
    if np.ptp(targets) == 0:
        raise TrafficLogError("All answers are equally long; there is nothing to learn.")
    folds = np.array([int(draw * NUM_FOLDS) for draw in group_draws(features, seed + 1)])
    num_fits, num_done = len(objectives) * len(set(folds.tolist())) + 1, 0

    def note() -> None:
        nonlocal num_done
        num_done += 1
        if progress is not None:
            progress(num_done, num_fits)

    trials = {name: _try(name, matrix, targets, actual, folds, seed, note) for name in objectives}
    best = max(objectives, key=lambda name: trials[name].tau)
    booster = _fit(best, matrix, targets, trials[best].num_trees, seed)
    note()
    scores = trials[best].scores
    limits = [each.keys.max_tokens for each in features]
    taus = {name: trial.tau for name, trial in trials.items()}
    model = RankerModel(
        objective=best,
        booster_text=without_parameters(booster.model_to_string()),
        calibration=centred(calibrate(scores, targets), scores, limits, actual),
        training={
            "num_requests": len(records),
            "num_cut": sum(record.is_cut for record in records),
            "num_with_text": sum(each.cues is not None for each in features),
            "num_trees": trials[best].num_trees,
            "seed": seed,
            "fold_kendall_tau": {name: round(tau, 4) for name, tau in taus.items()},
        },
    )
    return TrainedRanker(model, taus)


def _try(
    objective: str,
    matrix: npt.NDArray[np.float32],
    targets: Floats,
    actual: Floats,
    folds: npt.NDArray[np.int_],
    seed: int,
    note: Callable[[], None],
) -> _Trial:
    """Train without each fold in turn, and see with how many trees the others are ordered best."""
    scores = np.zeros((len(NUM_TREES), len(targets)))
    taus = []
    for fold in sorted(set(folds.tolist())):
        held = folds == fold
        booster = _fit(objective, matrix[~held], targets[~held], NUM_TREES[-1], seed)
        for i, num_trees in enumerate(NUM_TREES):
            scores[i, held] = booster.predict(matrix[held], raw_score=True, num_iteration=num_trees, num_threads=1)
        taus.append([count_pairs(row[held].tolist(), actual[held].tolist()).kendall_tau for row in scores])
        note()
    means = np.mean(taus, axis=0)
    best = int(np.argmax(means))
    return _Trial(float(means[best]), NUM_TREES[best], scores[best])


def _fit(objective: str, matrix: npt.NDArray[np.float32], targets: Floats, num_trees: int, seed: int) -> Any:
    lightgbm = import_lightgbm()
    parameters = {**_COMMON, **_OWN[objective], "seed": seed}
    if objective == "lambdarank":
        order = np.random.default_rng(seed).permutation(len(targets))
        sizes = [len(part) for part in np.array_split(order, -(-len(order) // QUEUE_SIZE))]
        data = lightgbm.Dataset(matrix[order], label=_grades(targets)[order], group=sizes, params=parameters)
    else:
        data = lightgbm.Dataset(matrix, label=np.exp(ROOT * targets), params=parameters)
    return lightgbm.train(parameters, data, num_boost_round=num_trees)


def _grades(targets: Floats) -> npt.NDArray[np.int_]:
    """0 for the shortest, NUM_GRADES - 1 for the longest; about equally many of each, equal lengths equal."""
    place = np.searchsorted(np.sort(targets), targets, side="left")
    return (place * NUM_GRADES // len(targets)).astype(np.int_)
