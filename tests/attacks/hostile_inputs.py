"""Hostile regexes, schemas, grammars, tools and variables of templates: each a (name, value) that should be answered or
refused at once. Odd values of the right size are for tests/integration/test_server_fuzz.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

Inputs = list[tuple[str, Any]]


def _sized(name: str, sizes: Iterable[int], make: Callable[[int], Any]) -> dict[str, Any]:
    return {f"{name}, {size:,}": make(size) for size in sizes}


def _nested(depth: int, wrap: Callable[[Any], Any], inner: Any = None) -> Any:
    found = {"type": "string"} if inner is None else inner
    for _ in range(depth):
        found = wrap(found)
    return found


def hostile_regexes() -> Inputs:
    """Values of `regex`; most of them are patterns of a schema as well."""
    found: dict[str, Any] = {
        "groups of repetitions, 7 levels": "(((((((a+)+)+)+)+)+)+)+$",
        "four equal alternatives": "(a|a|a|a)*",
        "overlapping words": "(ab|a|b)*c",
        "optional before required": "(a?){40}a{40}",
        "a class of everything": "[\\s\\S]*[\\s\\S]*[\\s\\S]*x",
        "all of Unicode, counted": "\\p{L}{1,3000}",
        "no letter, counted": "\\P{L}{500,1000}\\p{L}",
        "words and digits": "(\\w|\\d|\\w\\d){1,200}",
        "a far letter": "(a|b)*a(a|b){18}",
        "two far letters": "((a|b)*a(a|b){12}){3}",
        "a number with separators": "([0-9]{1,3}(,[0-9]{3})*){50}",
        "dates, many": "([0-9]{4}-[0-9]{2}-[0-9]{2} ?){200}",
        "an address": "([a-z0-9]+([._-][a-z0-9]+)*)+@([a-z0-9]+\\.)+[a-z]{2,}",
        "ends with a backslash": "a\\",
        "a flag": "(?i)" + "straße" * 200,
        "flags within": "(?s-u:.)" * 100,
        "half of a pair": "\ud800",
        "a NUL": "\x00*",
        "an emoji, counted": "[\U0001f600-\U0001f64f]{1,400}",
        "back reference": "(a*)\\1\\1",
        "nothing but anchors": "^$" * 500,
        "word boundaries": "\\b\\B" * 300,
        "a slash and a newline": "/\n\\/\\\n" * 200,
        "comment sign": "#" * 4_000,
        "a grammar's end": '/ | "x"\nstart2: /a',
        "a special token": "<|im_end|>" * 200,
        "count beyond numbers": "a{99999999999999999999}",
        "no lower bound": "a{,1000}" * 20,
    }
    found |= _sized("repetitions cubed", (10, 30, 100), lambda n: f"(((a{{1,{n}}}){{1,{n}}}){{1,{n}}})")
    found |= _sized("exact counts", (1_000, 100_000), lambda n: f"[a-z]{{{n}}}")
    found |= _sized("open groups", (100, 4_000), lambda n: "(" * n)
    found |= _sized("groups in groups", (200, 4_000), lambda n: "(" * n + "a" + ")" * n)
    found |= _sized("any text between alternatives", (50, 500), lambda n: "|".join(f".*{at}.*x" for at in range(n)))
    found |= _sized("optional letters", (500, 4_000), lambda n: "a?" * n)
    found |= _sized("alternatives with a tail", (400, 1_500), lambda n: "|".join(f"{at}z*" for at in range(n)))
    found |= _sized("classes", (500, 1_300), lambda n: "[^a-f]" * n)
    found |= _sized("a far letter, counted", (100, 1_000), lambda n: f"(.*a.{{{n}}}b){{3}}")
    found |= _sized("too long", (8_193, 1_000_000), lambda n: "a" * n)
    return list(found.items())


def _defs(number: int, make: Callable[[int], Any], start: str = "d0") -> dict[str, Any]:
    return {"$ref": f"#/$defs/{start}", "$defs": {f"d{at}": make(at) for at in range(number)}}


def _ref(at: int) -> dict[str, Any]:
    return {"$ref": f"#/$defs/d{at}"}


def _fan(kind: str, items: Callable[[int], Any]) -> dict[str, Any]:
    """A definition of all the others, each of which is an array of another one."""
    others = {kind: [_ref(at) for at in range(1, 1_900)]}
    return _defs(1_900, lambda at: {"items": items(at), "minItems": 1, "type": "array"} if at else others)


def _enum(at: int, number: int) -> dict[str, Any]:
    return {"enum": [f"{at} {one}" for one in range(number)]}


def _names(number: int, schema: Any = True) -> dict[str, Any]:
    return {f"name{at}": schema for at in range(number)}


def hostile_schemas() -> Inputs:
    """JSON schemas, for answers and for the arguments of tools."""
    found: dict[str, Any] = {
        f"a pattern and a value: {name}": {"oneOf": [{"type": "string", "pattern": regex}, {"enum": ["a" * 11 + "c"]}]}
        for name, regex in hostile_regexes()[:14]
    }
    found |= {
        "a pattern and many values": {"oneOf": [{"type": "string", "pattern": "^(a|b)*a(a|b){15}$"}, _enum(0, 1_900)]},
        "a pattern and long values": {
            "oneOf": [{"pattern": "(x+)+$"}, {"enum": ["x" * 8_000 + str(at) for at in range(20)]}]
        },
        "many patterns apart": {"oneOf": [{"type": "string", "pattern": f"^{at}(a|b)*c{{1,50}}$"} for at in range(40)]},
        "patterns of names": {"patternProperties": {f"^{at}(a|b)*$": {"type": "integer"} for at in range(50)}},
        "patterns of names that overlap": {"patternProperties": {"a+": True, "a{3,9}": {}, "(a|b)*": {"type": "null"}}},
        "many wide classes": {
            "properties": {f"p{at}": {"pattern": f"[\\p{{L}}\\p{{N}}]{{{at}}}\\W\\P{{L}}"} for at in range(999)}
        },
        "six oneOf of 20 lists": {
            "properties": {f"p{k}": {"oneOf": [_enum(100 * k + i, 240) for i in range(20)]} for k in range(6)}
        },
        "six oneOf of the same 20 lists": {
            "$defs": {f"d{at}": _enum(at, 1_000) for at in range(20)},
            "properties": {f"p{k}": {"oneOf": [_ref(at) for at in range(20)]} for k in range(6)},
        },
        "two long lists": {"oneOf": [_enum(0, 1_900), {"enum": [*_enum(0, 1_000)["enum"], *_enum(1, 900)["enum"]]}]},
        "long lists within objects": {
            "oneOf": [
                {"properties": {"a": _enum(0, 1_500)}, "required": ["a"]},
                {"properties": {"a": _enum(0, 1_500)}},
            ]
        },
        "not a long list": {"type": "string", "not": _enum(0, 1_900)},
        "not, in not": _nested(60, lambda inner: {"not": inner}),
        "if in then": _nested(30, lambda inner: {"if": {"required": ["a"]}, "then": inner, "else": {"type": "object"}}),
        "dependencies": {"dependentSchemas": {f"a{at}": {"properties": _names(100)} for at in range(6)}},
        "one property in each of many": {"anyOf": [{"properties": {f"p{at}": _enum(at, 10)}} for at in range(1_900)]},
        "anyOf by anyOf": {"allOf": [{"anyOf": [{"required": [f"{n} {m}"]} for m in range(40)]} for n in range(3)]},
        "oneOf of open objects": {"oneOf": [{"properties": _names(50), "required": [f"name{at}"]} for at in range(50)]},
        "definitions in the wrong order": _fan("anyOf", lambda at: _ref(at - 1) if at > 1 else True),
        "definitions in the other order": _fan("allOf", lambda at: _ref(at + 1) if at < 1_899 else True),
        "definitions back and forth": _fan("anyOf", lambda at: _ref(1_900 - at + (at > 950)) if at != 950 else True),
        "a chain of definitions": _defs(
            1_900, lambda at: {"type": "array", "items": _ref(at + 1) if at < 1_899 else {}}
        ),
        "definitions that double": _defs(40, lambda at: {"allOf": [_ref(at + 1)] * 2} if at < 39 else {"type": "null"}),
        "definitions that branch": _defs(
            40, lambda at: {"anyOf": [_ref(at + 1), {"type": "array", "items": _ref(at + 1)}]} if at < 39 else {}
        ),
        "definitions in a ring": _defs(500, lambda at: _ref((at + 1) % 500)),
        "a ring through items": _defs(500, lambda at: {"type": "array", "items": _ref((at + 1) % 500), "minItems": 1}),
        "a reference with escapes": {"$ref": "#/" + "~1~0%7E" * 5_000},
        "an anchor of itself": {"$id": "http://a/b", "$anchor": "x", "$ref": "#x"},
        "many anchors": {
            "$defs": {f"d{at}": {"$anchor": f"a{at}"} for at in range(5_000)},
            "properties": {f"p{at}": {"$ref": f"#a{at}"} for at in range(900)},
        },
        "many identifiers": {
            "$defs": {f"d{at}": {"$id": f"urn:x:{at}"} for at in range(5_000)},
            "properties": {f"p{at}": {"$ref": f"urn:x:{at}"} for at in range(900)},
        },
        "identifiers in identifiers": _nested(60, lambda inner: {"$id": "a/", "items": inner}),
        "unique selections": {"type": "array", "uniqueItems": True, "items": _enum(0, 500), "minItems": 3},
        "names counted": {"properties": _names(60), "minProperties": 30, "maxProperties": 31},
        "required beside names": {
            "properties": _names(1_000),
            "required": [f"r{at}" for at in range(20_000)],
            "minProperties": 1,
        },
        "long words to be excluded": {"not": {"enum": ["x" * 60 + str(at) for at in range(120)]}, "type": "string"},
        "deep values": {"enum": [_nested(50, lambda inner: [inner]) for _ in range(300)]},
        "a long key above many": {
            "properties": {"k" * 150_000: {"properties": _names(900, {}), "oneOf": [{"type": "null"}, {"minItems": 1}]}}
        },
        "long keys": {"properties": {"k" * 8_000 + str(at): True for at in range(30)}},
        "steps": {"type": "number", "multipleOf": 1e-9, "minimum": 0.1, "maximum": 1e9},
        "steps that do not meet": {"allOf": [{"multipleOf": at} for at in (999_983, 999_979, 999_961)]},
        "unevaluated names": {"anyOf": [{"properties": _names(100)}] * 40, "unevaluatedProperties": False},
        "unevaluated items": {"allOf": [{"prefixItems": [True] * 400}] * 20, "unevaluatedItems": False},
        "half of a pair": {"properties": {"\ud800": {}}},
        "numbers of many digits": {"enum": [10**299 + at for at in range(500)]},
        "arrays by arrays": _nested(
            5, lambda inner: {"type": "array", "items": inner, "minItems": 400, "maxItems": 400}
        ),
        "options of the compiler": {"x-guidance": {"whitespace_pattern": "((a{1,99}){1,99}){1,99}"}, "type": "object"},
    }
    found |= _sized("alternatives", (1_900, 2_100), lambda n: {"anyOf": [{"const": at} for at in range(n)]})
    found |= _sized("optional names", (900, 1_100), lambda n: {"properties": _names(n), "additionalProperties": False})
    found |= _sized("depth", (60, 5_000), lambda n: _nested(n, lambda inner: {"items": inner}))
    return list(found.items())


def hostile_grammars() -> Inputs:
    """Values of `grammar`."""
    found: dict[str, Any] = {}
    units = {
        "and": "/a/ & ",
        "open": "(",
        "classes": "[",
        "alternatives": '"a"|',
        "tokens": "<|a|>",
        "json": "%json {",
        "lark": "%lark {",
    }
    for name, unit in units.items():
        found[f"{name} behind Lark"] = 'start: "' + unit * (200_000 // len(unit))
        found[f"{name} behind GBNF"] = "root ::= " + unit * (60_000 // len(unit))
    chains = {
        "a chain": lambda at: f"r{at} ::= r{at + 1}",
        "a chain of choices": lambda at: f'r{at} ::= r{at + 1} | "{at}"',
        "a chain of many": lambda at: f'r{at} ::= "" "" "" "" r{at + 1}',
        "a chain backwards": lambda at: f"r{at} ::= r{max(at - 1, 0)}",
        "a ring": lambda at: f"r{at} ::= r{(at + 1) % 2_000}",
    }
    for name, link in chains.items():
        found[f"{name} in GBNF"] = "root ::= r0\n" + "\n".join(map(link, range(2_000))) + '\nr2000 ::= "a"\n'
        lark = "start: r0\n" + "\n".join(link(at).replace(" ::=", ":") for at in range(8_000)) + '\nr8000: "a"\n'
        found[f"{name} in Lark"] = lark
    found |= {
        "left recursion": 'start: a\na: a a a | "x" | ""',
        "nothing, repeated": 'start: (("")*)*',
        "intersections": "start: A\nA: " + " & ".join(f"/.*{at}.*/" for at in range(40)),
        "intersections behind a hash": "# /\nstart: A\nA: " + " & ".join(f"/.*{at}.*/" for at in range(40)),
        "counts": 'start: (("a"{1,99}){1,99}){1,99}',
        "counts in GBNF": 'root ::= (("a"{1,9999}){1,9999}){1,9999}',
        "a count of many digits": "root ::= a{" + "9" * 60_000 + "}",
        "a terminal of terminals": "start: A0\n"
        + "\n".join(f"A{at}: A{at + 1} A{at + 1}" for at in range(60))
        + '\nA60: "a"',
        "a schema within": "start: %json " + json.dumps(_nested(11, lambda inner: {"anyOf": [inner, inner]})),
        "a file": "%import /etc/passwd\nstart: a",
        "a JSON document": "{" * 100_000,
        "half of a pair": 'start: "\ud800"',
        "too long": "a" * 1_000_000,
        "groups": "root ::= " + "(" * 250 + '"a"' + ")*" * 250,
        "a long name": "root ::= " + "a" * 60_000,
        "wide alternatives": "start: " + " | ".join(f'"{at}" "x"' for at in range(9_000)),
    }
    return list(found.items())


def hostile_tools() -> Inputs:
    """Lists of tools as chat requests have them."""
    found: dict[str, Any] = {
        f"a schema: {name}": [_tool("f", _object(schema))] for name, schema in hostile_schemas()[::2]
    }
    for name, regex in hostile_regexes()[::4]:
        parameter = {"type": "string", "pattern": regex}
        found[f"a pattern: {name}"] = [_tool("f", {"type": "object", "properties": {"a": parameter}})]
    found |= {
        f"many, {number:,}": [_tool(f"tool_{at}", {"type": "object", "properties": _names(4)}) for at in range(number)]
        for number in (100, 1_000)
    }
    listed = {"type": "object", "properties": {f"p{at}": _enum(at, 90) for at in range(100)}}
    found |= {
        "many parameters": [_tool("f", {"type": "object", "properties": _names(900, {"type": "string"})})],
        "many optional lists": [_tool("f", listed)],
        "open objects": [_tool(f"f{at}", {"type": "object"}) for at in range(60)],
        "no schema": [_tool("f", {"type": 5, "properties": 3, "required": {}})],
        "an array": [_tool("f", {"type": "array"})],
        "a name of many": [_tool("f" * 100_000, {})],
        "a name with a newline": [_tool("f\n", {})],
        "a marker for a name": [_tool("</tool_call>", {})],
        "a marker in a list": [_tool("f", _object({"enum": ["</tool_call>", "<|im_end|>"]}))],
        "a long description": [{"type": "function", "function": {"name": "f", "description": "d" * 900_000}}],
        "the same twice": [_tool("f", {}), _tool("f", {})],
        "a thousand lists": [_tool(f"f{at}", _object(_enum(at, 100))) for at in range(100)],
        "a parameter named by a marker": [_tool("f", {"type": "object", "properties": {"</parameter>": {}}})],
        "a parameter of many letters": [_tool("f", {"type": "object", "properties": {"p" * 60_000: {}}})],
    }
    return list(found.items())


def hostile_template_kwargs() -> Inputs:
    """Values that a template loops over, prints, compares, or takes for its own variables."""
    own = ("messages", "tools", "tool_format", "add_generation_prompt", "continue_final_message", "self", "tokenizer")
    found: dict[str, Any] = {f"{name}, which is the server's own": {name: []} for name in own}
    globals_ = ("range", "dict", "lipsum", "cycler", "joiner", "namespace", "raise_exception", "strftime_now", "loop")
    found |= {f"{name}, a name of the language": {name: "x"} for name in globals_}
    found |= {
        f"{name}, of Python's inside": {name: {}} for name in ("__class__", "__globals__", "__init__", "__self__")
    }
    wide = {f"k{number}": number for number in range(20_000)}
    found |= {
        "a list of 400,000 numbers": {"documents": [0] * 400_000},
        "a text of 4 MB": {"documents": "a" * 4_000_000},
        "a text of 100 kB that is escaped": {"system": "<&\"'>" * 20_000},
        "20,000 names": wide,
        "an object of 20,000 names": {"documents": wide},
        "documents with texts": {"documents": [{"title": "t", "text": "word " * 100}] * 500},
        "tools in place of tools": {"builtin_tools": [{"name": "x", "parameters": {}}] * 1000},
        "lists 1,000 deep": {"documents": _nested(1_000, lambda inner: [inner], 1)},
        "objects 1,000 deep": {"documents": _nested(1_000, lambda inner: {"a": inner}, 1)},
        "lists 30,000 deep": {"documents": _nested(30_000, lambda inner: [inner], 1)},
        "objects 10,000 deep": {"documents": _nested(10_000, lambda inner: {"a": inner}, 1)},
        "a huge whole number": {"date_string": 10**4000},
        "an effort that does not exist": {"reasoning_effort": "x" * 10_000},
        "a time's form": {"date_string": "%" * 10_000},
        "a time's form without end": {"strftime_format": "%999999999d"},
        "a format string": {"system": "{0.__class__.__mro__}"},
        "a format of great width": {"system": "%99999999s"},
        "a template within": {"system": "{{ 9 ** 9 ** 9 }}"},
        "a loop within": {"system": "{% for i in range(10**9) %}{% endfor %}"},
        "an inclusion": {"system": "{% include '/etc/passwd' %}"},
        "the end of a comment": {"system": "#} {{ self }} {#"},
        "special tokens": {"system": "<|im_start|>system<|im_end|>" * 2_000},
        "a NUL": {"system": "\x00" * 10_000},
        "half of a pair": {"system": "\ud800"},
        "combining marks": {"system": "e" + "\u0301" * 50_000},
        "a name of 100 kB": {"a" * 100_000: 1},
        "a name that is a keyword": {"if": 1, "for": 2, "in": 3, "not": 4},
    }
    return list(found.items())


def _object(schema: Any) -> dict[str, Any]:
    definitions = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    return {"type": "object", "properties": {"a": schema}, "required": ["a"], **definitions}


def _tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}
