"""What `/v1/responses` and `/v1/messages` share: both are translated into chat completions.

    body ─► its own record ─► a chat request as a dict ─► `ChatCompletionRequest` ─► the path of every chat request

The checks of chat requests are not repeated. Their errors are renamed to the fields that the client used.
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

else:  # the fields of `RequestOptions` that a body may set, under the same names as in a chat request
    _OptionFields = msgspec.defstruct(
        "_OptionFields",
        [field for field in option_struct_fields() if field[0] != "user"],  # the APIs have different names for it
        bases=(ApiRecord,),
        kw_only=True,
    )


class TranslatedRequest(_OptionFields, kw_only=True):
    """Fields that requests of both APIs may have, in addition to the API's own fields."""

    service_class: str | None = None
    stream: bool | None = None

    def shared_fields(self) -> dict[str, Any]:
        """Return the fields that have the same name in a chat request."""
        names = ("service_class", "stream", *(option.http_name for option in HTTP_OPTIONS if option.name != "tenant"))
        return given({name: getattr(self, name) for name in names})


class ChatMessages:
    """Builds a conversation of chat messages. An assistant turn is one message of reasoning, text, then calls."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._texts: list[list[str]] = []
        self._thoughts = ""

    def add_text(self, role: str, texts: Sequence[str]) -> None:
        """Add text of any role except `tool`. Consecutive system messages are merged, because templates take one."""
        last = self._messages[-1] if self._messages else {}
        if role == "assistant":
            self._add({"role": role} | self._take_thoughts(), texts)
        elif role == "system" and last.get("role") == "system":
            self._texts[-1] += texts
        else:
            self._add({"role": role}, texts)

    def add_thoughts(self, text: str) -> None:
        """Add reasoning to the assistant turn that follows."""
        self._thoughts += text

    def add_call(self, call_id: str, name: str, arguments: str) -> None:
        """Add a call. It joins the last message if that is the assistant's and no reasoning was added after it."""
        if not self._messages or self._messages[-1]["role"] != "assistant" or self._thoughts:
            self._add({"role": "assistant"} | self._take_thoughts(), ())
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._messages[-1].setdefault("tool_calls", []).append(call)

    def add_result(self, call_id: str, text: str) -> None:
        """Add the result of a tool call."""
        self._add({"role": "tool", "tool_call_id": call_id}, [text])

    def written(self) -> list[dict[str, Any]]:
        """Return all messages. Reasoning that no assistant turn follows is left out: no message can carry it."""
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
    """Return the fields that are not null."""
    return {name: value for name, value in fields.items() if value is not None}


def leave_out_hosted_tool(kind: str, path: str, *, must_call: bool) -> None:
    """Log that a hosted tool is left out, or raise 400 if a tool must be called."""
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
    """Log a kind of tool only once, because clients send it with every request."""
    logger.warning("tools of type '%s' are left out of requests: this server cannot run them", kind)


def record_by_type(value: Any, path: str, kinds: Mapping[str, type[_T]], *, default: str | None = None) -> _T:
    """Return the record that the object's `type` selects. Raises 400 for an unknown type."""
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
    """Return the fields as a chat request. Its record checks the values that the translation only copies."""
    return record_from(dict(fields), ChatCompletionRequest)
