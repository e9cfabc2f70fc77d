"""Hostile `chat_template_kwargs`: each a (name, value) that should be rendered or refused at once."""

from __future__ import annotations

from typing import Any

from tests.attacks.structured_inputs import Inputs, nested


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
        "lists 1,000 deep": {"documents": nested(1_000, lambda inner: [inner], 1)},
        "objects 1,000 deep": {"documents": nested(1_000, lambda inner: {"a": inner}, 1)},
        "lists 30,000 deep": {"documents": nested(30_000, lambda inner: [inner], 1)},
        "objects 10,000 deep": {"documents": nested(10_000, lambda inner: {"a": inner}, 1)},
        "a huge whole number": {"date_string": 10**4000},
        "a huge float": {"date_string": 1e308},
        "a tiny float": {"date_string": 5e-324},
        "minus zero": {"date_string": -0.0},
        "null everywhere": dict.fromkeys(("enable_thinking", "thinking", "system", "date_string", "documents")),
        "thinking as text": {"enable_thinking": "no"},
        "thinking as a number": {"enable_thinking": 10**30},
        "thinking as a list": {"enable_thinking": [[]] * 1000},
        "thinking as an object": {"enable_thinking": {"a": {"b": []}}},
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
        "right to left": {"system": "\u202e" * 20_000},
        "a name of nothing": {"": 1},
        "a name with blanks": {"a b": 1},
        "a name of 100 kB": {"a" * 100_000: 1},
        "a name with a NUL": {"a\x00b": 1},
        "a name that is a keyword": {"if": 1, "for": 2, "in": 3, "not": 4},
        "a name of two underscores": {"__": 1},
        "names that differ in case": {"Messages": [], "MESSAGES": []},
        "a list in place of an object": [],
        "a text in place of an object": "messages",
        "a number in place of an object": 1,
        "nothing": None,
        "an empty object": {},
    }
    return list(found.items())
