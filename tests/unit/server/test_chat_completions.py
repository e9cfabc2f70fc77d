"""/v1/chat/completions as clients see it."""

from __future__ import annotations

import functools
import typing
from typing import Any

import msgspec
import pytest

from headway.core.request_options import RequestOptions
from headway.sampling_params import SamplingParams
from headway.server.api.answer_requests import (
    AllowedTools,
    FunctionDefinition,
    JsonSchemaFormat,
    ResponseFormat,
    ToolDefinition,
)
from headway.server.api.requests import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    ContentPart,
    MessageToolCall,
    StreamOptions,
)
from headway.tokenizer import spell_bad_words, tokenizer_from_gguf
from tests.unit.server.fake_engine import FakeEngine, FakeServer, engine_ready, events
from tests.unit.tokenizer.small import byte_level_metadata


def test_answer_has_openais_form() -> None:
    server = FakeServer()
    answer = server.chat().json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "small"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello world.", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
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
    server.post(
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]},
                {"role": "assistant", "content": "Yes?", "refusal": None, "tool_calls": None, "annotations": []},
                {"role": "user", "content": "Go"},
            ]
        },
    )
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi\nthere<|im_end|>\n"
        "<|im_start|>assistant\nYes?<|im_end|>\n<|im_start|>user\nGo<|im_end|>\n<|im_start|>assistant\n"
    )
    request = server.engine.requests[0]
    assert request.prompt_token_ids == server.tokenizer.encode(expected, add_special_tokens=False)


def test_what_clients_note_on_an_answer_comes_back_and_changes_nothing() -> None:
    server = FakeServer()
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    plain = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": '{"a": 1}'},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Yes"},
    ]
    noted_call = {**call, "function": {**call["function"], "parsed_arguments": {}}}
    noted = [
        plain[0],
        {**plain[1], "parsed": {"a": 1}},
        {**plain[2], "tool_calls": [noted_call], "provider_specific_fields": {"refusal": None}},
        plain[3],
    ]
    for messages in (plain, noted):
        assert server.post("/v1/chat/completions", {"messages": messages}).status_code == 200
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


def test_without_max_tokens_the_context_is_the_limit() -> None:
    server = FakeServer()
    server.chat(temperature=None, stop=None)
    assert server.engine.requests[0].params == SamplingParams(max_tokens=None)


def test_stream() -> None:
    response = FakeServer().chat(stream=True)
    chunks = events(response)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks[1:]] == ["Hello", " world", ".", None]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 4 + ["stop"]
    assert all("usage" not in chunk for chunk in chunks)


def test_stream_with_usage() -> None:
    *chunks, last = events(FakeServer().chat(stream=True, n=2, stream_options={"include_usage": True}))
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 6
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert all(chunk["usage"] is None for chunk in chunks)
    assert {chunk["choices"][0]["index"] for chunk in chunks} == {0, 1}


@pytest.mark.parametrize("include_usage", [True, False])
@pytest.mark.parametrize("chat", [True, False])
def test_usage_in_every_event(chat: bool, include_usage: bool) -> None:
    server = FakeServer()
    options = {"stream": True, "stream_options": {"continuous_usage_stats": True, "include_usage": include_usage}}
    *chunks, last = events(server.chat(**options) if chat else server.complete(**options))
    if not include_usage:
        chunks.append(last)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == ([0, 1, 2, 3, 3] if chat else [1, 2, 3])
    prompt = chunks[0]["usage"]["prompt_tokens"]
    assert all(chunk["usage"]["total_tokens"] == prompt + count for chunk, count in zip(chunks, counts, strict=True))
    if include_usage:
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 3
        assert last["usage"]["prompt_tokens"] == prompt


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


NEUTRAL = {
    "tools": None,
    "tool_choice": "none",
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "store": False,
    "service_tier": "auto",
    "metadata": {"run": "7"},
    "prompt_cache_key": "k",
    "safety_identifier": "s",
    "parallel_tool_calls": False,
    "verbosity": "medium",
    "user": "somebody",
    "stream": False,
    "logprobs": False,
}
CALLED = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": ""}}]}


def test_neutral_values_of_unsupported_fields_are_fine() -> None:
    assert FakeServer().chat(**NEUTRAL).status_code == 200
    assert FakeServer().chat(**NEUTRAL | {"tool_choice": "auto", "service_tier": "default"}).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"audio": {}}, "audio"),
        ({"store": True}, "store"),
        ({"metadata": "x"}, "metadata"),
        *(({"truncate_prompt_tokens": number}, "truncate_prompt_tokens") for number in (0, -2, 256)),
        ({"continue_final_message": True}, "messages[0].role"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"continue_final_message": True}}, "chat_template_kwargs"),
        ({"continue_final_message": True, "messages": [CALLED]}, "messages[0].tool_calls"),
        *(({"logprob_token_ids": ids}, "logprob_token_ids") for ids in ([600], [-1], list(range(129)))),
        ({"logprob_token_ids": [1], "logprobs": False}, "logprob_token_ids"),
        ({"logprob_token_ids": [1], "use_beam_search": True, "temperature": 0}, "logprob_token_ids"),
        *(({"allowed_token_ids": ids}, "allowed_token_ids") for ids in ([], [600], [1] * 1025)),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"temprature": 1}, "temprature"),
        ({"stream": True, "stream_options": {"include_usgae": True}}, "stream_options.include_usgae"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"n": 10**6}, "n"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        *(({"stop": texts}, "stop") for texts in (["x"] * 1000, "x" * 5000, ["x" * 1000] * 9, "")),
        *(({"bad_words": texts}, "bad_words") for texts in (["x"] * 2000, ["x" * 2000], ["x" * 1000] * 9)),
        ({"messages": [{"role": "user", "content": ""}] * 16_385}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 16_384}]}, "messages"),
        *(({"logit_bias": {name: bias}}, "logit_bias") for name, bias in (("5", 101), ("9999", 1), ("word", 1))),
        ({"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"seed": 2**70}, "seed"),
        ({"priority": 2**40}, "priority"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ],
)
def test_what_is_not_supported_or_wrong_is_400_with_its_name(fields: dict[str, Any], param: str) -> None:
    server = FakeServer()
    response = server.chat(**fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param.split(".")[-1].split("[")[0] in error["message"]
    assert not server.engine.requests


def test_priority_is_refused_where_nobody_looks_at_it() -> None:
    server = FakeServer()
    server.engine.info = engine_ready(scheduling_policy="fcfs")
    assert server.chat(priority=0).status_code == 200
    error = server.chat(priority=1).json()["error"]
    assert (error["param"], error["code"]) == ("priority", "unsupported_field")


def test_what_a_template_says_is_passed_on_and_how_it_fails_is_not() -> None:
    for template, shown in (("{{ raise_exception('Roles!') }}", "Roles!"), ("{{ messages[0].content + 5 }}", "fails")):
        tokenizer = tokenizer_from_gguf(byte_level_metadata(pre="gpt-2", **{"tokenizer.chat_template": template}))
        response = FakeServer(tokenizer=tokenizer).chat()
        assert response.status_code == 400
        assert shown in response.json()["error"]["message"]
        assert "str" not in response.json()["error"]["message"]


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
    assert "Did you mean 'temperature'?" in FakeServer().chat(temprature=1).json()["error"]["message"]
    error = FakeServer().post("/v1/chat/completions", {"model": "small"}).json()["error"]
    assert (error["message"], error["param"]) == ("'messages' is required.", "messages")
    unknown = FakeServer().chat(model="gpt-9")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


def test_served_model_names() -> None:
    server = FakeServer(served_model_name=("a", "b"))
    assert [server.chat(model=name).json()["model"] for name in ("a", "b")] == ["a", "a"]
    assert server.chat(model="small").status_code == 404


def test_a_prompt_that_does_not_fit() -> None:
    for content in ("word " * 600, "x" * 3_000_000):
        response = FakeServer().chat(content)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"


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


def test_tokens_without_text_are_told_where_ids_are_wanted() -> None:
    server = FakeServer(FakeEngine(words=("Hel", "", "lo")))
    assert len(events(server.chat(stream=True))) == 4
    chunks = events(server.chat(stream=True, return_token_ids=True))
    told = [chunk["choices"][0]["token_ids"] for chunk in chunks if "token_ids" in chunk["choices"][0]]
    assert told == [[300], [301], [302]]


@pytest.mark.parametrize("stream", [True, False])
def test_tokens_of_thoughts_and_text_are_told_once(stream: bool) -> None:
    server = FakeServer(FakeEngine(words=("<think>", "a</think>b", "c")), reasoning_format="think")
    response = server.chat(return_token_ids=True, stream=stream)
    choices = [chunk["choices"][0] for chunk in events(response)] if stream else response.json()["choices"]
    assert [token for choice in choices for token in choice.get("token_ids", [])] == [300, 301, 302]


def test_tokens_can_be_told_as_ids() -> None:
    answer = FakeServer().chat(logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True, max_tokens=1)
    (entry,) = answer.json()["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["top_logprobs"][0]["token"]) == ("token_id:300", "token_id:301")


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
    for given, fields, kept in (
        (7, {}, 7),
        (-1, {}, 255),
        (-1, {"max_tokens": 56}, 200),
        (-1, {"max_tokens": 999}, 255),
    ):
        assert server.chat(long, truncate_prompt_tokens=given, **fields).status_code == 200
        assert server.engine.requests[-1].prompt_token_ids == whole[-kept:]


@pytest.mark.parametrize("add_generation_prompt", [None, False])
def test_the_last_message_is_continued(add_generation_prompt: bool | None) -> None:
    server = FakeServer()
    body = {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hel"}],
        "continue_final_message": True,
        "add_generation_prompt": add_generation_prompt,
    }
    assert server.post("/v1/chat/completions", body).status_code == 200
    expected = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHel"
    token_ids = server.tokenizer.encode(expected, add_special_tokens=False)
    assert server.engine.requests[0].prompt_token_ids == token_ids
    assert server.post("/tokenize", body).json()["tokens"] == token_ids


def test_thoughts_that_were_begun_are_continued() -> None:
    server = FakeServer(FakeEngine(words=("so", "</think>", "Yes")), reasoning_format="think")
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>Well,"}]
    body = {"messages": messages, "continue_final_message": True}
    message = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("so", "Yes")
