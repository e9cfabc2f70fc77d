"""The learned predictor: LightGBM's trees over cheap features of the prompt, trained by `headway train-predictor`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headway.predict.base import PromptView
from headway.predict.capped_length import expected_length
from headway.predict.errors import MissingLightGBMError, PredictorFileError
from headway.predict.features import PromptFeatures, feature_matrix, prompt_features
from headway.predict.ranker_file import RankerModel, load_ranker


def import_lightgbm() -> Any:
    """The library; `MissingLightGBMError` says how to get it."""
    try:
        import lightgbm
    except ImportError as error:
        raise MissingLightGBMError() from error
    return lightgbm


class LearnedRanker:
    """A trained model. Uses one thread: the others have tokens to compute."""

    name = "learned"

    def __init__(self, model: RankerModel) -> None:
        lightgbm = import_lightgbm()
        self.model = model
        try:
            self._booster = lightgbm.Booster(model_str=model.booster_text)
        except lightgbm.basic.LightGBMError as error:
            raise PredictorFileError(f"LightGBM cannot read the length predictor: {error}") from error

    @classmethod
    def load(cls, path: str | Path) -> LearnedRanker:
        """From a file, which is checked first."""
        return cls(load_ranker(path))

    def predict(self, prompts: Sequence[PromptView]) -> list[float]:
        return self.predict_features([prompt_features(prompt) for prompt in prompts])

    def observe(self, prompt: PromptView, num_output_tokens: int) -> None:
        """Learning is done from the traffic log, not here."""

    def predict_features(self, prompts: Sequence[PromptFeatures]) -> list[float]:
        """As `predict`, for prompts of which only the features are left."""
        if not prompts:
            return []
        scores = self._booster.predict(feature_matrix(prompts), raw_score=True, num_threads=1)
        calibration = self.model.calibration
        return [
            expected_length(float(log_length), calibration.sigma, prompt.keys.max_tokens)
            for log_length, prompt in zip(calibration.log_lengths_of(scores), prompts)
        ]
