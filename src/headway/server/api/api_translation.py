"""What the two translated APIs share: `/v1/responses` and `/v1/messages` are other spellings of a chat completion.

    body ─► its own record ─► a chat request as a dict ─► `ChatCompletionRequest` ─► the path of every chat request

Checks that chat has are not repeated; what they refuse is told under the name that the client used.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from headway.server.api.api_errors import bad_request
from headway.server.api.record_fields import HTTP_OPTIONS, ApiRecord, option_struct_fields
from headway.server.api.requests import ChatCompletionRequest
from headway.server.http.asgi_io import record_from

logger = logging.getLogger(__name__)

_SHOWN_CHARS = 40
_T = TypeVar("_T", bound=ApiRecord)

if TYPE_CHECKING:

    class _OptionFields(ApiRecord, kw_only=True):
        def __getattr__(self, name: str) -> Any: ...

else:  # what a body says of a request's `RequestOptions`, under the same names as in a chat request
    _OptionFields = msgspec.defstruct(
        "_OptionFields",
        [field for field in option_struct_fields() if field[0] != "user"],  # each API has a name of its own for it
        bases=(ApiRecord,),
        kw_only=True,
    )


class TranslatedRequest(_OptionFields, kw_only=True):
    """What a request may say in either API, besides the API's own fields."""

    service_class: str | None = None
    stream: bool | None = None

    def shared_fields(self) -> dict[str, Any]:
        """Those that have the same name in a chat request."""
        names = ("service_class", "stream", *(option.http_name for option in HTTP_OPTIONS if option.name != "tenant"))
        return given({name: getattr(self, name) for name in names})


class ChatMessages:
    """A conversation as chat messages. One turn of the assistant is one message: thoughts, text, then calls."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._texts: list[list[str]] = []
        self._thoughts = ""

    def add_text(self, role: str, texts: Sequence[str]) -> None:
        """Text of any role but `tool`. Templates take one system message, so those that follow one another are one."""
        last = self._messages[-1] if self._messages else {}
        if role == "assistant":
            self._add({"role": role} | self._take_thoughts(), texts)
        elif role == "system" and last.get("role") == "system":
            self._texts[-1] += texts
        else:
            self._add({"role": role}, texts)

    def add_thoughts(self, text: str) -> None:
        """Belong to the turn of the assistant that follows."""
        self._thoughts += text

    def add_call(self, call_id: str, name: str, arguments: str) -> None:
        """Joins the assistant's turn, if it is the last message and the thoughts are not newer."""
        if not self._messages or self._messages[-1]["role"] != "assistant" or self._thoughts:
            self._add({"role": "assistant"} | self._take_thoughts(), ())
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._messages[-1].setdefault("tool_calls", []).append(call)

    def add_result(self, call_id: str, text: str) -> None:
        """What a tool answered."""
        self._add({"role": "tool", "tool_call_id": call_id}, [text])

    def written(self) -> list[dict[str, Any]]:
        """All messages. Thoughts that no turn followed are left out: there is no message that could carry them."""
        return [
            message | ({"content": _content(texts)} if texts or "tool_calls" not in message else {})
            for message, texts in zip(self._messages, self._texts, strict=True)
        ]

    def _add(self, message: dict[str, Any], texts: Sequence[str]) -> None:
        self._messages.append(message)
        self._texts.append(list(texts))

    def _take_thoughts(self) -> dict[str, str]:
        thoughts, self._thoughts = self._thoughts, ""
        return {"reasoning_content": thoughts} if thoughts else {}


def _content(texts: list[str]) -> str | list[dict[str, str]]:
    if len(texts) < 2:
        return "".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields without those that are null."""
    return {name: value for name, value in fields.items() if value is not None}


def leave_out_hosted_tool(kind: str, path: str, *, must_call: bool) -> None:
    """A tool that the API's own service runs: the answer goes without it, unless a tool must be called."""
    if must_call:
        raise bad_request(
            f"'{path}' is '{kind}', a tool that this server cannot run, and 'tool_choice' asks for a call. Leave it "
            "out, or send 'tool_choice': 'auto'.",
            param=path,
            code="unsupported_field",
        )
    _log_left_out(kind)


@functools.cache
def _log_left_out(kind: str) -> None:
    """Clients send such tools with every request; a line per kind is enough."""
    logger.warning("tools of type '%s' are left out of requests: this server cannot run them", kind)


def record_by_type(value: Any, path: str, kinds: Mapping[str, type[_T]], *, default: str | None = None) -> _T:
    """A record of the kind that the object's `type` names; 400 for any other type, by its name."""
    if not isinstance(value, dict):
        raise bad_request(f"'{path}' must be an object.", param=path)
    name = value.get("type", default)
    kind = kinds.get(name) if isinstance(name, str) else None
    if kind is None:
        field = f"{path}.type"
        if name is None:
            raise bad_request(f"'{field}' is required.", param=field)
        raise bad_request(
            f"'{field}' is {str(name)[:_SHOWN_CHARS]!r}, which is not supported by this server; it takes "
            f"{', '.join(kinds)}.",
            param=field,
            code="unsupported_field",
        )
    record = record_from(value, kind, path)
    record.check_supported(f"{path}.")
    return record


def chat_request(fields: Mapping[str, Any]) -> ChatCompletionRequest:
    """The record of a chat request, which checks what the translation does not look at."""
    return record_from(dict(fields), ChatCompletionRequest)
