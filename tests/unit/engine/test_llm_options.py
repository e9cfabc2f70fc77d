"""What `LLM.generate` and `chat` tell the scheduler of each request: once for all, or one each."""

from __future__ import annotations

from typing import Any

import pytest

from headway.core import Request
from headway.core.request_options import OPTION_NAMES, RequestOptions
from headway.engine.llm_engine import LLMEngine
from headway.errors import InvalidRequestError
from headway.llm import LLM
from headway.sampling_params import SamplingParams
from tests.unit.engine_process.small_engine import create_engine
from tests.unit.server.fake_engine import small_tokenizer

PARAMS = SamplingParams(max_tokens=2)
PROMPTS = [[5, 6], [7, 8], [9]]
CHAT = [{"role": "user", "content": "Hi"}]


class Watched(LLM):
    """With an engine that has no model, and a list of what it has been given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = create_engine({})
        engine.preparer.tokenizer = small_tokenizer()
        self.seen: list[Request] = []
        add = engine.core.add_request
        monkeypatch.setattr(engine.core, "add_request", lambda request: (self.seen.append(request), add(request)))
        monkeypatch.setattr(LLMEngine, "from_config", classmethod(lambda cls, config, *, progress: engine))
        super().__init__()

    def column(self, name: str) -> list[Any]:
        return [getattr(request.options, name) for request in self.seen]


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


OPTIONS: dict[str, list[Any]] = {
    "priority": [3, -1, 0],
    "tenant": ["a", "b", ""],
    "predicted_tokens": [7.5, None, 2],
    "ttft_target_s": [0.5, None, 2],
    "tpot_target_s": [None, 0.05, 1],
    "cache_salt": ["x", None, "y"],
    "cache_ttl_s": [1.5, 0, 2.0],
    "blocks_at": ["10.0.0.1:8100", "", "10.0.0.2:8100"],
}


def test_every_option_is_tried_here() -> None:
    assert set(OPTIONS) == set(OPTION_NAMES)


@pytest.mark.parametrize("name", OPTIONS)
def test_one_for_all_or_one_each(llm: Watched, name: str) -> None:
    each = OPTIONS[name]
    one = next(value for value in each if value)
    llm.generate(PROMPTS, PARAMS, **{name: one})
    llm.generate(PROMPTS, PARAMS, **{name: each})
    llm.chat([CHAT] * 3, PARAMS, **{name: tuple(each)})
    llm.chat(CHAT, PARAMS, **{name: one})
    assert llm.column(name) == [one] * 3 + each + each + [one]


def test_tools_become_part_of_the_prompt(llm: Watched) -> None:
    tools = [{"type": "function", "function": {"name": "clock"}}]
    llm.chat([CHAT, CHAT], PARAMS, tools=tools, priority=2)
    first, second = llm.seen
    assert [*first.prompt_token_ids] == [*second.prompt_token_ids] == llm.chat_prompt(CHAT, tools=tools)
    assert "clock" in llm.get_tokenizer().decode(first.prompt_token_ids)
    with pytest.raises(InvalidRequestError, match=r"tools\[0\]"):
        llm.chat(CHAT, PARAMS, tools=[{"name": "clock"}])


def test_records_and_names_go_together(llm: Watched) -> None:
    one, each = RequestOptions(priority=2, tenant="a"), [RequestOptions(tenant=name) for name in "abc"]
    llm.generate(PROMPTS, PARAMS, options=one)
    llm.generate(PROMPTS, PARAMS, options=each, priority=[1, 2, 3])
    list(llm.stream(PROMPTS[0], PARAMS, options=one, cache_salt="x"))
    assert llm.column("tenant") == ["a"] * 3 + ["a", "b", "c"] + ["a"]
    assert llm.column("priority") == [2] * 3 + [1, 2, 3] + [2]
    assert llm.column("cache_salt") == [None] * 6 + ["x"]


def test_an_unknown_option_names_the_nearest(llm: Watched) -> None:
    with pytest.raises(InvalidRequestError, match="no option 'ttft_target'. Did you mean 'ttft_target_s'") as caught:
        llm.generate(PROMPTS, PARAMS, ttft_target=1.0)
    assert caught.value.param == "ttft_target"
    with pytest.raises(InvalidRequestError, match="The options are: priority, tenant"):
        llm.stream(PROMPTS[0], PARAMS, xyz=1)
    with pytest.raises(InvalidRequestError, match="options must be RequestOptions, not dict"):
        llm.generate(PROMPTS, PARAMS, options=[{"priority": 1}] * 3)  # type: ignore[list-item]
    with pytest.raises(InvalidRequestError, match="sampling_params must be a SamplingParams, not dict"):
        llm.generate(PROMPTS, {"max_tokens": 2})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="2 options for 3 prompts"):
        llm.generate(PROMPTS, PARAMS, options=[RequestOptions()] * 2)
    assert not llm.seen


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("priority", 1.5), ("priority", "high"), ("priority", [1, 2]), ("priority", [1, 2, None])),
        *(("tenant", 5), ("tenant", None), ("tenant", ["a"])),
        *(("predicted_tokens", 0), ("predicted_tokens", "many"), ("ttft_target_s", -1), ("tpot_target_s", True)),
        *(("ttft_target_s", [1, 2, float("nan")]), ("tpot_target_s", float("inf"))),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(llm: Watched, name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        llm.generate(PROMPTS, PARAMS, **{name: value})
    assert not llm.seen


def test_who_has_begun_is_told_once(llm: Watched) -> None:
    engine = create_engine({"max_num_seqs": 2, "max_num_batched_tokens": 4})
    engine.add_request("long", [5] * 10, PARAMS)
    engine.add_request("pair", [6], SamplingParams(max_tokens=2, n=2))
    begun: list[list[str]] = []
    while engine.has_unfinished_requests():
        begun.append(engine.step().begun)
    assert begun[0] == ["long"]
    assert [request_id for step in begun for request_id in step] == ["long", "pair"]
