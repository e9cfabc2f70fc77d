"""Converts errors of `/v1/messages` to the form of Anthropic's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from headway.server.api.api_errors import CONTEXT_LENGTH_EXCEEDED, ApiError

MESSAGES_PATH = "/v1/messages"
"""Errors of paths that begin with this have Anthropic's form."""
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessageErrorBody(msgspec.Struct):
    """What is wrong, in Anthropic's names."""

    type: str
    message: str
    details: Mapping[str, Any] | msgspec.UnsetType = msgspec.UNSET
    """Machine-readable details, if there are any."""


class MessageError(msgspec.Struct, tag="error"):
    """The body of every answer of these routes that is not 2xx, and the last event of a stream that failed."""

    error: MessageErrorBody
    request_id: str | None = None


def message_error(failure: ApiError, *, request_id: str | None = None) -> MessageError:
    """Return the failure as an error object of Anthropic's API."""
    kind = _ERROR_TYPES.get(failure.status, "invalid_request_error" if failure.status < 500 else "api_error")
    details, message = failure.details or msgspec.UNSET, str(failure)
    if failure.details and failure.code == CONTEXT_LENGTH_EXCEEDED:
        # Agents recognise this error by Anthropic's wording and parse both numbers.
        numbers = "prompt is too long: {num_tokens} tokens > {max_tokens} maximum".format_map(failure.details)
        details, message = msgspec.UNSET, f"{numbers}. {message}"
    return MessageError(MessageErrorBody(kind, message, details), request_id)
