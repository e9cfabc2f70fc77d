"""/v1/chat/completions as clients see it."""

from __future__ import annotations

import functools
import typing
from typing import Any

import msgspec
import pytest

from headway.core.request_options import RequestOptions
from headway.sampling_params import SamplingParams
from headway.server.api.chat_messages import ChatMessage, ContentPart, MessageToolCall
from headway.server.api.requests import ChatCompletionRequest, CompletionRequest, StreamOptions
from headway.server.api.response_format import JsonSchemaFormat, ResponseFormat
from headway.server.api.tool_definitions import AllowedTools, FunctionDefinition, ToolDefinition
from headway.tokenizer import spell_bad_words
from tests.unit.server.fake_engine import (
    CHAT,
    COMPLETIONS,
    HI,
    FakeEngine,
    FakeServer,
    engine_ready,
    events,
)


def test_answer_has_openais_form() -> None:
    server = FakeServer()
    answer = server.chat(temperature=None, stop=None).json()
    assert server.engine.requests[0].params == SamplingParams(max_tokens=None), "the context is the limit"
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "small"
    message = {"role": "assistant", "content": "Hello world.", "refusal": None}
    assert answer["choices"] == [
        {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    prompt_tokens = len(server.engine.requests[0].prompt_token_ids)
    assert answer["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 3,
        "total_tokens": prompt_tokens + 3,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def test_messages_go_through_the_template() -> None:
    server = FakeServer()
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]},
        {"role": "assistant", "content": "Yes?", "refusal": None, "tool_calls": None, "annotations": []},
        {"role": "user", "content": "Go"},
    ]
    server.chat(messages=messages)
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi\nthere<|im_end|>\n"
        "<|im_start|>assistant\nYes?<|im_end|>\n<|im_start|>user\nGo<|im_end|>\n<|im_start|>assistant\n"
    )
    request = server.engine.requests[0]
    assert request.prompt_token_ids == server.tokenizer.encode(expected, add_special_tokens=False)


def test_what_clients_note_on_an_answer_comes_back_and_changes_nothing() -> None:
    server = FakeServer()
    for noted, in_call in (({}, {}), ({"parsed": {"a": 1}}, {"parsed_arguments": {}})):
        call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}", **in_call}}
        of_provider = {"provider_specific_fields": {"refusal": None}} if noted else {}
        messages = [
            *HI,
            {"role": "assistant", "content": '{"a": 1}', **noted},
            {"role": "assistant", "content": None, "tool_calls": [call], **of_provider},
            {"role": "tool", "tool_call_id": "call_1", "content": "Yes"},
        ]
        assert server.chat(messages=messages).status_code == 200
    first, second = server.engine.requests
    assert first.prompt_token_ids == second.prompt_token_ids


def test_sampling_fields_reach_the_engine() -> None:
    server = FakeServer()
    fields: dict[str, Any] = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": -0.1,
        "seed": 7,
        "min_tokens": 1,
        "stop": ["a", "b"],
        "stop_token_ids": [5],
        "bad_words": ["x"],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "logit_bias": {"5": 1.5},
    }
    response = server.chat(max_completion_tokens=9, priority=3, user="me", **fields)
    assert response.status_code == 200
    spelt = spell_bad_words(["x"], server.tokenizer)
    assert server.engine.requests[0].params == SamplingParams(max_tokens=9, **fields).with_bad_word_token_ids(spelt)
    assert server.engine.requests[0].options == RequestOptions(priority=3, tenant="me")
    assert [choice["index"] for choice in response.json()["choices"]] == [0, 1]


def test_stream() -> None:
    response = FakeServer().chat(stream=True)
    chunks = events(response)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks[1:]] == ["Hello", " world", ".", None]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 4 + ["stop"]
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("include_usage", [True, False])
@pytest.mark.parametrize("every_event", [True, False])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_usage_at_the_end_and_in_every_event(path: str, every_event: bool, include_usage: bool) -> None:
    options = {"continuous_usage_stats": every_event, "include_usage": include_usage}
    chunks = events(FakeServer().send(path, n=2, stream=True, stream_options=options))
    if include_usage:
        last = chunks.pop()
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 6
        assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert {chunk["choices"][0]["index"] for chunk in chunks} == {0, 1}
    if not every_event:
        assert all(chunk.get("usage", "none") == (None if include_usage else "none") for chunk in chunks)
        return
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 6 and set(counts) >= {1, 2, 3, 4, 5, 6}
    prompt = chunks[0]["usage"]["prompt_tokens"]
    assert all(chunk["usage"]["total_tokens"] == prompt + count for chunk, count in zip(chunks, counts, strict=True))


@pytest.mark.parametrize("text", ['quo"te', "back\\slash", "new\nline", "\u2028", "é日本👩", "\x00\x1f", "</script>"])
def test_any_text_survives_the_stream(text: str) -> None:
    chunks = events(FakeServer(FakeEngine(words=(text,))).chat(stream=True))
    assert chunks[1]["choices"][0]["delta"]["content"] == text


def test_logprobs_are_the_same_streamed_and_whole() -> None:
    server = FakeServer()
    whole = server.chat(logprobs=True, top_logprobs=1, max_tokens=2).json()["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in whole] == [-0.5, -0.5]
    assert [[top["logprob"] for top in entry["top_logprobs"]] for entry in whole] == [[-0.25], [-0.25]]
    assert whole[0]["token"] == server.tokenizer.token_text(300)
    assert whole[0]["bytes"] == list(server.tokenizer.token_bytes(300))
    chunks = events(server.chat(logprobs=True, top_logprobs=1, max_tokens=2, stream=True))
    streamed = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {}).get("content", [])]
    assert streamed == whole


def test_length_and_prompt_logprobs_are_told() -> None:
    choice = FakeServer().chat(max_tokens=2).json()["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "Hello world")
    answer = FakeServer().chat(prompt_logprobs=1).json()
    assert answer["prompt_logprobs"][0] is None, "in vLLM's form"
    (first, second) = answer["prompt_logprobs"][1].values()
    assert (first["logprob"], first["rank"], second["logprob"]) == (-0.5, 2, -0.25)


def test_priority_is_refused_where_nobody_looks_at_it() -> None:
    server = FakeServer()
    server.engine.info = engine_ready(scheduling_policy="fcfs")
    assert server.chat(priority=0).status_code == 200
    error = server.chat(priority=1).json()["error"]
    assert (error["param"], error["code"]) == ("priority", "unsupported_field")


@pytest.mark.parametrize(
    ("record", "names"),
    [
        (ChatCompletionRequest, "chat.completion_create_params.CompletionCreateParamsStreaming"),
        (CompletionRequest, "completion_create_params.CompletionCreateParamsStreaming"),
        (ChatMessage, "chat.ChatCompletionAssistantMessageParam"),
        (ChatMessage, "chat.ChatCompletionUserMessageParam"),
        (ChatMessage, "chat.ChatCompletionToolMessageParam"),
        (MessageToolCall, "chat.ChatCompletionMessageFunctionToolCallParam"),
        (ToolDefinition, "chat.ChatCompletionFunctionToolParam"),
        (ToolDefinition, "chat.ChatCompletionCustomToolParam"),
        (FunctionDefinition, "shared_params.FunctionDefinition"),
        (JsonSchemaFormat, "shared_params.response_format_json_schema.JSONSchema"),
        (ResponseFormat, "shared_params.ResponseFormatJSONSchema"),
        (AllowedTools, "chat.ChatCompletionAllowedToolsParam"),
        (ContentPart, "chat.ChatCompletionContentPartTextParam"),
        (StreamOptions, "chat.ChatCompletionStreamOptionsParam"),
    ],
)
def test_every_field_of_openais_client_is_known(record: type[msgspec.Struct], names: str) -> None:
    """Supported, or refused by name unless its value asks for nothing."""
    openai_types = pytest.importorskip("openai.types")
    theirs = functools.reduce(getattr, names.split("."), openai_types)
    assert set(typing.get_type_hints(theirs)) <= {field.name for field in msgspec.structs.fields(record)}


def test_errors_say_what_there_is() -> None:
    server = FakeServer(served_model_name=("a", "b"))
    assert [server.chat(model=name).json()["model"] for name in ("a", "b")] == ["a", "a"]
    unknown = server.chat(model="small")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert "Did you mean 'temperature'?" in server.chat(temprature=1).json()["error"]["message"]
    error = server.post(CHAT, {"model": "a"}).json()["error"]
    assert (error["message"], error["param"]) == ("'messages' is required.", "messages")
    for fields, new in (
        ({"guided_json": {}}, "structured_outputs.json"),
        ({"functions": [{"name": "f"}]}, "'tools'"),
        ({"function_call": "auto"}, "'tool_choice'"),
    ):
        error = server.chat(**fields).json()["error"]
        assert new in error["message"] and error["code"] == "unsupported_field"


def test_token_ids_are_told_whole_and_streamed() -> None:
    server = FakeServer()
    answer = server.chat(return_token_ids=True, n=2).json()
    prompt = server.engine.requests[0].prompt_token_ids
    assert answer["prompt_token_ids"] == prompt
    assert [choice["token_ids"] for choice in answer["choices"]] == [[300, 301, 302]] * 2
    assert "token_ids" not in server.chat().text
    first, second, *chunks = events(
        server.chat(return_token_ids=True, n=2, stream=True, stream_options={"include_usage": True})
    )
    assert (first["prompt_token_ids"], first["usage"]) == (prompt, None)
    assert "prompt_token_ids" not in second
    streamed: list[list[int]] = [[], []]
    for chunk in chunks[:-1]:
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0].get("token_ids", [])
    assert streamed == [[300, 301, 302]] * 2


@pytest.mark.parametrize("words", [("<think>", "a</think>b", "c"), ("Hel", "", "lo")])
def test_tokens_of_thoughts_and_tokens_without_text_are_told_once(words: tuple[str, ...]) -> None:
    for stream in (True, False):
        server = FakeServer(FakeEngine(words=words), reasoning_format="think")
        response = server.chat(return_token_ids=True, stream=stream)
        choices = [chunk["choices"][0] for chunk in events(response)] if stream else response.json()["choices"]
        assert [token for choice in choices for token in choice.get("token_ids", [])] == [300, 301, 302]


def test_named_tokens_are_told_with_the_chosen_one() -> None:
    fields = {"logprob_token_ids": [5, 301, 4], "return_tokens_as_token_ids": True, "max_tokens": 1}
    for more in ({"logprobs": True, "top_logprobs": 3}, {}):
        (told,) = FakeServer().chat(**fields, **more).json()["choices"][0]["logprobs"]["content"]
        tokens = {top["token"] for top in told["top_logprobs"]}
        assert tokens == {"token_id:300", "token_id:301", "token_id:4", "token_id:5"}
        assert told["top_logprobs"][0] == {"token": "token_id:300", "logprob": -0.5, "bytes": told["bytes"]}


def test_a_prompt_is_cut_to_its_last_tokens() -> None:
    server = FakeServer()
    long = "word " * 120
    whole = server.tokenizer.encode(
        f"<|im_start|>user\n{long}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
    )
    assert len(whole) > 256
    for given, max_tokens, kept in ((7, None, 7), (-1, None, 255), (-1, 56, 200), (-1, 999, 255)):
        assert server.chat(long, truncate_prompt_tokens=given, max_tokens=max_tokens).status_code == 200
        assert server.engine.requests[-1].prompt_token_ids == whole[-kept:]


def test_the_last_message_is_continued() -> None:
    server = FakeServer(FakeEngine(words=("so", "</think>", "Yes")), reasoning_format="think")
    for begun, add_generation_prompt in (("Hel", None), ("Hel", False), ("<think>Well,", None)):
        messages = [*HI, {"role": "assistant", "content": begun}]
        body = {
            "messages": messages,
            "continue_final_message": True,
            "add_generation_prompt": add_generation_prompt,
        }
        message = server.post(CHAT, body).json()["choices"][0]["message"]
        expected = f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{begun}"
        token_ids = server.tokenizer.encode(expected, add_special_tokens=False)
        assert server.engine.requests[-1].prompt_token_ids == token_ids
        assert server.post("/tokenize", body).json()["tokens"] == token_ids
    assert (message["reasoning_content"], message["content"]) == ("so", "Yes"), "thoughts that were begun go on"
