"""Predicted lengths in the engine: who is asked, who goes first, what is learnt and logged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headway.config import EngineConfig
from headway.core.request_options import RequestOptions
from headway.engine.llm_engine import LLMEngine
from headway.errors import ConfigError
from headway.executor.fake import FakeExecutor
from headway.predict import AnswerLengths, OraclePredictor, PromptView, TrafficLog
from headway.sampling_params import SamplingParams
from tests.stress.llm_stress import llm_of
from tests.unit.no_model import all_outputs, engine_on
from tests.unit.predict.predictors import Predictor

STOP = 7


def make_engine(predictor: Any = None, log: TrafficLog | None = None, **options: Any) -> LLMEngine:
    """Requests whose name begins with "s" stop at their third token."""
    executor = FakeExecutor(lambda name, count: STOP if name.startswith("s") and count == 4 else 1)
    return engine_on(executor, lengths=AnswerLengths(predictor, log), **options)


def params(max_tokens: int | None = 5, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, stop_token_ids=[STOP], **more)


def run_to_end(engine: LLMEngine) -> list[str]:
    """The names of requests in the order in which they ended."""
    return [output.request_id for output in all_outputs(engine) if output.finished]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("predictor", [Predictor(), None], ids=["predicted", "by the limit"])
def test_short_answers_go_first_under_sjf(predictor: Predictor | None) -> None:
    engine = make_engine(predictor, scheduling_policy="sjf", max_num_seqs=1)
    for name, length in (("a", 9), ("b", 3), ("c", 6)):
        engine.add_request(name, [length, 1], params(9 if predictor else length))
    assert run_to_end(engine) == ["b", "c", "a"]


def test_many_requests_are_predicted_with_one_call_and_completions_share_it() -> None:
    predictor = Predictor()
    engine = make_engine(predictor)
    prepared = [
        engine.prepare("a", [30, 1], params(n=2)),
        engine.prepare("b", [31], params(), RequestOptions(predicted_tokens=4.0)),
        engine.prepare("c", [32, 1], params()),
    ]
    engine.submit_all(prepared, stream=False)
    assert [[view.request_id for view in call] for call in predictor.asked] == [["a", "c"]]
    found = {name: request.options.predicted_tokens for name, request in engine.core.scheduler.requests.items()}
    assert found == {"a#0": 30.0, "a#1": 30.0, "b": 4.0, "c": 32.0}


def test_generate_asks_once_for_all_prompts() -> None:
    predictor = Predictor()
    assert len(llm_of(make_engine(predictor)).generate([[3, 1], [4, 1], [5, 1]], params(), use_tqdm=False)) == 3
    assert [len(call) for call in predictor.asked] == [3]
    assert predictor.told == [("0", 5), ("1", 5), ("2", 5)]


def test_what_the_predictor_sees() -> None:
    predictor = Predictor()
    make_engine(predictor).add_request("a", [3, 1], params(None, temperature=0.5), RequestOptions(tenant="me"))
    make_engine(predictor).add_request("b", [3], params(8))
    (first,), (second,) = predictor.asked
    assert first == PromptView((3, 1), max_tokens=62, temperature=0.5, user="me", request_id="a")
    assert second == PromptView((3,), max_tokens=8, user=None, request_id="b")


def test_a_beam_search_is_left_alone(tmp_path: Path) -> None:
    predictor = Predictor()
    engine = make_engine(predictor, TrafficLog(tmp_path / "log"))
    search = SamplingParams(max_tokens=4, n=2, use_beam_search=True, temperature=0.0)
    engine.add_request("a", [3, 1], search, stream=False)
    engine.abort("a")
    assert predictor.asked == [] and lines(tmp_path / "log") == []


@pytest.mark.parametrize("stream", [True, False, "delta"])
def test_what_has_ended_is_learnt_and_logged(tmp_path: Path, stream: Any) -> None:
    predictor = Predictor()
    engine = make_engine(predictor, TrafficLog(tmp_path / "log", "ids"))
    engine.add_request("stops", [3, 1], params(), stream=stream)
    engine.add_request("long", [3, 1, 2], params(n=2), stream=stream)
    run_to_end(engine)
    engine.shutdown()
    assert sorted(predictor.told, key=str) == [("long", 5), ("long", 5), ("stops", 3)]
    found = [
        (len(row["prompt_token_ids"]), row["output_tokens"], row["finish_reason"]) for row in lines(tmp_path / "log")
    ]
    assert sorted(found) == [(2, 3, "stop"), (3, 5, "length"), (3, 5, "length")]
    assert all(row["arrival_s"] > 1e9 for row in lines(tmp_path / "log"))


def test_aborts_and_failures_are_logged_and_not_learnt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = Predictor()
    engine = make_engine(predictor, TrafficLog(tmp_path / "log"))
    engine.add_request("a", [3, 1], params(20, n=2))
    for _ in range(3):
        engine.step()
    engine.abort("a")
    engine.add_request("b", [3, 1], params(20))
    engine.step()
    monkeypatch.setattr(FakeExecutor, "submit", lambda *_: 1 / 0)
    run_to_end(engine)
    found = [(row["output_tokens"], row["finish_reason"]) for row in lines(tmp_path / "log")]
    assert found == [(3, "abort"), (3, "abort"), (1, "error")]
    assert predictor.told == []


@pytest.mark.parametrize("guess", [float("nan"), float("inf"), 0.0, -3.0])
def test_a_guess_that_is_none_is_passed_over_and_does_not_spoil_others(guess: float) -> None:
    lengths = AnswerLengths(OraclePredictor({"a": 5.0, "none": guess, "c": 7.0}))
    views = [PromptView([1], request_id=name) for name in ("a", "none", "unknown", "c")]
    assert lengths.predict(views) == [5.0, None, None, 7.0]
    assert lengths.predict([]) == []


# ---- options ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["none", "statistics", "oracle"])
def test_ltr_without_a_trained_file_is_refused_and_says_how_to_make_one(choice: str) -> None:
    with pytest.raises(ConfigError, match=f"'{choice}', not a file.*traffic_log.*headway train-predictor"):
        EngineConfig.from_options(scheduling_policy="ltr", length_predictor=choice)
    for policy in ("sjf", "srpt", "hrrn"):
        EngineConfig.from_options(scheduling_policy=policy, length_predictor=choice)
    EngineConfig.from_options(scheduling_policy="ltr", length_predictor="lengths.model")


def test_what_cannot_be_used_is_said_at_start(tmp_path: Path) -> None:
    def create(**options: Any) -> AnswerLengths | None:
        return AnswerLengths.from_config(EngineConfig.from_options(**options).prediction)

    with pytest.raises(ConfigError, match="there is no file"):
        create(length_predictor=str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="length_predictor is empty"):
        create(length_predictor="")
    with pytest.raises(ConfigError, match="traffic_log_content must be one of"):
        create(traffic_log_content="id")
    lengths = create(traffic_log=str(tmp_path / "log"))
    assert lengths is not None and not lengths.predicts and (tmp_path / "log").exists()
    lengths.close()
    assert create() is None
