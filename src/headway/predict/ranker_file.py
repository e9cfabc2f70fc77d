"""The file of a learned ranker: a line of JSON, then LightGBM's model as text. Reading it executes nothing.

{"format": "headway-length-predictor", "version": 1, "features": 2, "num_features": 1593, "objective": "regression",
 "calibration": {"scores": [...], "log_lengths": [...], "sigma": 0.6}, "training": {...},
 "model_bytes": 123456, "model_sha256": "..."}
tree
version=v4
...
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.predict.calibration import Calibration
from headway.predict.errors import PredictorFileError
from headway.predict.features import FEATURES_VERSION, NUM_FEATURES
from headway.predict.lightgbm_text import check_model

FORMAT = "headway-length-predictor"
VERSION = 1
MOST_HEADER_BYTES = 2**20
MOST_FILE_BYTES = 64 * 2**20
MOST_CALIBRATION_POINTS = 1000


@dataclass(frozen=True)
class RankerModel:
    """All that predicting needs, and how it came about."""

    objective: str
    booster_text: str
    calibration: Calibration
    training: Mapping[str, Any] = field(default_factory=dict)
    """Numbers about the training, for people."""


def save_ranker(model: RankerModel, path: str | Path) -> None:
    """Write the file in one go: it is the old one or the new one, never half of it."""
    body = model.booster_text.encode()
    header = {
        "format": FORMAT,
        "version": VERSION,
        "features": FEATURES_VERSION,
        "num_features": NUM_FEATURES,
        "objective": model.objective,
        "calibration": {
            "scores": model.calibration.scores,
            "log_lengths": model.calibration.log_lengths,
            "sigma": model.calibration.sigma,
        },
        "training": dict(model.training),
        "model_bytes": len(body),
        "model_sha256": hashlib.sha256(body).hexdigest(),
    }
    path = Path(path)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(json.dumps(header, allow_nan=False).encode() + b"\n" + body)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise PredictorFileError(f"Cannot write the length predictor '{path}': {error.strerror}.") from error


def load_ranker(path: str | Path) -> RankerModel:
    """Read and check a file; `PredictorFileError` says what is wrong with it."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(MOST_FILE_BYTES + 1)
    except OSError as error:
        raise PredictorFileError(f"Cannot read the length predictor '{path}': {error.strerror}.") from error
    try:
        return _parse(content)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        reason = f"it has no '{error.args[0]}'" if isinstance(error, KeyError) else str(error)
        raise PredictorFileError(f"'{path}' is not a length predictor that can be used: {reason}.") from error


def _parse(content: bytes) -> RankerModel:
    if len(content) > MOST_FILE_BYTES:
        raise ValueError(f"it is larger than {MOST_FILE_BYTES >> 20} MiB")
    header = _header(content)
    body = content[content.index(b"\n") + 1 :]
    if header["model_bytes"] != len(body) or header["model_sha256"] != hashlib.sha256(body).hexdigest():
        raise ValueError("it is cut off or damaged")
    if header["objective"] not in ("regression", "lambdarank"):
        raise ValueError("its objective is not known")
    text = body.decode("ascii")
    check_model(text, NUM_FEATURES)
    table = header["calibration"]
    if len(table["scores"]) > MOST_CALIBRATION_POINTS:
        raise ValueError("its calibration table is too long")
    calibration = Calibration(
        tuple(map(_real, table["scores"])), tuple(map(_real, table["log_lengths"])), _real(table["sigma"])
    )
    training = header["training"]
    if not isinstance(training, dict):
        raise ValueError("its training numbers are not an object")
    return RankerModel(header["objective"], text, calibration, training)


def _header(content: bytes) -> dict[str, Any]:
    end = content.find(b"\n", 0, MOST_HEADER_BYTES)
    try:
        header = json.loads(content[:end]) if end > 0 else None
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError("it does not begin with the header of one; they are made by `headway train-predictor`")
    if header["version"] != VERSION:
        raise ValueError(f"its version is {header['version']!r}, and this program reads version {VERSION}")
    if header["features"] != FEATURES_VERSION or header["num_features"] != NUM_FEATURES:
        raise ValueError("it was trained on other features than this program makes; train it anew")
    return header


def _real(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("its calibration holds something that is not a number")
    return float(value)
