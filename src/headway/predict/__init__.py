"""Predictors of output lengths, and the traffic log that they learn from.

Schedulers that run short answers first need to know the lengths in advance. `PromptView` is what is known of a request
when it arrives, `LengthPredictor` predicts from it, `TrafficLog` records the true length, and `headway train-predictor`
trains a better predictor from such a log. `AnswerLengths` combines a predictor and a log in an engine or server.
"""

from headway.predict.base import (
    LengthPredictor,
    MissingLightGBMError,
    PredictorError,
    PredictorFileError,
    PromptView,
    TrafficLogError,
)
from headway.predict.predictors import (
    AnswerLengths,
    LearnedRanker,
    OraclePredictor,
    RunningStatistics,
    create_predictor,
)
from headway.predict.traffic_log import LOG_CONTENTS, TrafficLog, TrafficRecord, read_traffic

__all__ = [
    "PromptView",
    "LengthPredictor",
    "create_predictor",
    "AnswerLengths",
    "OraclePredictor",
    "RunningStatistics",
    "LearnedRanker",
    "TrafficLog",
    "TrafficRecord",
    "read_traffic",
    "LOG_CONTENTS",
    "PredictorError",
    "PredictorFileError",
    "MissingLightGBMError",
    "TrafficLogError",
]
