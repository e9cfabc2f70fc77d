"""Answers put together again from the pieces that a parser gave."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headway.structured.output_pieces import CallArguments, CallBegin, ContentPiece, Piece, ReasoningPiece
from headway.structured.output_spec import OutputSpec
from headway.structured.tool_schemas import Tool, ToolCall

WEATHER = Tool(
    "get_weather",
    "The weather of a city",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "place": {"$ref": "#/$defs/place"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "exact": {"type": "boolean"},
        },
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {
            "place": {
                "type": "object",
                "properties": {"lat": {"type": "number"}, "note": {"type": "string"}},
                "required": ["lat"],
                "additionalProperties": False,
            }
        },
    },
)
# The name of one tool is the beginning of the other's.
GET = Tool("get", None, {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
ANY = Tool("any-thing", None, None)
TOOLS = (WEATHER, GET, ANY)


@dataclass(frozen=True)
class Output:
    reasoning: str
    content: str
    calls: tuple[ToolCall, ...]


def put_together(pieces: Iterable[Piece]) -> Output:
    reasoning = content = ""
    calls: list[ToolCall] = []
    for piece in pieces:
        match piece:
            case ReasoningPiece(text):
                reasoning += text
            case ContentPiece(text):
                content += text
            case CallBegin(index, name):
                assert index == len(calls)
                calls.append(ToolCall(name, ""))
            case CallArguments(index, text):
                assert text
                assert index == len(calls) - 1
                calls[index] = ToolCall(calls[index].name, calls[index].arguments + text)
    return Output(reasoning, content, tuple(calls))


def read(spec: OutputSpec, *chunks: str) -> Output:
    parser = spec.parser()
    pieces = [piece for chunk in chunks for piece in parser.feed(chunk)]
    return put_together([*pieces, *parser.finish()])


def cut(text: str, places: Sequence[int]) -> list[str]:
    ends = [0, *sorted(places), len(text)]
    return [text[begin:end] for begin, end in itertools.pairwise(ends)]
