"""What is refused with 400 and the name of the field that is to blame, at every API, in the words of its clients."""

from __future__ import annotations

from typing import Any

import pytest

from headway.server.api.tool_definitions import MAX_TOOLS
from headway.structured.tool_schemas import MAX_NESTING
from tests.unit.server.fake_engine import (
    BEAMS,
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    HI,
    MESSAGES,
    RESPONSES,
    FakeServer,
    engine_ready,
    infill_tokenizer,
)

OBJECT = {"type": "object"}
UNUSABLE = {"type": "object", "properties": {"x": {"$ref": "https://example.org/schema"}}}
REMOTE = ".properties.x.$ref"
CLOCK = {"type": "function", "function": {"name": "clock"}}
WEATHER = {"type": "function", "function": {"name": "weather"}}
FUNCTION = {"type": "function", "name": "add", "parameters": OBJECT}
NAMESPACE = {"type": "namespace", "name": "mcp__mail", "description": "Mail.", "tools": [FUNCTION]}
OURS = {"name": "add", "input_schema": OBJECT}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "point", "schema": OBJECT, "strict": True}}
SPACE = "disable_any_whitespace"
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SUFFIX = {"suffix": "x"}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"not": schema}
    return schema


def function(name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def as_schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def allowed(mode: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*tools]}}


def talk(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [*HI, {"role": "assistant", "content": None, "tool_calls": list(calls)}]}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts]}]}


WRONG_VALUES: dict[str, dict[str, list[Any]]] = {
    CHAT: {
        "audio": [{}],
        "store": [True],
        "metadata": ["x"],
        "truncate_prompt_tokens": [0, -2, 4096],
        "logprob_token_ids": [[600], [-1], list(range(129))],
        "allowed_token_ids": [[], [600], [1] * 1025],
        "stream_options": [{"include_usage": True}],
        "temprature": [1],
        "temperature": ["hot", -1],
        "stop": [["x"] * 1000, "x" * 5000, ["x" * 1000] * 9, ""],
        "bad_words": [["x"] * 2000, ["x" * 2000], ["x" * 1000] * 9],
        "logit_bias": [{"9999": 1}, {str(number): 1 for number in range(2000)}],
        "top_logprobs": [2],
        "priority": [2**40],
        "messages": [[], "Hi", [{"role": "user", "content": ""}] * 16_385],
        "best_of": [2.5, 10**6],
        "use_beam_search": [1],
        "ttft_target_ms": [0, -1, 1e12, "500", True],
        "tpot_target_ms": [0.0, []],
        "service_class": [5],
        "user": [5, "x" * 257],
        "predicted_tokens": [5],
        "cache_salt": ["", "x" * 257, 5],
        "cache_ttl_s": [-1, 86_400.5, "60"],
        "kv_transfer_params": [{"do_remote_decode": True}],
        "logits_processors": [["x"]],
        "tools": [{}],
        "parallel_tool_calls": [2],
        "functions": [[{"name": "f"}]],
        "function_call": ["auto"],
        "structured_outputs": [{}, {"json_object": False}],
        "guided_json": [{}],
        "guided_regex": ["a"],
        "guided_choice": [["a"]],
        "guided_grammar": ["a"],
        "reasoning_effort": ["extreme"],
        "chat_template_kwargs": [{"messages": []}, {"continue_final_message": True}, nested(MAX_NESTING)],
    },
    COMPLETIONS: {
        "prompt": ["", [], [[]], [""], ["Hi", 5], [5, [6]], [600], [-1], None, [1] * 4096],
        "max_tokens": [0, -1],
        "logprobs": [21, True],
        "suffix": [5],
    },
    EMBEDDINGS: {
        "input": [[], ["a", 1], "", [1] * 5000, None],
        "dimensions": [0, 5],
        "pooling": ["max"],
        "encoding_format": ["int8"],
        "stream": [True],
    },
    "/tokenize": {"prompt": [5, None], "add_generation_prompt": [True], "chat_template_kwargs": [{}]},
    "/detokenize": {"tokens": [[600], [-1], [], None]},
    RESPONSES: {
        "tool_choice": ["sometimes"],
        "background": [0.0, True],
        "min_p": [7],
        "n": [2],
        "top_logprobs": [99],
        "max_output_tokens": [0],
        "temperature": [-1],
        "user": ["u" * 300],
        "colour": [1],
        "store": [True],
        "previous_response_id": ["resp_1"],
        "conversation": ["conv_1"],
        "prompt": [{"id": "p"}],
        "truncation": ["auto"],
        "include": [["file_search_call.results"]],
        "stream_options": [{"include_obfuscation": False}],
        "input": [None, [], HI * 20_000, [{"type": "function_call_output", "call_id": "", "output": ""}]],
    },
    MESSAGES: {
        "context_management": [{"edits": [{"type": "clear_tool_uses_20250919"}]}],
        "thread": [{"type": "create"}],
        "compaction": [{"type": "summarize"}],
        "mcp_servers": [[{"url": "x"}]],
        "container": ["c"],
        "speed": ["fast"],
        "max_tokens": [None, 0],
        "model": [None],
        "stop_sequences": [["a" * 2000]],
        "colour": [1],
        "messages": [[]],
    },
}
WRONG_TOGETHER: dict[str, list[tuple[dict[str, Any], str]]] = {
    "/detokenize": [({"tokens": ["a"]}, "tokens[0]")],
    CHAT: [
        ({"continue_final_message": True}, "messages[0].role"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        (talk(CALL) | {"continue_final_message": True}, "messages[1].tool_calls"),
        ({"logprob_token_ids": [1], "logprobs": False}, "logprob_token_ids"),
        ({"logprob_token_ids": [1], "use_beam_search": True, "temperature": 0}, "logprob_token_ids"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"stream": True, "stream_options": {"include_usgae": True}}, "stream_options.include_usgae"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        (user(*[{"type": "text", "text": ""}] * 16_384), "messages"),
        (user({"type": "refusal", "text": "a"}), "messages[0].content[0].text"),
        (user({"type": "image_url"}), "messages[0].content[0].type"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({**BEAMS, "stream": True}, "use_beam_search"),
        ({**BEAMS, "logprobs": True}, "logprobs"),
        ({**BEAMS, "best_of": 65}, "best_of"),
        ({"n": 65, "use_beam_search": True}, "n"),
        ({**BEAMS, "stop_token_ids": list(range(65))}, "stop_token_ids"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [WEATHER, {"type": "function", "function": {}}]}, "tools[1].function.name"),
        *(({"tools": [function(name)]}, "tools[0].function.name") for name in ("", "a b", "x" * 129)),
        ({"tools": [WEATHER, CLOCK, WEATHER]}, "tools[2].function.name"),
        ({"tools": [function(parameters={"type": "string"})]}, "tools[0].function.parameters.type"),
        ({"tools": [function(parameters={"required": True})]}, "tools[0].function.parameters.required"),
        ({"tools": [function(parameters={"properties": 5})]}, "tools[0].function.parameters.properties"),
        ({"tools": [function(parameters=nested(MAX_NESTING))]}, "tools[0].function.parameters"),
        ({"tools": [function(paramters={})]}, "tools[0].function.paramters"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [function(f"f{i}") for i in range(MAX_TOOLS + 1)]}, "tools"),
        ({"tools": [function(description="x" * 2**21)]}, "tools"),
        ({"tool_choice": "any", "tools": [CLOCK]}, "tool_choice"),
        ({"tool_choice": function("weather")}, "tool_choice"),
        ({"tool_choice": function("weather"), "tools": [CLOCK]}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "function", "function": {}}, "tools": [CLOCK]}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "custom"}, "tools": [CLOCK]}, "tool_choice.type"),
        ({"tool_choice": allowed("auto"), "tools": [CLOCK]}, "tool_choice.allowed_tools.tools"),
        (
            {"tool_choice": allowed("auto", function("x")), "tools": [CLOCK]},
            "tool_choice.allowed_tools.tools[0].function.name",
        ),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": JSON_SCHEMA | {"json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
        ({"response_format": JSON_SCHEMA | {"type": "text"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "schema": {}}}, "response_format.schema"),
        (as_schema([1]), "response_format.json_schema.schema"),
        (as_schema(nested(MAX_NESTING)), "response_format.json_schema.schema"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
        ({"structured_outputs": {"regex": "a", SPACE: True}}, f"structured_outputs.{SPACE}"),
        ({"structured_outputs": {"json": nested(MAX_NESTING)}}, "structured_outputs.json"),
        *(
            ({"structured_outputs": {"json": text}, "tools": [CLOCK]}, "structured_outputs.json")
            for text in ("{", "5", '{"not":' * 5000)
        ),
        ({"structured_outputs": {"grammar": "root ::= ("}, "tools": [CLOCK]}, "structured_outputs.grammar"),
        ({"structured_outputs": {"regex": "a"}, "response_format": JSON_SCHEMA}, "structured_outputs"),
        ({"chat_template_kwargs": nested(MAX_NESTING)}, "chat_template_kwargs"),
        ({"response_format": JSON_SCHEMA, "use_beam_search": True, "n": 2}, "response_format"),
        ({"structured_outputs": {"regex": "a"}, "use_beam_search": True, "n": 2}, "structured_outputs"),
        ({"tools": [CLOCK], "use_beam_search": True, "n": 2}, "tools"),
        *(
            ({"messages": [message]}, f"messages[0].{field}")
            for message, field in (
                ({"role": "tool", "content": "x"}, "tool_call_id"),
                ({"role": "tool", "tool_call_id": "a"}, "content"),
                ({"role": "user", "content": "x", "tool_call_id": "a"}, "tool_call_id"),
                ({"role": "user", "content": "x", "tool_calls": [CALL]}, "tool_calls"),
                ({"role": "user", "content": "x", "reasoning": "y"}, "reasoning"),
                ({"role": "function", "content": "x", "name": "f"}, "role"),
                ({"role": "assistant", "content": None}, "content"),
                ({"role": "assistant", "function_call": {"name": "f", "arguments": ""}}, "function_call"),
            )
        ),
        (talk({"id": "a", "function": {"name": "f"}}), "messages[1].tool_calls[0].function.arguments"),
        (talk(*[CALL] * 9000), "messages"),
    ],
    COMPLETIONS: [
        ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
        ({"prompt": [5.5]}, "prompt[0]"),
        ({"prompt": [[1]] * 600, "n": 2}, "n"),
        ({"prompt": [1, 2], **SUFFIX}, "suffix"),
        ({"echo": True, **SUFFIX}, "echo"),
        ({"truncate_prompt_tokens": 5, **SUFFIX}, "truncate_prompt_tokens"),
        ({"suffix": "word " * 5000}, "prompt"),
        ({**BEAMS, "top_p": 0.9}, "top_p"),
        ({**BEAMS, "logprobs": 0}, "logprobs"),
        ({**BEAMS, "stream": True}, "use_beam_search"),
    ],
    "/tokenize": [
        ({"messages": HI}, "prompt"),
        ({"prompt": None, "messages": HI, "add_special_tokens": True}, "add_special_tokens"),
    ],
    RESPONSES: [
        ({"tools": [{"type": "web_search"}, FUNCTION], "tool_choice": "required"}, "tools[0]"),
        ({"tools": ["add"]}, "tools[0]"),
        ({"tools": [{"type": "frobnicate"}]}, "tools[0].type"),
        ({"tools": [{"name": "add"}]}, "tools[0].type"),
        ({"tools": [NAMESPACE | {"tools": [{"type": "web_search"}]}]}, "tools[0].tools[0].type"),
        ({"tools": [NAMESPACE, FUNCTION | {"name": "mcp__mail__add"}]}, "tools[1].name"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools[1].name"),
        ({"tools": [NAMESPACE | {"tools": [FUNCTION] * 600}]}, "tools"),
        ({"tools": [FUNCTION] * 600}, "tools"),
        (
            {"tools": [{"type": "web_search"}, NAMESPACE | {"tools": [FUNCTION | {"name": "a b"}]}]},
            "tools[1].tools[0].name",
        ),
        ({"tools": [FUNCTION | {"parameters": {"type": "string"}}]}, "tools[0].parameters.type"),
        ({"tools": [{"type": "web_search"}, FUNCTION | {"parameters": UNUSABLE}]}, f"tools[1].parameters{REMOTE}"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "sub"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": UNUSABLE}}}, f"text.format.schema{REMOTE}"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"input": ["Hi"]}, "input[0]"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [HI[0] | {"colour": 1}]}, "input[0].colour"),
        ({"input": [HI[0] | {"content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ],
    MESSAGES: [
        ({"tools": [OURS | {"input_schema": UNUSABLE}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "add"}]}, "tools[0].input_schema"),
        ({"tools": [OURS | {"input_schema": {"type": "string"}}]}, "tools[0].input_schema.type"),
        ({"tools": [OURS | {"input_examples": [{}]}]}, "tools[0].input_examples"),
        ({"tools": [OURS | {"name": ""}]}, "tools[0].name"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [SEARCH, OURS | {"input_schema": UNUSABLE}]}, "tools[1].input_schema"),
        ({"tools": [SEARCH, OURS | {"name": "a b"}]}, "tools[1].name"),
        ({"tools": [OURS, SEARCH], "tool_choice": {"type": "any"}}, "tools[1]"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "auto", "name": "add"}}, "tool_choice.name"),
        ({"output_config": {"format": {"type": "json_schema", "schema": UNUSABLE}}}, "output_config.format.schema"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        (
            {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": {"value": 1}}]}},
            "context_management.edits[0].keep",
        ),
        ({"thinking": {"type": "adaptive", "display": "updates"}}, "thinking.display"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 50}}, "thinking.budget_tokens"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        *(
            (user({"type": kind, "source": {}}), "messages[0].content[0].type")
            for kind in ("image", "document", "tool_use")
        ),
        (user({"type": "text", "text": "a", "citations": [{}]}), "messages[0].content[0].citations"),
        (user({"type": "text"}), "messages[0].content[0].text"),
        (
            user(
                {"type": "text", "text": "a"},
                {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]},
            ),
            "messages[0].content[1].content[0].type",
        ),
        (
            {"messages": [*HI, {"role": "assistant", "content": [{"type": "server_tool_use"}]}]},
            "messages[1].content[0].type",
        ),
    ],
}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        *((path, {name: value}, name) for path, of in WRONG_VALUES.items() for name in of for value in of[name]),
        *((path, fields, param) for path, of in WRONG_TOGETHER.items() for fields, param in of),
    ],
)
def test_what_is_wrong_is_400_with_its_name(path: str, fields: dict[str, Any], param: str) -> None:
    server = FakeServer(tokenizer=infill_tokenizer())
    server.engine.info = engine_ready(max_model_len=4096)
    response = server.send(path, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error" and param in error["message"]
    assert path == MESSAGES or error["param"] == param
    assert "function.parameters" not in error["message"] or path == CHAT, "the words of another API"
    assert "response_format" not in error["message"] or path == CHAT
    assert not server.engine.requests and not server.services.limits.num_requests
