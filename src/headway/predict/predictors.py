"""Predictors of output lengths, by the name that options give them, and their use in an engine or server.

    statistics    learns as it goes: how long were the answers to requests like this one?
    FILE          LightGBM's trees over cheap features of the prompt, trained by `headway train-predictor`
    oracle        knows, for experiments: how much is there to gain from a perfect guess?

A predictor guesses the logarithm of a length. If nothing cut it, an answer's length L would be about log-normal around
the guess. What the engine has to make is min(L, max_tokens), and its mean has a closed form. Taking the mean instead of
cutting the guess at max_tokens keeps the order: of two requests that will probably both be cut, the one whose guess is
longer still comes out longer.

Predictions are optional. A failure is logged once and loses a prediction or a line of the log, never a request.
"""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.config import LENGTH_PREDICTORS, PredictionConfig
from headway.errors import ConfigError
from headway.predict.base import LengthPredictor, MissingLightGBMError, PredictorError, PredictorFileError, PromptView
from headway.predict.features import (
    HEAD_LENGTHS,
    KEY_BITS,
    TAIL_LENGTHS,
    PromptFeatures,
    PromptKeys,
    feature_matrix,
    prompt_features,
    prompt_keys,
)
from headway.predict.ranker_file import RankerModel, load_ranker
from headway.predict.traffic_log import USED_REASONS, TrafficLog

LEAST_SIGMA = 0.05
MOST_LOG_LENGTH = 16.0
"""The largest prediction: e^16 is nine million tokens."""

SHRINKAGE = 8.0
MEMORY = 500.0
START_LENGTH = 128.0
"""The prediction before any length has been seen."""
START_SPREAD = 1.0
"""The standard deviation of log lengths before any length has been seen."""

_NUM_LEVELS = 3 + len(HEAD_LENGTHS) + len(TAIL_LENGTHS)
_SLOTS = 1 << KEY_BITS

logger = logging.getLogger(__name__)


def expected_length(log_length: float, sigma: float, max_tokens: int | None) -> float:
    """The mean of min(L, max_tokens), where log L is normal around `log_length` with standard deviation `sigma`."""
    sigma = max(sigma, LEAST_SIGMA)
    mu = min(log_length, MOST_LOG_LENGTH)
    mean = math.exp(mu + sigma * sigma / 2)
    if max_tokens is not None:
        limit = math.log(max_tokens)
        below = mean * _normal_cdf((limit - mu) / sigma - sigma)
        mean = min(below + max_tokens * _normal_cdf((mu - limit) / sigma), float(max_tokens))
    return max(mean, 1.0)


def _normal_cdf(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


class RunningStatistics:
    """Starts knowing nothing. The same requests in the same order give the same guesses.

    Requests are put into buckets by what is cheap to know, from coarse to fine: all of them, those of about this prompt
    length, of this user, with these first tokens, with these last tokens. The guess starts from the mean of the
    logarithm of all lengths, and each level adds what its bucket has found the guess before it to be off by, shrunk
    towards zero while the bucket has seen little:

        guess += bucket.offset * bucket.weight / (bucket.weight + SHRINKAGE)

    Buckets are slots of fixed tables, found by hash; requests that fall together share one. A bucket's weight stops
    growing at `MEMORY` requests, from when on older ones fade away, so that the guesses follow the traffic. A shift
    that is common to all guesses makes their sum that of the lengths: these are log-normal only roughly.
    """

    name = "statistics"

    def __init__(self) -> None:
        self._offsets = [array("d", bytes(8 * _SLOTS)) for _ in range(_NUM_LEVELS)]
        self._weights = [array("d", bytes(8 * _SLOTS)) for _ in range(_NUM_LEVELS)]
        self._variance = START_SPREAD**2
        self._shift = 0.0
        self._mean_length = START_LENGTH
        self._num_seen = 0

    def predict(self, prompts: Sequence[PromptView]) -> list[float]:
        return [self.predict_keys(prompt_keys(prompt)) for prompt in prompts]

    def observe(self, prompt: PromptView, num_output_tokens: int) -> None:
        self.observe_keys(prompt_keys(prompt), num_output_tokens)

    def predict_keys(self, keys: PromptKeys) -> float:
        """As `predict`, for a prompt of which only the keys are known."""
        return self._expected(self._log_length(_slots(keys)), keys)

    def observe_keys(self, keys: PromptKeys, num_output_tokens: int) -> None:
        """As `observe`. An answer cut at `max_tokens` would have been at least that long, so nothing is learnt from it
        if the prediction was at least that long too."""
        slots = _slots(keys)
        guess = self._log_length(slots)
        actual = math.log(max(num_output_tokens, 1))
        if keys.max_tokens is not None and num_output_tokens >= keys.max_tokens and actual <= guess:
            return
        self._num_seen += 1
        pace = 1 / min(self._num_seen + SHRINKAGE, MEMORY)
        self._shift += pace * (num_output_tokens - self._expected(guess, keys)) / max(self._mean_length, 1.0)
        self._mean_length += pace * (num_output_tokens - self._mean_length)
        self._variance += pace * ((actual - guess) ** 2 - self._variance)
        self._learn(slots, actual)

    def _expected(self, log_length: float, keys: PromptKeys) -> float:
        return expected_length(log_length + self._shift, math.sqrt(self._variance), keys.max_tokens)

    def _log_length(self, slots: Sequence[int | None]) -> float:
        guess = math.log(START_LENGTH)
        for level, slot in enumerate(slots):
            if slot is not None:
                guess += self._correction(level, slot)
        return guess

    def _learn(self, slots: Sequence[int | None], actual: float) -> None:
        """Update each level with the error that the levels above, already updated, leave unexplained."""
        guess = math.log(START_LENGTH)
        for level, slot in enumerate(slots):
            if slot is None:
                continue
            offsets, weights = self._offsets[level], self._weights[level]
            weights[slot] = min(weights[slot] + 1.0, MEMORY)
            offsets[slot] += (actual - guess - offsets[slot]) / weights[slot]
            guess += self._correction(level, slot)

    def _correction(self, level: int, slot: int) -> float:
        weight = self._weights[level][slot]
        return self._offsets[level][slot] * weight / (weight + SHRINKAGE) if weight else 0.0


def _slots(keys: PromptKeys) -> tuple[int | None, ...]:
    """The bucket on each level, from coarse to fine; None where the request does not say."""
    length_bucket = int(2 * math.log2(max(keys.num_prompt_tokens, 1)))
    return 0, length_bucket, keys.user, *keys.heads, *keys.tails


class OraclePredictor:
    """Looks the length up, by request id in a mapping or with a function of the prompt."""

    name = "oracle"

    def __init__(self, lengths: Mapping[str, float] | Callable[[PromptView], float]) -> None:
        self._length = lengths if callable(lengths) else _Lookup(lengths)

    @classmethod
    def of_fixed_lengths(cls) -> OraclePredictor:
        """For traffic that ignores the end-of-sequence token: every answer has `max_tokens` tokens."""
        return cls(_max_tokens)

    def predict(self, prompts: Sequence[PromptView]) -> list[float]:
        return [float(self._length(prompt)) for prompt in prompts]

    def observe(self, prompt: PromptView, num_output_tokens: int) -> None:
        """There is nothing to learn."""


class _Lookup:
    def __init__(self, lengths: Mapping[str, float]) -> None:
        self._lengths = lengths

    def __call__(self, prompt: PromptView) -> float:
        if prompt.request_id is None or prompt.request_id not in self._lengths:
            raise PredictorError(f"The oracle has no length for request '{prompt.request_id}'.")
        return self._lengths[prompt.request_id]


def _max_tokens(prompt: PromptView) -> float:
    if prompt.max_tokens is None:
        raise PredictorError("The oracle takes max_tokens for the length, and this request has none.")
    return prompt.max_tokens


def import_lightgbm() -> Any:
    """Import the library. Raises `MissingLightGBMError`, which says how to install it."""
    try:
        import lightgbm
    except ImportError as error:
        raise MissingLightGBMError() from error
    return lightgbm


class LearnedRanker:
    """A trained model. It uses one thread, to leave the others to the model's computation."""

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
        """Load a file, which is checked first."""
        return cls(load_ranker(path))

    def predict(self, prompts: Sequence[PromptView]) -> list[float]:
        return self.predict_features([prompt_features(prompt) for prompt in prompts])

    def observe(self, prompt: PromptView, num_output_tokens: int) -> None:
        """Learning is done from the traffic log, not here."""

    def predict_features(self, prompts: Sequence[PromptFeatures]) -> list[float]:
        """As `predict`, for prompts of which only the features are known."""
        if not prompts:
            return []
        scores = self._booster.predict(feature_matrix(prompts), raw_score=True, num_threads=1)
        calibration = self.model.calibration
        return [
            expected_length(float(log_length), calibration.sigma, prompt.keys.max_tokens)
            for log_length, prompt in zip(calibration.log_lengths_of(scores), prompts)
        ]


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


class AnswerLengths:
    """A predictor and a traffic log, either of which may be missing. Not thread-safe, as its parts are not."""

    def __init__(self, predictor: LengthPredictor | None = None, log: TrafficLog | None = None) -> None:
        self._predictor = predictor
        self._log = log
        self._has_complained = False

    @classmethod
    def from_config(cls, config: PredictionConfig) -> AnswerLengths | None:
        """Build from options; None if both parts are off. Raises here, at start, for files that cannot be read or
        written."""
        if config.is_off:
            return None
        predictor = create_predictor(config.length_predictor)
        log = None if config.traffic_log is None else TrafficLog(config.traffic_log, config.traffic_log_content)
        return cls(predictor, log)

    @property
    def predicts(self) -> bool:
        return self._predictor is not None

    def predict(self, prompts: Sequence[PromptView]) -> list[float | None]:
        """The expected number of output tokens of each prompt; None if there is no usable prediction."""
        if self._predictor is None or not prompts:
            return [None] * len(prompts)
        try:
            guesses = self._predictor.predict(prompts)
            return [_usable(guess) for guess, _ in zip(guesses, prompts, strict=True)]
        except Exception:
            if len(prompts) > 1:  # perhaps it is only one of them
                return [guess for prompt in prompts for guess in self.predict([prompt])]
            self._complain("the length predictor failed; requests go on without a prediction")
            return [None]

    def note_end(
        self, prompt: PromptView, *, num_output_tokens: int, finish_reason: str, arrival_s: float | None
    ) -> None:
        """Learn from and log a completion that ended for any reason. `arrival_s` is in seconds since 1970."""
        if self._predictor is not None and finish_reason in USED_REASONS:
            try:
                self._predictor.observe(prompt, num_output_tokens)
            except Exception:
                self._complain("the length predictor failed to learn from an answer")
        if self._log is not None:
            try:
                self._log.write(
                    prompt, num_output_tokens=num_output_tokens, finish_reason=finish_reason, arrival_s=arrival_s
                )
            except Exception:
                self._complain("a line of the traffic log could not be made")

    def close(self) -> None:
        """Log nothing more. Can be called again."""
        if self._log is not None:
            self._log.close()

    def _complain(self, message: str) -> None:
        """Log the first failure, with the current exception."""
        if not self._has_complained:
            self._has_complained = True
            logger.exception("%s; this is said only once", message)


def _usable(guess: float) -> float | None:
    return float(guess) if 0 < guess < math.inf else None
