"""The attacks: each is a name and a function that sends requests or bytes, and notes what came back.

A case is over when all that it has sent is answered or left. It harms nobody's machine: it is cheap for the attacker,
and bounded in time. Attacks that need no ordinary clients beside them are tests: odd heads in
tests/unit/server/test_malformed_heads.py, floods and bad words in tests/integration/test_{server,engine}_attacks.py.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.attacks import hostile_inputs
from tests.attacks.hostile_inputs import Inputs
from tests.integration.test_server_attacks import HEALTH

COMPLETIONS, CHAT, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"
MESSAGES = [{"role": "user", "content": "Hi"}]
JSON = {"content-type": "application/json"}
NUM_ATTACKERS = 4
PATIENCE_S = 60.0
LEAVE_S = 0.5
Attack = Callable[["Target"], Awaitable[None]]


@dataclass
class Target:
    """A server, and what it has answered to one attack."""

    url: str
    statuses: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    slowest: str = ""
    wrong: list[str] = field(default_factory=list)
    """Answers that no client should get."""

    def __post_init__(self) -> None:
        limits = httpx.Limits(max_connections=None)
        self.client = httpx.AsyncClient(base_url=self.url, timeout=PATIENCE_S, limits=limits)

    async def send(
        self, path: str, body: Any, *, name: str = "", leave_s: float | None = None, request_id: str | None = None
    ) -> None:
        """A request, whose client leaves after `leave_s`."""
        content = body if isinstance(body, bytes) else packed(body)
        begun_s = time.perf_counter()
        asking = self.client.post(
            path, content=content, headers=JSON | ({} if request_id is None else {"x-request-id": request_id})
        )
        try:
            answer = await asyncio.wait_for(asking, leave_s)
        except TimeoutError:
            self.statuses["left"] += 1
            return
        except httpx.HTTPError as error:
            self.wrong.append(f"{name}: {error!r}")
            self.statuses["no answer"] += 1
            return
        self.statuses[str(answer.status_code)] += 1
        if (took_s := time.perf_counter() - begun_s) > self.slowest_s:
            self.slowest_s, self.slowest = took_s, name
        if answer.status_code >= 500 and answer.status_code != 503:
            self.wrong.append(f"{name}: {answer.status_code} {answer.text[:200]}")


@dataclass(frozen=True)
class Case:
    """One attack."""

    name: str
    attack: Attack
    needs_model: bool = False


def packed(body: Any) -> bytes:
    """As JSON; half of a pair stays an escape, and what is too deep for Python's writer is left out."""
    try:
        return json.dumps(body).encode()
    except RecursionError:
        return _packed_deep(body)


def _packed_deep(body: Any) -> bytes:
    """Of lists and objects only what comes last is kept."""
    opening, closing = [], []
    while isinstance(body, list | dict) and body:
        if isinstance(body, list):
            opening.append("[")
            closing.append("]")
            body = body[-1]
        else:
            key, body = next(reversed(body.items()))
            opening.append("{" + json.dumps(key) + ":")
            closing.append("}")
    return ("".join(opening) + json.dumps(body) + "".join(reversed(closing))).encode()


async def together(work: Iterable[Awaitable[None]], at_once: int = NUM_ATTACKERS) -> None:
    """All of it, so many at a time."""
    seats = asyncio.Semaphore(at_once)

    async def one(each: Awaitable[None]) -> None:
        async with seats:
            await each

    await asyncio.gather(*map(one, work))


def requests(path: str, bodies: Iterable[tuple[str, Any]], *, at_once: int = NUM_ATTACKERS) -> Attack:
    """Each of these bodies, with its name."""

    async def attack(target: Target) -> None:
        await together((target.send(path, body, name=name) for name, body in bodies), at_once)

    return attack


def left(path: str, bodies: Iterable[Any], *, then: Any) -> Attack:
    """All of these at once, whose clients leave; and an ordinary request after them, which is what is timed."""

    async def attack(target: Target) -> None:
        sent = list(bodies)
        await together((target.send(path, body, leave_s=LEAVE_S) for body in sent), len(sent))
        await target.send(path, then, name="the one after them")

    return attack


# ---- structured output ----------------------------------------------------------------------------------------------


def complete(**fields: Any) -> dict[str, Any]:
    return {"prompt": "a", "max_tokens": 2, **fields}


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": MESSAGES, "max_tokens": 2, **fields}


def structured(**fields: Any) -> dict[str, Any]:
    return complete(structured_outputs=fields)


def gbnf_chain(num_rules: int) -> str:
    rules = [f"r{number} ::= r{number + 1}" for number in range(num_rules - 1)]
    return "\n".join(["root ::= r0", *rules, f'r{num_rules - 1} ::= "a"'])


BACKTRACKING = {"oneOf": [{"type": "string", "pattern": "^(((((((a+)+)+)+)+)+)+)+$"}, {"enum": ["aaaaaaaaaaac"]}]}
MANY_ENUMS = {"oneOf": [{"enum": [f"{at}-{number}" for number in range(1000)]} for at in range(20)]}
UNCLOSED = [(f"{size:,}", structured(grammar='start: "' + '\\"' * size)) for size in (4_000, 16_000, 32_000, 120_000)]
UNCLOSED += [(f"/, {size:,}", structured(grammar="start: /" + "\\/" * size)) for size in (8_000, 60_000)]
GROWING = [
    structured(regex=f"(a|b|c|d|e|{number})*x(a|b|c|d|e){{{12 + number % 8}}}") | {"max_tokens": 100}
    for number in range(40)
]


def through_all_doors(schema: Any) -> list[tuple[str, str, Any]]:
    """(door, path, body): each field that takes a schema."""
    parameters = {"type": "object", "properties": {"a": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    named = {"name": "s", "schema": schema}
    form = {"type": "json_schema", "json_schema": named}
    message = {"model": "x", "max_tokens": 2, "messages": MESSAGES}
    return [
        ("structured_outputs", COMPLETIONS, structured(json=schema)),
        ("response_format", CHAT, chat(response_format=form)),
        ("tools", CHAT, chat(tools=[tool], tool_choice="required")),
        ("responses", "/v1/responses", {"input": "Hi", "text": {"format": {"type": "json_schema", **named}}}),
        ("messages", "/v1/messages", message | {"tools": [{"name": "f", "input_schema": schema}]}),
    ]


async def backtracking(target: Target) -> None:
    """Through every door, and again from a client that leaves."""
    doors = through_all_doors(BACKTRACKING)
    await together(target.send(path, body, name=door, leave_s=3.0) for door, path, body in doors)
    await together(target.send(path, body, name=door) for door, path, body in doors)


def each(kind: str, inputs: Inputs) -> Attack:
    """Hostile values of a field of structured output."""
    return requests(COMPLETIONS, [(name, structured(**{kind: value})) for name, value in inputs])


def each_in_chat(field: str, inputs: Inputs) -> Attack:
    return requests(CHAT, [(name, chat(**{field: value})) for name, value in inputs])


PATTERNS = [(name, {"type": "string", "pattern": value}) for name, value in hostile_inputs.hostile_regexes()]
LISTS = [
    Case(
        "hostile chat_template_kwargs", each_in_chat("chat_template_kwargs", hostile_inputs.hostile_template_kwargs())
    ),
    Case("hostile regexes", each("regex", hostile_inputs.hostile_regexes())),
    Case("hostile regexes as patterns", each("json", PATTERNS)),
    Case("hostile schemas", each("json", hostile_inputs.hostile_schemas())),
    Case("hostile grammars", each("grammar", hostile_inputs.hostile_grammars())),
    Case("hostile tools", each_in_chat("tools", hostile_inputs.hostile_tools())),
]


# ---- bytes ----------------------------------------------------------------------------------------------------------

POST = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
ODD_BODIES: list[tuple[str, bytes]] = [
    ("UTF-16", json.dumps(complete()).encode("utf-16")),
    ("BOM", b"\xef\xbb\xbf" + json.dumps(complete()).encode()),
    ("four million digits", b'{"prompt":"a","seed":' + b"9" * 4_000_000 + b"}"),
    ("500,000 biases", json.dumps(complete(logit_bias={str(number): 1 for number in range(500_000)})).encode()),
    ("eight megabytes of blanks", b" " * 8_000_000),
    ("four million commas", b'{"prompt":[' + b"5," * 3_900_000 + b"5]}"),
]


async def pipelined(target: Target) -> None:
    """Sixteen at once, whose client closes the connection behind them."""
    body = packed(complete(max_tokens=2000, ignore_eos=True))
    one = POST + b"content-length: %d\r\n\r\n" % len(body) + body
    url = httpx.URL(target.url)
    for _ in range(16):
        with socket.create_connection((url.host, url.port or 80), timeout=10) as connection:
            await asyncio.to_thread(connection.sendall, one + HEALTH * 4)
    target.statuses["left"] += 16


async def same_request_id(target: Target) -> None:
    """Two of one name, of which one is left."""
    body = complete(max_tokens=60, ignore_eos=True)
    await asyncio.gather(
        target.send(COMPLETIONS, body, leave_s=0.1, request_id="the-same"),
        target.send(COMPLETIONS, body, name="the other", request_id="the-same"),
    )


async def tokenize_while_others_wait(target: Target) -> None:
    """It is too long for ever, and told so: 400 or 413, whatever the queue has."""
    waiting = [target.send(COMPLETIONS, complete(max_tokens=200), leave_s=3.0) for _ in range(50)]
    text = target.send(TOKENIZE, {"prompt": "hello " * 1_300_000}, name="8 MB")
    await asyncio.gather(*waiting, text)
    if target.statuses["429"]:
        target.wrong.append("8 MB to /tokenize: 429, as if it could be served later")


REGEXES = [structured(regex=f"[a-z]{{{number + 1},300}}x{number}") for number in range(300)]
TOOL = {"type": "function", "function": {"name": "f"}}
WIDE = [
    ("7 MB", chat(structured_outputs={"regex": "a" * 7_000_000})),
    ("100 kB and tools", chat(structured_outputs={"regex": "a?" * 50_000}, tools=[TOOL])),
    ("a choice of 100,000", chat(structured_outputs={"choice": [str(number) for number in range(100_000)]})),
]
READINGS = [(f"{n:,}", complete(prompt=[5] * n, prompt_logprobs=20, max_tokens=1)) for n in (1000, 4000)]
SEARCH = complete(n=64, best_of=64, use_beam_search=True, max_tokens=12)
SAMPLERS = [{"repetition_penalty": 1e-300}, {"temperature": 1e-300}, {"top_p": 1e-300}, {"min_p": 1 - 1e-16}]
USERS = [(f"user {n}", complete(user=f"u{n}", max_tokens=100, ignore_eos=True)) for n in range(48)]
MANY_PROMPTS = complete(prompt=[[7] * 300] * 300, max_tokens=1)
LOGPROBS = complete(n=64, logprobs=20, max_tokens=100, ignore_eos=True)

CASES = [
    Case("a backtracking pattern, through all doors", backtracking),
    Case("an unclosed string in a grammar", requests(COMPLETIONS, UNCLOSED)),
    Case("GBNF chains, left", left(CHAT, [chat(structured_outputs={"grammar": gbnf_chain(8_000)})] * 2, then=chat())),
    Case("oneOf of long enums, left", left(COMPLETIONS, [structured(json=MANY_ENUMS)] * 6, then=complete())),
    Case("300 regexes, left", left(COMPLETIONS, REGEXES, then=structured(regex="[a-f]+"))),
    Case("automata that grow while decoding", requests(COMPLETIONS, [("", body) for body in GROWING], at_once=40)),
    Case("regexes too large, and beside tools", requests(CHAT, WIDE)),
    *LISTS,
    Case("prompt_logprobs", requests(COMPLETIONS, READINGS), needs_model=True),
    Case("searches of 64 beams", requests(COMPLETIONS, [("", SEARCH)] * 8, at_once=8), needs_model=True),
    Case("logprobs of 64 completions", requests(COMPLETIONS, [("", LOGPROBS)]), needs_model=True),
    Case("8 MB to /tokenize while others wait", tokenize_while_others_wait),
    Case("300 prompts of 300 tokens in a body", requests(COMPLETIONS, [("", MANY_PROMPTS)])),
    Case("48 invented users", requests(COMPLETIONS, USERS, at_once=48)),
    Case("extreme samplers", requests(COMPLETIONS, [(str(each), complete(**each)) for each in SAMPLERS])),
    Case("odd bodies", requests(COMPLETIONS, ODD_BODIES)),
    Case("pipelined and left", pipelined),
    Case("the same request id twice", same_request_id),
]
