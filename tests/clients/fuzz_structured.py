"""Mutated and hostile schemas and tool lists against a running server. Run by hand, with the standard library only:

    python fuzz_structured.py URL SCHEMAS.jsonl --number 2000 --seed 0

SCHEMAS.jsonl has an object with a "schema" per line. Each request has `max_tokens` 8. Counted are answers by status,
5xx, requests without an answer, and refusals that took more than a second, also when sent again without others beside
them; plain streams run all the time, and their longest pause is told. At the end the server must be healthy, must not
have restarted its engine, and must answer a plain request as it did before. Exit status 1 if any of this is not so.
"""

from __future__ import annotations

import argparse
import collections
import copy
import http.client
import json
import random
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

NO_ANSWER_S = 120.0
MOST_TOOL_CHARS = 1_500  # of most schemas of tools: they are part of the prompt, and a CPU reads it slowly
SLOW_REFUSAL_S = 1.0
HEADERS = {"Content-Type": "application/json"}
KEYWORDS = (
    "type properties required items additionalProperties enum const anyOf oneOf allOf not if then else pattern format "
    "minimum maximum exclusiveMinimum multipleOf minLength maxLength minItems maxItems uniqueItems contains $ref $defs "
    "patternProperties propertyNames minProperties dependentRequired unevaluatedProperties prefixItems x-guidance"
)
VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        2**31,
        2**63,
        10**400,
        -(10**400),
        1e308,
        1e-308,
        0.1,
        "",
        "a",
        "\x00",
        "\ud7ff\U0001f600",
    ),
    *(
        "(a+)+$",
        "(?=x)",
        "[",
        "\\p{L}{1,999999}",
        "^.{0,100000}$",
        "(a|aa)*b",
        "\\1",
        "date-time",
        "#",
        "#/",
        "#/$defs/a",
    ),
    *("https://example.org/schema.json", "file:///etc/passwd", "object", "string", "integer", "nothing"),
    *([], {}, [[]], [{}], [None], {"": {}}, {"type": []}, {"a": 1}, ["object", "null"], {"$ref": "#"}),
)


def nested(depth: int, *, key: str = "properties") -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}} if key == "properties" else {key: [schema]}
    return schema


def strings(number: int) -> dict[str, Any]:
    return {f"p{place}": {"type": "string"} for place in range(number)}


HOSTILE: dict[str, Callable[[], Any]] = {
    "recursive": lambda: {"type": "object", "properties": {"a": {"$ref": "#"}}},
    "recursive, required": lambda: {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "reference to itself": lambda: {"$ref": "#"},
    "references in a loop": lambda: {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
    },
    "references that double": lambda: {
        "$ref": "#/$defs/d40",
        "$defs": {"d0": {"type": "string"}}
        | {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n - 1}"}] * 2} for n in range(1, 41)},
    },
    "anyOf in allOf": lambda: {"allOf": [{"anyOf": [{"required": [f"{n}{m}"]} for m in range(9)]} for n in range(9)]},
    "remote reference": lambda: {"$ref": "https://example.org/schema.json"},
    "dynamic reference": lambda: {"$dynamicRef": "#a"},
    "10 MB": lambda: {"type": "object", "description": "x" * 10_000_000},
    "5 MB of properties": lambda: {"type": "object", "properties": strings(170_000)},
    "200 kB of properties": lambda: {"type": "object", "properties": strings(6_500)},
    "5,000 alternatives": lambda: {"anyOf": [{"const": f"value {n}"} for n in range(5_000)]},
    "1,900 alternatives": lambda: {"anyOf": [{"type": "object", "properties": {f"p{n}": {}}} for n in range(1_900)]},
    "20,000 values": lambda: {"enum": [f"value {n}" for n in range(20_000)]},
    "1,000 optional": lambda: {"type": "object", "properties": strings(1_000), "additionalProperties": False},
    "1,000 required": lambda: {"type": "object", "properties": strings(1_000), "required": list(strings(1_000))},
    "200 oneOf": lambda: {"oneOf": [{"type": "object", "properties": strings(n)} for n in range(200)]},
    "regex, nested repeats": lambda: {"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"},
    "regex, alternatives": lambda: {"type": "string", "pattern": "^(a|a?)+$" * 50},
    "regex, counted": lambda: {"type": "string", "pattern": "^(.*a.{500}){5}$"},
    "regex, intersection": lambda: {"allOf": [{"type": "string", "pattern": f".*a.{{{n}}}b.*"} for n in range(30)]},
    "regex, long": lambda: {"type": "string", "pattern": "a?" * 100_000},
    "regex, open": lambda: {"type": "string", "pattern": "(" * 5_000},
    "pattern properties": lambda: {"patternProperties": {f"^(a|b)*{n}.{{50}}$": {} for n in range(45)}},
    "20 deep": lambda: nested(20),
    "1,000 deep": lambda: nested(1_000),
    "50,000 deep": lambda: "[" * 50_000,
    "allOf, 60 deep": lambda: nested(60, key="allOf"),
    "anyOf, 1,000 deep": lambda: nested(1_000, key="anyOf"),
    "not, not": lambda: {"not": {"not": {"not": {"type": "string"}}}},
    "huge numbers": lambda: {"type": "integer", "minimum": -(10**300), "maximum": 10**300, "multipleOf": 7},
    "tiny steps": lambda: {"type": "number", "minimum": 0, "maximum": 1e300, "multipleOf": 1e-12},
    "huge counts": lambda: {"type": "array", "minItems": 10**9, "items": nested(3)},
    "counts that multiply": lambda: {
        "type": "array",
        "minItems": 400,
        "items": {"type": "array", "minItems": 400, "items": {"type": "integer"}},
    },
    "huge lengths": lambda: {"type": "string", "minLength": 10**9, "maxLength": 10**12},
    "nothing": lambda: {"type": "string", "enum": [1, 2]},
    "no value": lambda: {"enum": []},
    "escaped names": lambda: {"type": "object", "properties": {'\x00\\"\n': {}, "\U0001f600" * 999: {}}},
    "options of the compiler": lambda: {"type": "string", "x-guidance": {"whitespace_pattern": "(a+)+", "lenient": 1}},
    "format": lambda: {"type": "string", "format": "regex"},
    "unique": lambda: {"type": "array", "uniqueItems": True, "minItems": 90, "items": {"enum": list(range(100))}},
    "dependencies": lambda: {"dependentRequired": {f"p{n}": [f"p{n + 1}"] for n in range(40)}},
}
HOSTILE_TOOLS: dict[str, Callable[[], Any]] = {
    "600 tools": lambda: [tool(f"t{n}", nested(1)) for n in range(600)],
    "500 tools": lambda: [tool(f"t{n}", nested(1)) for n in range(500)],
    "100 tools of 30 parameters": lambda: [
        tool(f"t{n}", {"type": "object", "properties": strings(30)}) for n in range(100)
    ],
    "same name": lambda: [tool("t", nested(1)), tool("t", nested(1))],
    "no name": lambda: [tool("", nested(1))],
    "long name": lambda: [tool("t" * 10_000, nested(1))],
    "odd name": lambda: [tool("</tool_call>", nested(1))],
    "no function": lambda: [{"type": "function"}],
    "other type": lambda: [{"type": "web_search"}],
    "no list": lambda: {"type": "function"},
    "no tools": list,
    "null": lambda: [None],
    "parameters of an array": lambda: [tool("t", {"type": "array"})],
    "long description": lambda: [{"type": "function", "function": {"name": "t", "description": "x " * 100_000}}],
    "template in a description": lambda: [
        {"type": "function", "function": {"name": "t", "description": "{{ 1/0 }} {% raw %} <|im_end|>"}}
    ],
}
OTHERS: dict[str, Callable[[], Any]] = {
    "regex": lambda: {"regex": "((a{1,100}){1,100}){1,100}"},
    "regex that looks ahead": lambda: {"regex": "(?=a)b"},
    "regex, long": lambda: {"regex": "a?" * 4_000},
    "choices": lambda: {"choice": [f"value {n}" for n in range(4_000)]},
    "no choices": lambda: {"choice": []},
    "grammar without end": lambda: {"grammar": "start: start"},
    "grammar of nothing": lambda: {"grammar": 'start: "a" & "b"'},
    "ambiguous grammar": lambda: {"grammar": 'start: a\na: a a | "x" | ""'},
    "broken grammar": lambda: {"grammar": "start: ((("},
    "deep grammar": lambda: {"grammar": "start: " + "(" * 5_000 + '"a"' + ")" * 5_000},
    "large grammar": lambda: {"grammar": "start: r0\n" + "\n".join(f'r{n}: r{n + 1} | "{n}"' for n in range(9_000))},
    "grammar with a file": lambda: {"grammar": "%import /etc/passwd\nstart: a"},
    "white space": lambda: {"json": {"type": "object"}, "whitespace_pattern": "((a{1,99}){1,99}){1,99}"},
    "two kinds": lambda: {"regex": "a", "choice": ["a"]},
}


def tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def mutated(schema: Any, chance: random.Random, others: list[Any]) -> Any:
    """Change a few places of a schema."""
    found = copy.deepcopy(schema)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        places: list[Any] = []
        rest = [found]
        while rest:
            one = rest.pop()
            if isinstance(one, dict | list) and one:
                places.append(one)
                rest += one.values() if isinstance(one, dict) else one
        if not places:
            return chance.choice(VALUES)
        place = chance.choice(places)
        key = chance.choice(list(place) if isinstance(place, dict) else range(len(place)))
        match chance.randrange(7):
            case 0:
                del place[key]
            case 1:
                place[key] = copy.deepcopy(chance.choice(VALUES))
            case 2 if isinstance(place, dict):
                place[chance.choice(KEYWORDS.split())] = place[key]
            case 3 if isinstance(place, dict):
                place[chance.choice(KEYWORDS.split())] = copy.deepcopy(chance.choice(VALUES))
            case 4:
                place[key] = copy.deepcopy(chance.choice(others))
            case 5:
                place[key] = {chance.choice(("anyOf", "oneOf", "allOf")): [copy.deepcopy(place[key]), place[key]]}
            case _:
                place[key] = {"$ref": chance.choice(("#", "#/properties/a", "#/$defs/a", "b", "http://[", "#/%ZZ"))}
    return found


@dataclass(frozen=True)
class Case:
    """One request."""

    name: str
    body: bytes


def case(number: int, chance: random.Random, schemas: list[Any]) -> Case:
    """Every tenth one is hostile by design."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Go."}], "max_tokens": 8, "temperature": 1.0}
    body["stream"] = chance.random() < 0.3
    is_hostile = number % 10 == 0
    if is_hostile:
        place = number // 10
        if place % 4 == 2:
            name = list(HOSTILE_TOOLS)[place // 4 % len(HOSTILE_TOOLS)]
            body |= {"tools": HOSTILE_TOOLS[name](), "tool_choice": chance.choice(("auto", "required"))}
            return Case(f"tools: {name}", encode(body))
        if place % 4 == 3:
            name = list(OTHERS)[place // 4 % len(OTHERS)]
            return Case(f"structured_outputs: {name}", encode(body | {"structured_outputs": OTHERS[name]()}))
        name = list(HOSTILE)[(place // 4 * 2 + place % 4) % len(HOSTILE)]
        schema: Any = HOSTILE[name]()
        if isinstance(schema, str):
            text = encode(
                body | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 0}}}
            )
            return Case(name, text.replace(b'"schema": 0', b'"schema": ' + schema.encode()))
    else:
        name = "mutated"
        schema = mutated(chance.choice(schemas), chance, schemas[:40])
    if chance.random() < 0.6:
        wanted = {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": schema, "strict": chance.random() < 0.5},
        }
        return Case(f"response_format: {name}", encode(body | {"response_format": wanted}))
    small = [one for one in schemas if len(json.dumps(one)) < MOST_TOOL_CHARS]
    if not is_hostile and chance.random() < 0.95:
        schema = mutated(chance.choice(small), chance, small[:40])
    if isinstance(schema, dict) and chance.random() < 0.9:
        schema = {**schema, "type": "object"}
    tools = [tool("f", schema)]
    if not is_hostile:
        tools += [tool(f"g{n}", nested(n)) for n in range(1, chance.randrange(1, 4))]
        if chance.random() < 0.2:
            tools = mutated(tools, chance, [*small[:40], tools])
    choice = chance.choice(("auto", "required", "required", {"type": "function", "function": {"name": "f"}}))
    return Case(f"tools: {name}", encode(body | {"tools": tools, "tool_choice": choice}))


def encode(body: Any) -> bytes:
    return json.dumps(body).encode()


@dataclass
class Outcome:
    """What came of the requests."""

    statuses: collections.Counter[int] = field(default_factory=collections.Counter)
    errors: collections.Counter[str] = field(default_factory=collections.Counter)
    faults: list[str] = field(default_factory=list)
    slow_refusals: list[int] = field(default_factory=list)
    slowest: list[tuple[float, int, str]] = field(default_factory=list)


class Server:
    """The server under test."""

    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        self._address = (parts.hostname or "127.0.0.1", parts.port or 80)
        self.num_events = 0
        """Of plain streams."""

    def get(self, path: str) -> tuple[int, str]:
        return self._ask("GET", path, None)

    def chat(self, body: bytes) -> tuple[int, str]:
        return self._ask("POST", "/v1/chat/completions", body)

    def _ask(self, method: str, path: str, body: bytes | None) -> tuple[int, str]:
        connection = http.client.HTTPConnection(*self._address, timeout=NO_ANSWER_S)
        try:
            connection.request(method, path, body, HEADERS)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(errors="replace")
        finally:
            connection.close()

    def longest_pause(self, ended: threading.Event) -> float:
        """Of plain streams, one after the other, until `ended`."""
        longest = 0.0
        asked = {"messages": [{"role": "user", "content": "Tell a story."}], "max_tokens": 100, "ignore_eos": True}
        while not ended.is_set():
            connection = http.client.HTTPConnection(*self._address, timeout=NO_ANSWER_S)
            connection.request("POST", "/v1/chat/completions", encode(asked | {"stream": True}), HEADERS)
            answer = connection.getresponse()
            if answer.status != 200:
                raise RuntimeError(f"a plain stream was answered with {answer.status}: {answer.read()[:300]!r}")
            last: float | None = None  # the first event may wait for its turn
            while line := answer.readline():
                now = time.monotonic()
                longest = longest if last is None else max(longest, now - last)
                last = now
                self.num_events += line.startswith(b"data:")
                if ended.is_set():
                    break
            connection.close()
            ended.wait(2.0)
        return longest


def send(server: Server, one: Case, number: int, outcome: Outcome) -> None:
    began = time.monotonic()
    try:
        status, text = server.chat(one.body)
    except (OSError, http.client.HTTPException) as error:
        # A body that is too large may be refused before it has been read.
        if len(one.body) < 8_000_000:
            outcome.faults.append(f"{number} {one.name}: {type(error).__name__} after {time.monotonic() - began:.1f} s")
        outcome.statuses[0] += 1
        return
    took = time.monotonic() - began
    outcome.statuses[status] += 1
    outcome.slowest = sorted([*outcome.slowest, (took, status, f"{number} {one.name}")], reverse=True)[:8]
    if status >= 500 or (status == 200 and '{"error":' in text and "invalid" not in text):
        outcome.faults.append(f"{number} {one.name}: {status} {text[:300]}")
    if 400 <= status < 500:
        if took > SLOW_REFUSAL_S:
            outcome.slow_refusals.append(number)
        outcome.errors[json.loads(text)["error"]["message"][:60]] += 1


def main() -> int:
    sys.setrecursionlimit(20_000)  # to write what is deep
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("schemas")
    parser.add_argument("--number", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--only", type=int, help="send this one alone, and print the answer")
    options = parser.parse_args()
    with open(options.schemas) as lines:
        schemas = [json.loads(line)["schema"] for line in lines]
    server = Server(options.url)
    if options.only is not None:
        one = case(options.only, random.Random(f"{options.seed} {options.only}"), schemas)
        print(one.name, one.body[:3_000].decode(), sep="\n")
        began = time.monotonic()
        print(*server.chat(one.body), f"{time.monotonic() - began:.2f} s")
        return 0
    plain = encode({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 16, "temperature": 0})
    before = json.loads(server.chat(plain)[1])["choices"]
    outcome = Outcome()
    ended = threading.Event()
    began = time.monotonic()

    def one_by_number(number: int, outcome: Outcome = outcome) -> None:
        send(server, case(number, random.Random(f"{options.seed} {number}"), schemas), number, outcome)

    with ThreadPoolExecutor(1) as watching, ThreadPoolExecutor(options.parallel) as threads:
        watched = watching.submit(server.longest_pause, ended)
        list(threads.map(one_by_number, range(options.number)))
        ended.set()
        pause = watched.result()
    again = Outcome()
    for number in outcome.slow_refusals:
        one_by_number(number, again)
    outcome.faults += [
        f"refused only after {took:.2f} s: {name}"
        for took, status, name in again.slowest
        if took > SLOW_REFUSAL_S and status >= 400
    ]
    if server.get("/health")[0] != 200:
        outcome.faults.append("the server is not healthy")
    restarts = [line for line in server.get("/metrics")[1].splitlines() if "restart" in line and line[0] != "#"]
    outcome.faults += [f"the engine was started again: {line}" for line in restarts if float(line.split()[-1]) > 0]
    if json.loads(server.chat(plain)[1])["choices"] != before:
        outcome.faults.append("a plain request is answered otherwise than before")
    print(
        f"{options.number} requests, seed {options.seed}: {time.monotonic() - began:.0f} s; by status: "
        f"{dict(sorted(outcome.statuses.items()))}; longest pause in {server.num_events} events of plain "
        f"streams: {pause:.2f} s; "
        f"refusals over {SLOW_REFUSAL_S:.0f} s: {len(outcome.slow_refusals)}; {restarts}"
    )
    print("slowest:", *(f"  {took:.2f} s, {status}: {name}" for took, status, name in outcome.slowest), sep="\n")
    print("refused most often:", *(f"  {count} {text}" for text, count in outcome.errors.most_common(12)), sep="\n")
    print(f"{len(outcome.faults)} faults", *outcome.faults[:40], sep="\n")
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    sys.exit(main())
