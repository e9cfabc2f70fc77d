"""How long will the answer be? Predictors of output lengths, and the traffic log that they learn from.

Schedulers that let short answers go first need to know which these are before they have been made. `PromptView` is what
is known of a request when it arrives, `LengthPredictor` guesses from it, `TrafficLog` notes how it really was, and
`headway train-predictor` makes a better guesser of such a log. `AnswerLengths` is both at work, in an engine or server.
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
