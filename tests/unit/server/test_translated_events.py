"""Events and whole answers of /v1/responses and /v1/messages, from scripted pieces."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from headway.core.request_options import RequestOptions
from headway.sampling_params import SamplingParams
from headway.server.api.api_errors import overloaded
from headway.server.api.generation import Generation
from headway.server.api.message_events import MessageEvents, WholeMessage
from headway.server.api.prompts import PromptMaker
from headway.server.api.response_events import ResponseEvents, WholeResponse
from headway.server.api.response_models import PromptTokensDetails, Usage
from headway.server.api.responses_api import ResponsesRequest
from headway.structured.output_pieces import CallArguments, CallBegin, ContentPiece, Piece, ReasoningPiece
from headway.wire.messages import Delta, TokenLogprob

PROMPTS = cast(PromptMaker, SimpleNamespace(token_bytes=lambda token_id: [token_id]))
THOUGHTS, TEXT, CALL, NAMED = "⟨", "⟩", "☎", "✎"
"""Marks that begin a section; a call's name stands between the last two."""
ANSWER = '⟨hmm.⟩Sure: \n☎add✎{"a":1}☎now✎{}'


class MarkedParser:
    """Reads sections that begin with a mark."""

    def __init__(self) -> None:
        self._kind = TEXT
        self._name = ""
        self._num_calls = 0

    def feed(self, text: str) -> list[Piece]:
        return [piece for character in text if (piece := self._read(character)) is not None]

    def finish(self) -> list[Piece]:
        return []

    def _read(self, character: str) -> Piece | None:
        if character in (THOUGHTS, TEXT, CALL):
            self._kind, self._name = character, ""
        elif character == NAMED:
            self._kind = NAMED
            self._num_calls += 1
            return CallBegin(self._num_calls - 1, self._name)
        elif self._kind == THOUGHTS:
            return ReasoningPiece(character)
        elif self._kind == TEXT:
            return ContentPiece(character)
        elif self._kind == NAMED:
            return CallArguments(self._num_calls - 1, character)
        else:
            self._name += character
        return None


@dataclass
class ScriptedGeneration:
    """Of one completion; each part of the text is a token."""

    parts: list[str]
    finish_reason: str = "stop"
    stop_reason: str | None = None
    num_logprobs: int | None = None
    cache_ttl_s: float = 0.0
    id: str = "resp-0af"
    created: int = 7
    metrics: None = None
    job: Any = field(init=False)

    def __post_init__(self) -> None:
        self.job = SimpleNamespace(
            answer=SimpleNamespace(parser=MarkedParser),
            params=SamplingParams(temperature=0.5, top_p=0.9),
            options=RequestOptions(cache_ttl_s=self.cache_ttl_s),
            num_logprobs=self.num_logprobs,
            tokens_as_ids=False,
        )

    @property
    def usage(self) -> Usage:
        number = len(self.parts)
        return Usage(40, number, 40 + number, PromptTokensDetails(16))

    @property
    def deltas(self) -> list[Delta]:
        last = len(self.parts) - 1
        return [
            Delta(
                "r",
                text=part,
                token_ids=[place],
                logprobs=None if self.num_logprobs is None else [[TokenLogprob(place, -0.5, 1, part)]],
                finish_reason=self.finish_reason if place == last else None,
                stop_reason=self.stop_reason if place == last else None,
            )
            for place, part in enumerate(self.parts)
        ]

    async def __aenter__(self) -> ScriptedGeneration:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def __aiter__(self) -> AsyncIterator[list[Delta]]:
        yield self.deltas


def events(data: bytes) -> list[dict[str, Any]]:
    found = []
    for part in data.decode().removesuffix("\n\n").split("\n\n"):
        name, body = part.split("\n")
        found.append(json.loads(body.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def stream(writer: ResponseEvents | MessageEvents, generation: ScriptedGeneration) -> list[dict[str, Any]]:
    return events(writer.begin() + b"".join(writer.write([delta]) for delta in generation.deltas) + writer.end())


def cut(text: str, rng: random.Random) -> list[str]:
    """The text in random parts, as tokens would be."""
    places = sorted(rng.sample(range(1, len(text)), rng.randint(0, len(text) - 1)))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


def random_generation(rng: random.Random, **more: Any) -> ScriptedGeneration:
    sections = [rng.choice(["⟨hm ", "⟩OK \n", "⟩ \n", '☎f✎{"a": [1]}', "☎g✎"]) for _ in range(rng.randint(1, 6))]
    return ScriptedGeneration(cut("".join(sections), rng), finish_reason=rng.choice(["stop", "length"]), **more)


# ---- /v1/responses --------------------------------------------------------------------------------------------------


def response_events(generation: ScriptedGeneration, **body: Any) -> list[dict[str, Any]]:
    return stream(response_writer(generation, **body), generation)


def response_writer(generation: ScriptedGeneration, kind: Any = ResponseEvents, **body: Any) -> Any:
    request = msgspec.convert({"input": "Hi"} | body, ResponsesRequest)
    return kind(cast(Generation, generation), request, "small", PROMPTS)


def whole_response(generation: ScriptedGeneration, **body: Any) -> dict[str, Any]:
    answer = response_writer(generation, WholeResponse, **body)
    return json.loads(msgspec.json.encode(asyncio.run(answer.collect())))


def test_a_response_has_its_items_and_what_was_asked() -> None:
    tools = [{"type": "function", "name": "add", "parameters": {}, "strict": False}]
    answer = whole_response(
        ScriptedGeneration(list(ANSWER)), tools=tools, metadata={"a": "b"}, instructions="Be.", max_output_tokens=99
    )
    assert answer["completed_at"] >= answer.pop("created_at") == 7
    done = {"status": "completed"}
    thoughts = [{"type": "reasoning_text", "text": "hmm."}]
    text = [{"type": "output_text", "text": "Sure: \n", "logprobs": [], "annotations": []}]

    def call(number: int, name: str, arguments: str) -> dict[str, Any]:
        ids = {"id": f"fc_0af0{number}", "call_id": f"call_0af0{number}"}
        return {"type": "function_call", "name": name, "arguments": arguments, **ids, **done}

    assert answer["output"] == [
        {"type": "reasoning", "id": "rs_0af00", "summary": [], "content": thoughts, "encrypted_content": None, **done},
        {"type": "message", "id": "msg_0af01", "role": "assistant", "content": text, **done},
        call(2, "add", '{"a":1}'),
        call(3, "now", "{}"),
    ]
    expected = {
        "id": "resp_0af",
        "object": "response",
        "status": "completed",
        "store": False,
        "tools": tools,
        "tool_choice": "auto",
        "metadata": {"a": "b"},
        "instructions": "Be.",
        "max_output_tokens": 99,
        "temperature": 0.5,
        "top_p": 0.9,
        "model": "small",
        "error": None,
        "incomplete_details": None,
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": None, "summary": None},
    }
    assert {name: answer[name] for name in expected} == expected
    assert answer["usage"] == {
        "input_tokens": 40,
        "input_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 0},
        "output_tokens": len(ANSWER),
        "output_tokens_details": {"reasoning_tokens": 5},  # the mark that ends them is the first of what follows
        "total_tokens": 40 + len(ANSWER),
    }


def test_the_sequence_of_a_responses_events() -> None:
    found = response_events(ScriptedGeneration(["⟨h", "m⟩O", "K", "☎f✎", "{}"]))
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    text = "output_item.added content_part.added {0}.delta {0}.delta {0}.done content_part.done output_item.done"
    call = "output_item.added {0}.delta {0}.delta {0}.done output_item.done".format("function_call_arguments")
    expected = f"created in_progress {text.format('reasoning_text')} {text.format('output_text')} {call} completed"
    assert [event["type"].removeprefix("response.") for event in found] == expected.split()
    assert found[0]["response"]["status"] == "in_progress"
    assert found[0]["response"]["output"] == [] and found[0]["response"]["usage"] is None


def test_thoughts_as_a_summary() -> None:
    found = response_events(ScriptedGeneration(["⟨hm⟩OK"]), reasoning={"summary": "auto"})
    kinds = [event["type"].removeprefix("response.") for event in found]
    assert kinds[2:9] == [
        "output_item.added",
        "reasoning_summary_part.added",
        *["reasoning_summary_text.delta"] * 2,
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
    ]
    assert found[8]["item"]["summary"] == [{"type": "summary_text", "text": "hm"}]
    assert found[8]["item"]["content"] == []


def assembled(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output as a client builds it from deltas alone, checked against the events that repeat it."""
    items: list[dict[str, Any]] = []
    for event in found:
        kind, index = event["type"].removeprefix("response."), event.get("output_index")
        if kind == "output_item.added":
            assert index == len(items)
            assert event["item"]["status"] == "in_progress"
            items.append(event["item"])
        elif kind == "content_part.added":
            assert event["item_id"] == items[index]["id"]
            items[index]["content"].append(event["part"])
        elif kind == "function_call_arguments.delta":
            items[index]["arguments"] += event["delta"]
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            part = items[index]["content"][event["content_index"]]
            part["text"] += event["delta"]
            if "logprobs" in part:
                part["logprobs"] += event["logprobs"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == items[index]["content"][0]["text"]
        elif kind == "content_part.done":
            assert event["part"] == items[index]["content"][0]
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == items[index]["arguments"]
        elif kind == "output_item.done":
            items[index]["status"] = event["item"]["status"]
            assert event["item"] == items[index]
    return items


@pytest.mark.parametrize("seed", range(40))
def test_a_streamed_response_is_the_whole_one(seed: int) -> None:
    rng = random.Random(seed)
    generation = random_generation(rng, num_logprobs=rng.choice([None, 0]))
    whole, found = whole_response(generation), response_events(generation)
    last = found[-1]["response"]
    last["completed_at"] = whole["completed_at"]
    assert last == whole
    assert assembled(found) == whole["output"]
    assert found[-1]["type"] == f"response.{whole['status']}"


def test_an_answer_that_is_cut_off_is_incomplete() -> None:
    whole = whole_response(ScriptedGeneration(["OK☎f✎", "{"], finish_reason="length"))
    assert whole["status"] == "incomplete"
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert whole["completed_at"] is None
    assert [item["status"] for item in whole["output"]] == ["completed", "incomplete"]


def test_logprobs_are_those_of_the_text() -> None:
    whole = whole_response(ScriptedGeneration(["⟨h", "⟩", "O", "K", "☎f✎"], num_logprobs=0))
    (part,) = whole["output"][1]["content"]
    assert [entry["token"] for entry in part["logprobs"]] == ["⟩", "O", "K"], "the mark came before the text"


def test_a_response_that_fails_says_so_last() -> None:
    writer = response_writer(ScriptedGeneration(["O", "K"]))
    data = writer.begin() + writer.write(ScriptedGeneration(["O", "K"]).deltas[:1])
    error, failed = events(data + writer.fail(overloaded("Full.", code="full")))[-2:]
    assert error == {"type": "error", "sequence_number": 5, "code": "full", "message": "Full.", "param": None}
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "rate_limit_exceeded", "message": "Full."}
    assert failed["response"]["output"][0]["status"] == "incomplete"


# ---- /v1/messages ---------------------------------------------------------------------------------------------------


def message_writer(generation: ScriptedGeneration) -> MessageEvents:
    return MessageEvents(cast(Generation, generation), "small", block_size=16)


def whole_message(generation: ScriptedGeneration) -> dict[str, Any]:
    answer = WholeMessage(cast(Generation, generation), "small", block_size=16)
    return json.loads(msgspec.json.encode(asyncio.run(answer.collect())))


def test_a_message_has_its_blocks() -> None:
    assert whole_message(ScriptedGeneration(list(ANSWER))) == {
        "type": "message",
        "id": "msg_0af",
        "model": "small",
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hmm.", "signature": ""},
            {"type": "text", "text": "Sure: \n"},
            {"type": "tool_use", "id": "toolu_0af02", "name": "add", "input": {"a": 1}},
            {"type": "tool_use", "id": "toolu_0af03", "name": "now", "input": {}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 24,
            "output_tokens": len(ANSWER),
            "cache_read_input_tokens": 16,
            "cache_creation_input_tokens": 0,
        },
    }


@pytest.mark.parametrize(
    ("text", "finish_reason", "stop_reason", "expected"),
    [
        ("OK", "stop", None, ("end_turn", None)),
        ("OK", "length", None, ("max_tokens", None)),
        ("OK", "stop", "END", ("stop_sequence", "END")),
        ("☎f✎{}", "stop", None, ("tool_use", None)),
        ("☎f✎{", "length", None, ("max_tokens", None)),
    ],
)
def test_why_a_message_ends(
    text: str, finish_reason: str, stop_reason: str | None, expected: tuple[str, str | None]
) -> None:
    generation = ScriptedGeneration([text], finish_reason=finish_reason, stop_reason=stop_reason)
    answer = whole_message(generation)
    assert (answer["stop_reason"], answer["stop_sequence"]) == expected
    delta = stream(message_writer(generation), generation)[-2]["delta"]
    assert (delta["stop_reason"], delta["stop_sequence"]) == expected


def test_a_pinned_prompt_counts_as_written_to_the_cache() -> None:
    """40 tokens are two whole blocks of 16; one of them was there."""
    usage = whole_message(ScriptedGeneration(["OK"], cache_ttl_s=300.0))["usage"]
    assert usage == {
        "input_tokens": 8,
        "output_tokens": 1,
        "cache_read_input_tokens": 16,
        "cache_creation_input_tokens": 16,
    }


def test_the_sequence_of_a_messages_events() -> None:
    generation = ScriptedGeneration(["⟨h", "m⟩O", "K", "☎f✎", "{}"])
    found = stream(message_writer(generation), generation)
    block = ["content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"]
    expected = ["message_start", "ping", *block, *block, *block, "message_delta", "message_stop"]
    assert [event["type"] for event in found] == expected
    assert found[0]["message"]["content"] == []
    assert found[0]["message"]["stop_reason"] is None
    kinds = Counter(event["delta"]["type"] for event in found if event["type"] == "content_block_delta")
    assert kinds == {"thinking_delta": 2, "text_delta": 2, "input_json_delta": 2}


@pytest.mark.parametrize("seed", range(40))
def test_a_streamed_message_is_the_whole_one(seed: int) -> None:
    generation = random_generation(random.Random(seed))
    message: dict[str, Any] = {}
    arguments: dict[int, str] = {}
    for event in stream(message_writer(generation), generation):
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
            case "content_block_delta":
                delta = event["delta"]
                if delta["type"] == "input_json_delta":
                    arguments[event["index"]] = arguments.get(event["index"], "") + delta["partial_json"]
                else:
                    name = delta["type"].removesuffix("_delta")
                    message["content"][event["index"]][name] += delta[name]
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    for index, text in arguments.items():
        message["content"][index]["input"] = json.loads(text)
    assert message == whole_message(generation)


def test_white_space_alone_is_no_block_beside_others() -> None:
    for text, kinds in (("\n☎f✎{}", ["tool_use"]), ("☎f✎{}\n", ["tool_use"]), (" \n", ["text"]), (" OK", ["text"])):
        assert [block["type"] for block in whole_message(ScriptedGeneration(list(text)))["content"]] == kinds
    assert whole_message(ScriptedGeneration(list(" OK")))["content"][0]["text"] == " OK"
