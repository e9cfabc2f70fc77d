"""Chat templates: the model's own Jinja program that turns messages into a prompt, run in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache, cached_property
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from headway.errors import InvalidRequestError, UnsupportedModelError


class ChatTemplate:
    """One template, compiled at its first use."""

    def __init__(self, source: str) -> None:
        self.source = source

    @cached_property
    def _compiled(self) -> jinja2.Template:
        try:
            return _environment().from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise UnsupportedModelError(
                f"the model's chat template does not parse (line {error.lineno}): {error.message}"
            ) from error

    def render(self, *, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Run the template. Any failure is raised as an error about the messages. It includes a message that the
        template raised itself, but no details of other failures."""
        try:
            return self._compiled.render(messages=messages, **variables)
        except UnsupportedModelError:
            raise
        except _Refusal as refusal:
            raise InvalidRequestError(
                f"the model's chat template refused the messages: {refusal}", param="messages"
            ) from refusal
        except Exception as error:
            raise InvalidRequestError("the model's chat template fails on these messages", param="messages") from error


def check_messages(messages: object) -> list[dict[str, Any]]:
    """The messages as templates expect them: each a dict with a role and text. Raises on anything else."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise _bad(f"messages must be a list of messages, got {type(messages).__name__}")
    if not messages:
        raise _bad("messages must not be empty")
    return [_check_message(index, message) for index, message in enumerate(messages)]


def _check_message(index: int, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _bad(f"messages[{index}] must be a mapping with a role and content, got {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _bad(f"messages[{index}] needs a role, a non-empty string such as 'user', got {role!r}")
    checked = dict(message)
    # Clients send null content with calls. Many templates fail on it, and some write the word "None" into the prompt.
    is_call_alone = message.get("content") is None and bool(message.get("tool_calls"))
    checked["content"] = "" if is_call_alone else _text_of(index, message.get("content"))
    return checked


def _text_of(index: int, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise _bad(f"messages[{index}] needs content, a string or a list of text parts, got {type(content).__name__}")
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(text, str):
            raise _bad(
                f'messages[{index}] has a part of type {kind!r}; only {{"type": "text", "text": ...}} is supported'
            )
        texts.append(text)
    return "\n".join(texts)


def _bad(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="messages")


@cache
def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what training learns from; for a prompt it is just its body."""

    tags = {"generation"}  # noqa: RUF012 - declared so by the base class

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Refusal(jinja2.TemplateError):
    """Raised by a template, in words meant for the author of the messages."""


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
