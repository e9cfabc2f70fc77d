"""Predicted lengths and the traffic log in the server: from the front end's thread to the scheduler, and back."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from headway.engine.llm_engine import LLMEngine
from headway.engine_process import main as engine_process
from headway.predict import AnswerLengths, PromptView, TrafficLog, prediction_thread
from headway.predict.prediction_thread import Ended, PredictionThread
from headway.wire.messages import Delta
from tests.unit.predict.predictors import BrokenPredictor, Predictor
from tests.unit.server.fake_engine import COMPLETIONS, FakeEngine, FakeServer, events, run, until
from tests.unit.server.test_info import samples


class Setup:
    """A server that logs and, with a predictor, predicts."""

    def __init__(self, folder: Path, predictor: Any = None, engine: FakeEngine | None = None) -> None:
        self.path = folder / "log"
        self.thread = PredictionThread(AnswerLengths(predictor, TrafficLog(self.path, "ids")))
        self.server = FakeServer(engine, lengths=self.thread)

    def rows(self) -> list[dict[str, Any]]:
        """All lines, once the thread has written them."""
        self.thread.close()
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def ends(self) -> list[tuple[int, int, str]]:
        rows = self.rows()
        return [(row["prompt_tokens"], row["output_tokens"], row["finish_reason"]) for row in rows]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is."""
    monkeypatch.setattr(prediction_thread, "PATIENCE_S", 15.0)


@pytest.fixture
def predictor() -> Predictor:
    return Predictor()


@pytest.fixture
def setup(tmp_path: Path, predictor: Predictor) -> Iterator[Setup]:
    made = Setup(tmp_path, predictor)
    yield made
    made.thread.close()


def test_the_prediction_goes_with_the_request_and_is_made_of_what_fits_into_the_context(
    setup: Setup, predictor: Predictor
) -> None:
    setup.server.complete([[30, 1], [31, 1]], user="me", max_tokens=9, temperature=0.5)
    assert [request.options.predicted_tokens for request in setup.server.engine.requests] == [30.0, 31.0]
    assert predictor.asked[0][0] == PromptView([30, 1], max_tokens=9, temperature=0.5, user="me")
    assert setup.server.chat("Hello").status_code == 200
    (view,) = predictor.asked[1]
    assert view.text is not None and "Hello<|im_end|>" in view.text
    assert view.max_tokens == 256 - len(view.prompt_token_ids)
    assert (view.temperature, view.user) == (1.0, None)


def test_the_engine_process_does_not_predict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(LLMEngine, "from_config", lambda config, **how: made.append(how))
    engine_process.create_engine({"length_predictor": "statistics", "traffic_log": str(tmp_path / "log")})
    assert made == [{"predicts": False}]
    assert not (tmp_path / "log").exists()


def test_nothing_is_predicted_unless_asked_for_and_a_log_alone_predicts_nothing(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    for server in (FakeServer(), setup.server):
        server.complete([5, 6])
        assert server.engine.requests[0].options.predicted_tokens is None
        assert samples(server).get("headway:length_predictions_missing_total", 0) == 0
    assert setup.ends() == [(2, 3, "stop")]


@pytest.mark.parametrize("stream", [False, True])
def test_a_line_for_each_completion(setup: Setup, predictor: Predictor, stream: bool) -> None:
    for fields in ({"prompt": [5, 6]}, {"prompt": [[5], [6, 7, 8]], "n": 2}, {"prompt": [5], "max_tokens": 2}):
        response = setup.server.post("/v1/completions", {**fields, "stream": stream, "user": "me"})
        assert response.status_code == 200
        if stream:
            events(response)
    assert setup.ends() == [(2, 3, "stop"), *[(1, 3, "stop")] * 2, *[(3, 3, "stop")] * 2, (1, 2, "length")]
    assert {row["user"] for row in setup.rows()} == {"me"}
    assert all(row["arrival_s"] > 1e9 for row in setup.rows())
    assert [count for _, count in predictor.told] == [3, 3, 3, 3, 3, 2]


def test_a_search_and_a_mere_prompt_have_no_line_and_best_of_has_those_of_what_is_returned(
    setup: Setup, predictor: Predictor
) -> None:
    assert setup.server.complete([5, 6], n=2, use_beam_search=True, temperature=0).status_code == 200
    assert setup.server.complete([5, 6], max_tokens=0, echo=True).status_code == 200
    assert setup.server.complete([5, 6], max_tokens=-1).status_code == 400
    assert predictor.asked == []
    assert setup.server.complete([5, 6], n=2, best_of=3).status_code == 200
    assert setup.ends() == [(2, 3, "stop")] * 2


@pytest.mark.parametrize("outcome", ["leaves", "leaves a stream", "fails"])
def test_who_leaves_or_fails_has_a_line_with_what_was_there(tmp_path: Path, predictor: Predictor, outcome: str) -> None:
    engine = FakeEngine(manual=True)
    setup = Setup(tmp_path, predictor, engine)

    async def scenario() -> None:
        client = setup.server.begin(COMPLETIONS, prompt=[5, 6], n=2, stream=outcome == "leaves a stream")
        request_id = await engine.asked()
        engine.push(Delta(request_id, text="a", token_ids=[300]))
        engine.push(Delta(request_id, index=1, text="b", token_ids=[300, 301], finish_reason="stop"))
        await until(lambda: predictor.told)
        if outcome == "fails":
            engine.push(Delta(request_id, finish_reason="error", error="no", is_last=True))
            await client.task
        else:
            await client.leave()

    run(scenario())
    assert setup.ends() == [(2, 2, "stop"), (2, 1, "error" if outcome == "fails" else "abort")]
    assert [count for _, count in predictor.told] == [2]


def warnings(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_broken_predictor_fails_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    setup = Setup(tmp_path, BrokenPredictor())
    with caplog.at_level(logging.ERROR, "headway.predict"):
        for _ in range(3):
            assert setup.server.complete([5, 6]).status_code == 200
        assert setup.ends() == [(2, 3, "stop")] * 3
    assert len(warnings(caplog)) == 1
    assert [request.options.predicted_tokens for request in setup.server.engine.requests] == [None] * 3
    assert samples(setup.server)["headway:length_predictions_missing_total"] == 3


class SlowPredictor(Predictor):
    """Waits to be let go on, each time."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go = threading.Semaphore(0)

    def predict(self, prompts: Sequence[PromptView]) -> list[float]:
        answer = super().predict(prompts)
        assert self.may_go.acquire(timeout=20)
        return answer


def test_what_has_gathered_is_predicted_together() -> None:
    predictor = SlowPredictor()
    thread = PredictionThread(AnswerLengths(predictor))

    async def ask() -> list[list[float | None]]:
        asked = [asyncio.ensure_future(thread.predict([PromptView([1])]))]
        await until(lambda: predictor.asked)
        asked += [asyncio.ensure_future(thread.predict([PromptView([n]), PromptView([n + 1])])) for n in (10, 20, 30)]
        await asyncio.sleep(0)  # all of them have asked
        predictor.may_go.release(2)
        return await asyncio.gather(*asked)

    assert run(ask()) == [[1.0], [10.0, 11.0], [20.0, 21.0], [30.0, 31.0]]
    assert list(map(len, predictor.asked)) == [1, 6]
    thread.close()


def test_a_slow_predictor_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction_thread, "PATIENCE_S", 0.01)
    predictor = SlowPredictor()
    setup = Setup(tmp_path, predictor)
    assert setup.server.complete([5, 6]).status_code == 200
    assert setup.server.engine.requests[0].options.predicted_tokens is None
    predictor.may_go.release(2)
    assert setup.ends() == [(2, 3, "stop")]


def test_the_backlog_of_ended_answers_has_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prediction_thread, "MOST_ENDED", 3)
    predictor = SlowPredictor()
    setup = Setup(tmp_path, predictor)

    async def hold() -> None:
        asked = asyncio.ensure_future(setup.thread.predict([PromptView([1])]))
        await until(lambda: predictor.asked)
        for _ in range(5):
            setup.thread.note_end(Ended(PromptView([1]), 4, "stop", 0.0))
        predictor.may_go.release()
        await asked

    with caplog.at_level(logging.WARNING, "headway.server.api.generation"):
        run(hold())
    assert len(setup.rows()) == 3 and len(warnings(caplog)) == 1


def test_metrics_tell_how_good_predictions_are(setup: Setup) -> None:
    setup.server.complete([[3, 1], [6, 1]])
    found = samples(setup.server)
    assert found["headway:length_prediction_time_seconds_count"] == 1
    assert found["headway:length_prediction_log_error_count"] == 2
    assert found["headway:length_prediction_log_error_sum"] == pytest.approx(0.6931, abs=1e-3)
    assert found["headway:length_predictions_missing_total"] == 0
