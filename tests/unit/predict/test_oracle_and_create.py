"""The oracle, and predictors by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.errors import ConfigError
from headway.predict import (
    LengthPredictor,
    OraclePredictor,
    PredictorError,
    PredictorFileError,
    PromptView,
    RunningStatistics,
    create_predictor,
)


def test_oracle_by_request_id_and_by_function() -> None:
    by_id = OraclePredictor({"a": 3, "b": 70})
    by_id.observe(PromptView([1], request_id="a"), 5)
    assert by_id.predict([PromptView([1], request_id="b"), PromptView([1], request_id="a")]) == [70, 3]
    assert OraclePredictor(lambda prompt: len(prompt.prompt_token_ids)).predict([PromptView([1, 2])]) == [2]


@pytest.mark.parametrize("request_id", [None, "c"])
def test_an_oracle_that_does_not_know_says_so(request_id: str | None) -> None:
    with pytest.raises(PredictorError, match="was not told"):
        OraclePredictor({"a": 3}).predict([PromptView([1], request_id=request_id)])


def test_by_name(tmp_path: Path) -> None:
    assert create_predictor("none") is None
    assert isinstance(create_predictor("statistics"), RunningStatistics)
    oracle: LengthPredictor | None = create_predictor("oracle")
    assert oracle is not None and oracle.predict([PromptView([1], max_tokens=33)]) == [33]
    with pytest.raises(PredictorError, match="max_tokens"):
        oracle.predict([PromptView([1])])
    with pytest.raises(ConfigError, match="there is no file 'statistic'"):
        create_predictor("statistic")
    with pytest.raises(PredictorFileError, match="Cannot read"):
        create_predictor(str(tmp_path))
