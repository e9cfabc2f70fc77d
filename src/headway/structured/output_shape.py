"""Makes the grammar of an output from the tools and constraint of a request: the work of a helper process.

    tools, constraint ──► schemas prepared for the compiler ──► one grammar of calls, thoughts and text

Everything here processes texts that a client wrote, so it never runs in a thread that other requests wait for.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headway.errors import InvalidRequestError
from headway.sampling_params import StructuredOutputsParams
from headway.structured.grammars import grammar_of
from headway.structured.output_spec import OutputSpec
from headway.structured.reasoning_formats import REASONING_FORMATS
from headway.structured.tool_call_formats import TOOL_FORMATS
from headway.structured.tool_schemas import MAX_NESTING, Tool, is_too_deep, prepared_tool


class ShapeJob(msgspec.Struct, tag="shape", frozen=True, kw_only=True):
    """Everything that determines the form of an output."""

    tools: tuple[Tool, ...] = ()
    tool_format: str | None = None
    """The name of the tool format; the reasoning format is also given by name."""
    tool_choice: str = "auto"
    allowed: tuple[str, ...] | None = None
    parallel: bool = True
    reasoning: str | None = None
    starts_in_reasoning: bool = False
    constraint: dict[str, Any] | None = None
    """Fields of `StructuredOutputsParams` that the text of the output must match."""
    special_token_ids: dict[str, int] = {}
    """The markers of the formats that are special tokens of the model."""


class Shape(msgspec.Struct, tag="answer", frozen=True, kw_only=True):
    """The result of a `ShapeJob`."""

    parameters: tuple[dict[str, Any] | None, ...] = ()
    """The schemas of the tools as grammars take them."""
    left_out: tuple[tuple[str, ...], ...] = ()
    """For each tool, the parts of its schema that its calls need not satisfy."""
    content: str | None = None
    """The grammar of the text, if the text is only a part of the output."""
    grammar: str | None = None
    """The grammar of the whole output. None: the output is free."""
    num_bytes: int = 0
    """The memory that compiling the grammar took."""


def shape_output(job: ShapeJob) -> Shape:
    """Do the job. Raises `InvalidRequestError`, which names the field or the place in a schema."""
    prepared = [_prepared(place, tool) for place, tool in enumerate(job.tools)]
    tools = tuple(tool for tool, _ in prepared)
    constraint = None if job.constraint is None else StructuredOutputsParams(**job.constraint)
    is_mixed = bool(tools) or job.reasoning is not None
    spec = OutputSpec(
        tools=tools,
        tool_format=None if job.tool_format is None else TOOL_FORMATS[job.tool_format],
        tool_choice=job.tool_choice,
        allowed=job.allowed,
        parallel=job.parallel,
        reasoning=None if job.reasoning is None else REASONING_FORMATS[job.reasoning],
        starts_in_reasoning=job.starts_in_reasoning,
        content=grammar_of(constraint) if constraint is not None and is_mixed else None,
    )
    if constraint is not None and not is_mixed:
        grammar: str | None = grammar_of(constraint)
    else:
        markers = set(spec.markers)
        grammar = spec.grammar({text: token for text, token in job.special_token_ids.items() if text in markers})
    return Shape(
        parameters=tuple(tool.parameters for tool in tools),
        left_out=tuple(left_out for _, left_out in prepared),
        content=spec.content,
        grammar=grammar,
    )


def _prepared(place: int, tool: Tool) -> tuple[Tool, tuple[str, ...]]:
    path = f"tools[{place}].function.parameters"
    if is_too_deep(tool.parameters or {}):
        raise InvalidRequestError(f"'{path}' is nested more than {MAX_NESTING} levels deep.", param=path)
    return prepared_tool(tool, path)
