"""Turns a request's fields and the model's formats into an `OutputSpec`, the form that the output must have."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.sampling_params import StructuredOutputsParams
from headway.server.api.api_errors import bad_request
from headway.server.api.format_choice import choose_tool_format
from headway.server.api.requests import ChatCompletionRequest, GenerationRequest
from headway.server.api.tool_definitions import AllowedToolChoice, NamedToolChoice
from headway.structured.output_shape import Shape, ShapeJob
from headway.structured.output_spec import OutputSpec
from headway.structured.reasoning_formats import REASONING_FORMATS, ReasoningFormat, reasoning_format_for
from headway.structured.tool_call_formats import ToolFormat
from headway.structured.tool_schemas import Tool, log_loosened
from headway.tokenizer import Tokenizer

PLAIN = OutputSpec()
"""Free text, with no reasoning or calls to separate."""


@dataclass(frozen=True)
class ModelFormats:
    """How the model writes tool calls and reasoning."""

    tokenizer: Tokenizer | None
    tool_format: ToolFormat
    reasoning: ReasoningFormat | None

    @classmethod
    def of_model(cls, tokenizer: Tokenizer | None, *, tool_format: str, reasoning_format: str) -> ModelFormats:
        """Choose the formats by the operator's names. "auto" detects them from the chat template."""
        with_tools = None if tokenizer is None else tokenizer.chat_template_for(has_tools=True)
        plain = None if tokenizer is None else tokenizer.chat_template
        return cls(
            tokenizer=tokenizer,
            tool_format=choose_tool_format(with_tools, tool_format),
            reasoning=reasoning_format_for(plain)
            if reasoning_format == "auto"
            else REASONING_FORMATS.get(reasoning_format),
        )

    @functools.cached_property
    def marker_token_ids(self) -> dict[str, int]:
        """Token ids of those markers of the formats that are special tokens of the model."""
        if self.tokenizer is None:
            return {}
        markers = (*self.tool_format.markers, *(() if self.reasoning is None else self.reasoning.markers))
        ids = {marker: self.tokenizer.marker_token_id(marker) for marker in markers}
        return {marker: token_id for marker, token_id in ids.items() if token_id is not None}

    def shows_special_tokens(self, spec: OutputSpec) -> bool:
        """Whether the output's parser needs to see special tokens in the text."""
        return not self.marker_token_ids.keys().isdisjoint(spec.markers)


@dataclass(frozen=True)
class Constraint:
    """A constraint that the output's text must match."""

    values: dict[str, Any]
    """Fields of `StructuredOutputsParams`. The first one is the kind of constraint."""
    path: str
    """The request field that sets the constraint."""

    @classmethod
    def of_request(cls, request: GenerationRequest) -> Constraint | None:
        """Read the constraint from `structured_outputs` or `response_format`; a request has at most one of them."""
        structured, wanted = request.structured_outputs, request.response_format
        if structured is not None:
            (kind,) = structured.given
            return cls(structured.given | structured.options, f"structured_outputs.{kind}")
        if wanted is None or wanted.type == "text":
            return None
        if wanted.given_schema is None:
            return cls({"json_object": True}, "response_format")
        return cls({"json": wanted.given_schema}, f"response_format.{wanted.schema_path}")


def tools_of(request: ChatCompletionRequest) -> tuple[Tool, ...]:
    """Return the tools that the prompt describes; none if the model must not call any."""
    if request.tool_choice == "none":
        return ()
    return tuple(definition.as_tool() for definition in request.tools or ())


def output_spec(request: ChatCompletionRequest, formats: ModelFormats, *, prompt_text: str) -> OutputSpec:
    """Return the form of the output after this prompt, with the tools as the client wrote them."""
    tools = tools_of(request)
    reasoning = formats.reasoning
    if not tools and reasoning is None:
        return PLAIN
    choice, allowed = _choice(request)
    return OutputSpec(
        tools=tools,
        tool_format=formats.tool_format if tools else None,
        tool_choice=choice if tools else "none",
        allowed=allowed,
        # A named tool is called exactly once, as in OpenAI's API.
        parallel=request.parallel_tool_calls is not False and not isinstance(request.tool_choice, NamedToolChoice),
        reasoning=reasoning,
        starts_in_reasoning=reasoning is not None
        and reasoning.is_open_after(prompt_text, in_text=bool(request.continue_final_message)),
    )


def shape_job(spec: OutputSpec, constraint: StructuredOutputsParams | None, formats: ModelFormats) -> ShapeJob:
    """Return the job for a helper process that prepares tools, schemas and grammar of the output."""
    values = {} if constraint is None else dataclasses.asdict(constraint)
    return ShapeJob(
        tools=spec.tools,
        tool_format=None if spec.tool_format is None else spec.tool_format.name,
        tool_choice=spec.tool_choice,
        allowed=spec.allowed,
        parallel=spec.parallel,
        reasoning=None if spec.reasoning is None else spec.reasoning.name,
        starts_in_reasoning=spec.starts_in_reasoning,
        constraint={name: value for name, value in values.items() if value} or None,
        special_token_ids=formats.marker_token_ids,
    )


def with_shape(spec: OutputSpec, shape: Shape) -> OutputSpec:
    """Return `spec` with the tool parameters and the content as the grammar enforces them."""
    for tool, left_out in zip(spec.tools, shape.left_out, strict=True):
        log_loosened(tool.name, left_out)
    tools = tuple(
        dataclasses.replace(tool, parameters=parameters)
        for tool, parameters in zip(spec.tools, shape.parameters, strict=True)
    )
    return dataclasses.replace(spec, tools=tools, content=shape.content)


def _choice(request: ChatCompletionRequest) -> tuple[str, tuple[str, ...] | None]:
    """Return the tool choice's mode and the names of the allowed tools; None allows all."""
    choice = request.tool_choice
    if isinstance(choice, NamedToolChoice):
        return "required", (choice.function.name,)
    if isinstance(choice, AllowedToolChoice):
        named = dict.fromkeys(tool.function.name for tool in choice.allowed_tools.tools)
        return choice.allowed_tools.mode, tuple(named)
    return choice or "auto", None


def check_no_search(request: GenerationRequest, constraint: Constraint | None, *, has_tools: bool = False) -> None:
    """Refuse a constraint or tools together with beam search."""
    field = "tools" if has_tools else None if constraint is None else constraint.path.partition(".")[0]
    if request.use_beam_search and field is not None:
        raise bad_request(f"'{field}' does not go with 'use_beam_search'.", param=field)


def template_options(request: ChatCompletionRequest, known: str) -> Mapping[str, Any]:
    """Return the variables for a chat template with the source `known`: `chat_template_kwargs`, and the reasoning
    effort if the template has a variable for it."""
    options: dict[str, Any] = {}
    effort = request.reasoning_effort
    if effort is not None:
        if "reasoning_effort" in known:
            options["reasoning_effort"] = effort
        options |= {name: effort != "none" for name in ("enable_thinking", "thinking") if name in known}
    return options | (request.chat_template_kwargs or {})
