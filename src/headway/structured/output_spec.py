"""`OutputSpec`: describes what an output may contain, and makes the model's grammar and the parser from it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headway.errors import InvalidRequestError
from headway.structured.grammars import (
    ANY_TEXT,
    SOME_TEXT,
    LarkRules,
    inline_grammar,
    one_of,
    regex_quote,
    spaces,
    special_tokens,
    terminal,
)
from headway.structured.output_parser import OutputParser
from headway.structured.reasoning_formats import ReasoningFormat
from headway.structured.tool_call_formats import (
    Arguments,
    Extra,
    Marker,
    Name,
    Part,
    Space,
    Text,
    ToolFormat,
)
from headway.structured.tool_schemas import Tool

TOOL_CHOICES = ("none", "auto", "required")
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_SPACE = f"{terminal(spaces(1))}?"


@dataclass(frozen=True, kw_only=True)
class OutputSpec:
    """`allowed` are the names that may be called, None for all: a named choice is one name and "required".

    `content` is a whole grammar (with `start`) of the text output, None for free text. `starts_in_reasoning`: the
    prompt ends with the opening marker of the reasoning.
    """

    tools: tuple[Tool, ...] = ()
    tool_format: ToolFormat | None = None
    tool_choice: str = "auto"
    allowed: tuple[str, ...] | None = None
    parallel: bool = True
    reasoning: ReasoningFormat | None = None
    starts_in_reasoning: bool = False
    content: str | None = None

    def __post_init__(self) -> None:
        names = [tool.name for tool in self.tools]
        if self.tool_choice not in TOOL_CHOICES:
            raise InvalidRequestError(f"tool_choice must be one of {', '.join(TOOL_CHOICES)}", param="tool_choice")
        for name in names:
            if not _TOOL_NAME.fullmatch(name):
                raise InvalidRequestError(
                    f"tool names are up to 128 letters, digits and any of '_.:-', not {name!r:.150}", param="tools"
                )
        if len(set(names)) < len(names):
            raise InvalidRequestError("each tool needs a name of its own", param="tools")
        if unknown := [name for name in self.allowed or () if name not in names]:
            raise InvalidRequestError(f"tool_choice names '{unknown[0]}', which is no tool", param="tool_choice")
        if self.tool_choice == "required" and not self.callable_tools:
            raise InvalidRequestError("tool_choice 'required' needs tools", param="tool_choice")
        if self.callable_tools and self.tool_format is None:
            raise InvalidRequestError("this model has no format for tool calls", param="tools")

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """Tools that this output may call."""
        if self.tool_choice == "none":
            return ()
        allowed = None if self.allowed is None else frozenset(self.allowed)
        return tuple(tool for tool in self.tools if allowed is None or tool.name in allowed)

    @property
    def calls_format(self) -> ToolFormat | None:
        """The call format of this output. If the text has a grammar too, calls must begin with a marker."""
        if self.tool_format is None or not self.callable_tools:
            return None
        return self.tool_format if self.content is None or self.tool_choice == "required" else self.tool_format.marked

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that the parser looks for. They must appear in the text even if they are special tokens."""
        of_tools = self.calls_format.markers if self.calls_format else ()
        return (*(self.reasoning.markers if self.reasoning else ()), *of_tools)

    def parser(self) -> OutputParser:
        return OutputParser(
            tools={tool.name: tool for tool in self.callable_tools},
            tool_format=self.calls_format,
            only_at_start=self.content is not None,
            parallel=self.parallel,
            reasoning=self.reasoning,
            starts_in_reasoning=self.starts_in_reasoning,
        )

    def grammar(self, special_token_ids: Mapping[str, int]) -> str | None:
        """The grammar of the output; None if there is nothing to constrain.

        `special_token_ids` are the tokens whose bytes are no text for llguidance (`LLTokenizer.is_special_token`).
        """
        if not self.callable_tools and self.content is None:
            return None
        return _OutputGrammar(self, special_token_ids).text()


class _OutputGrammar:
    """Derives the rules of one output from the descriptions of its parts."""

    def __init__(self, spec: OutputSpec, special_token_ids: Mapping[str, int]) -> None:
        self._spec = spec
        self._rules = LarkRules(special_token_ids)
        self._rules.add("TEXT", terminal(SOME_TEXT))
        # Any text may come first, and the output may end within it.
        self._is_free = spec.content is None and spec.tool_choice == "auto"

    def text(self) -> str:
        output = self._output()
        if self._spec.reasoning is not None:
            output = self._after_reasoning(output, self._spec.reasoning)
        self._rules.add("start", output)
        return self._rules.text()

    def _after_reasoning(self, output: str, form: ReasoningFormat) -> str:
        rules = self._rules
        rules.add("answer", output)
        rest = f"{self._text_until(form.closing, 'reasoning_end')} {'' if self._is_free else _SPACE} answer"
        rules.add("reasoned", f"{rest} | TEXT?" if self._is_free else rest)
        if self._spec.starts_in_reasoning:
            return "reasoned"
        opening = self._special(form.opening)
        if opening is None:
            opening = rules.add("reasoning_begin", terminal(spaces() + regex_quote(form.opening)), lazy=True)
        return f"{opening} reasoned | answer"

    def _output(self) -> str:
        spec = self._spec
        form = spec.calls_format
        content = "TEXT?" if spec.content is None else self._rules.add("content", inline_grammar(spec.content))
        if form is None:
            return content
        if self._is_free:
            return self._free_output(form)
        calls = self._at_start(form) if form.only_at_start else self._calls(form)
        return calls if spec.tool_choice == "required" else one_of([calls, content])

    def _free_output(self, form: ToolFormat) -> str:
        """Text in which calls may begin; until then nothing is forced."""
        rules = self._rules
        others = {token for text, token in rules.special_token_ids.items() if text not in self._spec.markers}
        free = rules.add("free", f"(TEXT | {special_tokens(others)})*" if others else "TEXT?")
        if form.only_at_start:
            return f"{self._at_start(form)} | {free}"
        trigger = form.trigger.text
        # The parser cannot tell a special token from its spelling in other tokens: both begin a call.
        begins = [rules.add("begin", terminal(ANY_TEXT + regex_quote(trigger)), lazy=True)]
        if (special := self._special(trigger)) is not None:
            begins.append(special)
        calls = rules.add("calls", f"{free} {one_of(begins)} {self._after_trigger(form)}")
        return f"{calls}* {free}" if self._spec.parallel else f"{calls} | {free}"

    def _calls(self, form: ToolFormat) -> str:
        """Calls of a format with a marker, and nothing else."""
        trigger = form.trigger.text
        begin = self._special(trigger)
        if begin is None:
            begin = self._rules.add("begin", terminal(spaces() + regex_quote(trigger)), lazy=True)
        return f"{begin} {self._after_trigger(form)} {'' if form.is_list else self._more(form)}"

    def _after_trigger(self, form: ToolFormat) -> str:
        """The rest of a call, or of a list of calls."""
        if not form.is_list:
            return self._any_call(form.call[1:], "call")
        calls = f"{self._any_call(form.call, 'call')} {self._more(form)}"
        return f"{self._sequence(form.opening[1:])} {calls} {self._sequence(form.closing)}"

    def _at_start(self, form: ToolFormat) -> str:
        """Calls of a format without a marker: what decides that they begin is one lexeme, for each tool."""
        markers = [part for part in form.opening if isinstance(part, Marker) and self._special(part.text)]
        textual = [part for part in form.opening if part not in markers]
        first = []
        for place, tool in enumerate(self._spec.callable_tools):
            head = "".join(self._regex(part, tool) for part in (Space(), *textual, *form.head))
            begin = self._rules.add(f"begin_{place}", terminal(head), lazy=True)
            first.append(f"{begin} {self._sequence(form.tail, tool, f'first_{place}')}")
        return f"{self._sequence(markers)} {one_of(first)} {self._more(form)} {self._sequence(form.closing)}"

    def _more(self, form: ToolFormat) -> str:
        if not self._spec.parallel:
            return ""
        return f"({self._sequence(form.between)} {self._any_call(form.call, 'next')})*"

    def _any_call(self, call: Sequence[Part], prefix: str) -> str:
        """A call of any tool, each with its own arguments."""
        return one_of(
            self._rules.add(f"{prefix}_{place}", self._sequence(call, tool, f"{prefix}_{place}"))
            for place, tool in enumerate(self._spec.callable_tools)
        )

    def _sequence(self, parts: Sequence[Part], tool: Tool | None = None, prefix: str = "") -> str:
        """What matches these parts. Texts that follow each other are one lexeme."""
        items: list[str] = []
        regex = ""
        for part in parts:
            special = self._special(part.text) if isinstance(part, Marker) else None
            if special is None and not isinstance(part, Arguments):
                regex += self._regex(part, tool)
                continue
            items += [terminal(regex)] if regex else []
            regex = ""
            if isinstance(part, Arguments) and tool is not None:
                items.append(part.form.grammar(self._rules, prefix, tool))
            elif special is not None and isinstance(part, Marker):
                items.append(f"{special}?" if part.optional else special)
        return " ".join([*items, terminal(regex)] if regex else items)

    def _regex(self, part: Part, tool: Tool | None) -> str:
        match part:
            case Text(text) | Marker(text, False):
                return regex_quote(text)
            case Extra(text) | Marker(text, True):
                return f"({regex_quote(text)})?"
            case Space():
                return spaces()
            case Name() if tool is not None:
                return regex_quote(tool.name)
        raise ValueError(f"{part} is no text")

    def _text_until(self, marker: str, name: str) -> str:
        special = self._special(marker)
        if special is not None:
            return f"TEXT? {special}"
        return self._rules.add(name, terminal(ANY_TEXT + regex_quote(marker)), lazy=True)

    def _special(self, text: str) -> str | None:
        token = self._rules.special_token_ids.get(text)
        return None if token is None else special_tokens([token])
