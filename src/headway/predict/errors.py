"""What can go wrong with predictors and their files."""

from __future__ import annotations

from headway.errors import HeadwayError


class PredictorError(HeadwayError):
    """A predictor cannot be made, or does not know what it is asked for."""


class PredictorFileError(PredictorError):
    """A file is not a predictor, is damaged, or was written by another version."""


class TrafficLogError(HeadwayError):
    """A traffic log cannot be read or written, or has too little in it to learn from."""


class MissingLightGBMError(PredictorError):
    """The library that the learned ranker needs is not installed."""

    def __init__(self) -> None:
        super().__init__('The learned length predictor needs LightGBM: pip install "headway[predict]"')
