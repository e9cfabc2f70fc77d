"""Mutated schemas and tool lists against a running server. Run by hand, with the standard library only:

    python fuzz_structured.py URL SCHEMAS.jsonl --number 2000 --seed 0

SCHEMAS.jsonl has an object with a "schema" per line. Each request has `max_tokens` 8. Counted are answers by status;
5xx, requests without an answer, and refusals that take more than a second, also when sent again without others beside
them, are faults. At the end no engine may have been started again, and a plain request must be answered as before. Exit
status 1 if any of this is not so. Schemas that are hostile by design, and what others feel of them, are in
tests.attacks.
"""

from __future__ import annotations

import argparse
import collections
import copy
import http.client
import json
import random
import sys
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from typing import Any

NO_ANSWER_S = 120.0
SLOW_REFUSAL_S = 1.0
MOST_TOOL_CHARS = 1_500  # of most schemas of tools: they are part of the prompt, and a CPU reads it slowly
KEYWORDS = (
    "type properties required items additionalProperties enum const anyOf oneOf allOf not if then else pattern format "
    "minimum maximum exclusiveMinimum multipleOf minLength maxLength minItems maxItems uniqueItems contains $ref $defs "
    "patternProperties propertyNames minProperties dependentRequired unevaluatedProperties prefixItems x-guidance"
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**400, -(10**400), 1e308, 1e-308, 0.1),
    *("", "a", "\x00", "\ud7ff\U0001f600", "(a+)+$", "(?=x)", "[", "\\p{L}{1,999999}", "^.{0,100000}$", "(a|aa)*b"),
    *("\\1", "date-time", "#", "#/", "#/$defs/a", "https://example.org/schema.json", "file:///etc/passwd"),
    *("object", "string", "integer", "nothing"),
    *([], {}, [[]], [{}], [None], {"": {}}, {"type": []}, {"a": 1}, ["object", "null"], {"$ref": "#"}),
)


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


def request(chance: random.Random, schemas: list[Any]) -> bytes:
    """A schema for an answer, or for the arguments of tools, of which some are mutated as a list."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Go."}], "max_tokens": 8, "temperature": 1.0}
    body["stream"] = chance.random() < 0.3
    if chance.random() < 0.6:
        schema = mutated(chance.choice(schemas), chance, schemas[:40])
        wanted = {"name": "x", "schema": schema, "strict": chance.random() < 0.5}
        return encode(body | {"response_format": {"type": "json_schema", "json_schema": wanted}})
    small = [one for one in schemas if len(json.dumps(one)) < MOST_TOOL_CHARS]
    schema = mutated(chance.choice(small), chance, small[:40])
    if isinstance(schema, dict) and chance.random() < 0.9:
        schema = {**schema, "type": "object"}
    tools = [tool("f", schema), *(tool(f"g{n}", {"type": "object"}) for n in range(chance.randrange(3)))]
    if chance.random() < 0.2:
        tools = mutated(tools, chance, [*small[:40], tools])
    choice = chance.choice(("auto", "required", "required", {"type": "function", "function": {"name": "f"}}))
    return encode(body | {"tools": tools, "tool_choice": choice})


def encode(body: Any) -> bytes:
    return json.dumps(body).encode()


class Server:
    """The server under test."""

    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        self._address = (parts.hostname or "127.0.0.1", parts.port or 80)

    def get(self, path: str) -> str:
        return self._ask("GET", path, None)[1]

    def chat(self, body: bytes) -> tuple[int, str]:
        return self._ask("POST", "/v1/chat/completions", body)

    def _ask(self, method: str, path: str, body: bytes | None) -> tuple[int, str]:
        connection = http.client.HTTPConnection(*self._address, timeout=NO_ANSWER_S)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read().decode(errors="replace")
        finally:
            connection.close()


def main() -> int:
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
    statuses: collections.Counter[int] = collections.Counter()
    faults: list[str] = []
    slow: list[int] = []

    def send(number: int) -> tuple[int, str]:
        body = request(random.Random(f"{options.seed} {number}"), schemas)
        began_s = time.monotonic()
        try:
            status, text = server.chat(body)
        except (OSError, http.client.HTTPException) as error:
            status, text = 0, repr(error)
        statuses[status] += 1
        if not 200 <= status < 500 or (status == 200 and '{"error":' in text and "invalid" not in text):
            faults.append(f"{number}: {status} {text[:300]}")
        if 400 <= status < 500 and time.monotonic() - began_s > SLOW_REFUSAL_S:
            slow.append(number)
        return status, f"{body.decode()[:3_000]}\n{text}"

    if options.only is not None:
        print(*send(options.only), sep="\n")
        return 0
    plain = encode({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 16, "temperature": 0})
    before = json.loads(server.chat(plain)[1])["choices"]
    with ThreadPoolExecutor(options.parallel) as threads:
        list(threads.map(send, range(options.number)))
    slow_beside_others, slow = slow, []
    for number in slow_beside_others:
        send(number)
    faults += [f"{number}: refused, but slowly" for number in slow]
    restarts = [line for line in server.get("/metrics").splitlines() if "restart" in line and line[0] != "#"]
    faults += [f"started again: {line}" for line in restarts if float(line.split()[-1]) > 0]
    if json.loads(server.chat(plain)[1])["choices"] != before:
        faults.append("a plain request is answered otherwise than before")
    print(f"{options.number} requests, seed {options.seed}, by status: {dict(sorted(statuses.items()))}")
    print(f"{len(faults)} faults", *faults[:40], sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
