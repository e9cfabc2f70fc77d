"""Requests made up from the server's own OpenAPI document, against a running server.

Never a 5xx, never a wait without end, always a status and a body that the document knows; and what breaks its rules is
refused. Most made-up requests are refused, since one bad value out of forty is enough; those of the narrower document
below are answered, so that the engine gets its share of oddities too.

$HEADWAY_FUZZ_EXAMPLES makes that many for each endpoint, a thousand take minutes; with $HEADWAY_FUZZ_MODEL=1 the
embedded model answers, in place of an engine without one.
"""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from headway.server.api.openapi import document
from tests.integration.server_process import ServerProcess, running_server

NUM_EXAMPLES = int(os.environ.get("HEADWAY_FUZZ_EXAMPLES", "0"))
PHASES = ["coverage", "fuzzing"] if NUM_EXAMPLES else ["fuzzing"]
"""Coverage goes through the limits of every field one by one, which takes more than a thousand requests."""
FACTORY = (
    ()
    if os.environ.get("HEADWAY_FUZZ_MODEL")
    else ("--engine-factory", "headway.engine_process.engine_without_model:create_engine")
)
PATIENCE_S = 30.0
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
]
SETTINGS = settings(
    max_examples=NUM_EXAMPLES or 20,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    database=None,
)

DOCUMENT: dict[str, Any] = msgspec.to_builtins(document())
TEXT = {"type": "string", "minLength": 1, "maxLength": 60}
TOKEN = {"type": "integer", "minimum": 0, "maximum": 49151}
CHANCE = {"type": "number", "minimum": 0.01, "maximum": 1}
PENALTY = {"type": "number", "minimum": -2, "maximum": 2}
PLAUSIBLE = {
    "n": {"type": "integer", "minimum": 1, "maximum": 4},
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": CHANCE,
    "top_k": {"type": "integer", "minimum": -1, "maximum": 100_000},
    "min_p": CHANCE,
    "repetition_penalty": {"type": "number", "minimum": 0.1, "maximum": 5},
    "presence_penalty": PENALTY,
    "frequency_penalty": PENALTY,
    "seed": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    "max_tokens": {"type": "integer", "minimum": 1, "maximum": 40},
    "stop": {"type": "array", "items": TEXT, "maxItems": 4},
    "stop_token_ids": {"type": "array", "items": TOKEN, "maxItems": 4},
    "bad_words": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,9}$"}, "maxItems": 4},
    "ignore_eos": {"type": "boolean"},
    "include_stop_str_in_output": {"type": "boolean"},
    "skip_special_tokens": {"type": "boolean"},
    "logit_bias": {
        "type": "object",
        "patternProperties": {"^[1-9][0-9]{0,3}$": {"type": "number", "minimum": -100, "maximum": 100}},
        "additionalProperties": False,
        "maxProperties": 5,
    },
    "priority": {"type": "integer", "minimum": -5, "maximum": 5},
    "stream": {"type": "boolean"},
    "user": TEXT,
}
PROMPTS = [TEXT, {"type": "array", "items": TOKEN, "minItems": 1, "maxItems": 30}]
MESSAGE = {
    "type": "object",
    "properties": {"role": {"enum": ["user", "assistant", "system"]}, "content": TEXT},
    "required": ["role", "content"],
    "additionalProperties": False,
}


def plausible_document() -> dict[str, Any]:
    """Both kinds of completions, with fields and values that a sensible client could send."""
    narrow = copy.deepcopy(DOCUMENT)
    records = narrow["components"]["schemas"]
    records["CompletionRequest"]["properties"] = {
        **PLAUSIBLE,
        "prompt": {"anyOf": [*PROMPTS, {"type": "array", "items": PROMPTS[0], "minItems": 1, "maxItems": 3}]},
        "echo": {"type": "boolean"},
        "logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
    }
    records["ChatCompletionRequest"]["properties"] = {
        **PLAUSIBLE,
        "messages": {"type": "array", "items": MESSAGE, "minItems": 1, "maxItems": 2},
        "logprobs": {"type": "boolean"},
    }
    narrow["paths"] = {path: found for path, found in narrow["paths"].items() if path.endswith("/completions")}
    return narrow


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """With a short context, since a made-up request may ask for all of it."""
    with running_server(
        "--max-model-len", "256", "--no-access-log", "--scheduling-policy", "priority", *FACTORY
    ) as running:
        yield running


@pytest.fixture(scope="module")
def statuses() -> Iterator[Counter[tuple[str, int]]]:
    """How many answers there were of each."""
    counted: Counter[tuple[str, int]] = Counter()
    yield counted
    print(f"\n{counted.total()} requests: {dict(sorted(counted.items()))}")


any_schema = schemathesis.openapi.from_dict(DOCUMENT)
any_schema.config.phases.update(phases=PHASES)
plausible_schema = schemathesis.openapi.from_dict(plausible_document())
plausible_schema.config.phases.update(phases=PHASES)
plausible_schema.config.generation.update(modes=[schemathesis.GenerationMode.POSITIVE])


def test_the_document_is_the_servers_own(server: ServerProcess) -> None:
    assert httpx.get(f"{server.url}/openapi.json").json() == DOCUMENT


@any_schema.parametrize()
@SETTINGS
def test_any_request(case: schemathesis.Case, server: ServerProcess, statuses: Counter[tuple[str, int]]) -> None:
    answer = case.call(base_url=server.url, timeout=PATIENCE_S)
    statuses["any", answer.status_code] += 1
    case.validate_response(answer, checks=CHECKS)


@plausible_schema.parametrize()
@SETTINGS
def test_plausible_request(case: schemathesis.Case, server: ServerProcess, statuses: Counter[tuple[str, int]]) -> None:
    answer = case.call(base_url=server.url, timeout=PATIENCE_S)
    statuses["plausible", answer.status_code] += 1
    case.validate_response(answer, checks=CHECKS[:5])


def test_nothing_is_left_behind(server: ServerProcess, statuses: Counter[tuple[str, int]]) -> None:
    assert statuses["any", 400] > 5 and statuses["plausible", 200] > 5, statuses
    gauges = server.wait_until_idle(timeout_s=20)
    assert gauges["engine_restarts_total"] == gauges["front_end_restarts_total"] == 0
    assert gauges["event_loop_stalls_total"] == 0, [line for line in server.log if "stands still" in line]
    answer = httpx.post(
        f"{server.url}/v1/completions", json={"prompt": "Hi", "max_tokens": 4, "ignore_eos": True}, timeout=60
    )
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert not [line for line in server.log if "Traceback" in line]
    assert server.terminate() == 0
