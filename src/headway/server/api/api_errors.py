"""Errors of the HTTP API, in the form that OpenAI's clients understand.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

Clients only see text that was written for them: that of an `ApiError`, or of an `InvalidRequestError` from the engine's
own checks. Any other exception becomes a plain 500, and its text goes to the log.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec

from headway.errors import EngineUnavailableError, HeadwayError, InvalidRequestError, RequestTooLargeError, did_you_mean
from headway.wire.messages import Delta

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
_SHOWN_PATH_CHARS = 200
NEAR_PATH = 0.8
"""Similarity, from 0 to 1, from which on a path is taken for a misspelling of another."""
COUNTERPARTS: Mapping[str, str] = {
    **dict.fromkeys(("/api/chat", "/v1/chat", "/chat"), "/v1/chat/completions"),
    **dict.fromkeys(("/generate", "/generate_stream", "/completion", "/infill"), "/v1/completions"),
    **dict.fromkeys(("/api/generate", "/v1/complete"), "/v1/completions"),
    **dict.fromkeys(("/embedding", "/embed", "/encode", "/api/embed", "/api/embeddings"), "/v1/embeddings"),
    **dict.fromkeys(("/api/tags", "/api/show", "/info", "/get_model_info", "/model_info"), "/v1/models"),
    **dict.fromkeys(("/props", "/api/ps", "/v1/model/info", "/v2", "/v2/repository/index"), "/v1/models"),
    **dict.fromkeys(("/get_server_info", "/collective_rpc"), "/server_info"),
    **dict.fromkeys(("/health_generate", "/healthz", "/livez", "/is_sleeping"), "/health"),
    **dict.fromkeys(("/readyz",), "/ready"),
    **dict.fromkeys(("/flush_cache", "/reset_mm_cache", "/reset_encoder_cache"), "/reset_prefix_cache"),
    **dict.fromkeys(("/slots", "/get_load", "/v1/loads"), "/load"),
    **dict.fromkeys(("/api/version",), "/version"),
    **dict.fromkeys(("/apply-template",), "/tokenize"),
}
"""Routes of vLLM, SGLang, TGI, llama.cpp and Ollama → the nearest equivalent of this server."""
NOT_HERE: Mapping[str, str] = dict.fromkeys(
    ("/sleep", "/wake_up"), " Engines do not sleep here; with --min-replicas, replicas that are not needed end."
)
"""Routes of other servers without an equivalent → what to do instead."""
_CONSTRAINT = re.compile(r"structured_outputs(\.(json|regex|choice|grammar|json_object)\b|(?!\.))")
"""The engine's field name of an output constraint, with its kind."""


class ErrorBody(msgspec.Struct):
    """What is wrong, in words and in names that programs compare."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(msgspec.Struct):
    """The body of every answer that is not 2xx, and the last event of a stream that failed."""

    error: ErrorBody


class ApiError(Exception):
    """An error answer of the API. Its message is written for the client."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        """`details` are machine-readable; only the error objects of `/v1/messages` can carry them."""
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.details = details

    def in_other_words(self, message: str, *, param: str | None) -> ApiError:
        """Return the same error with another message and another field name."""
        return ApiError(self.status, message, param=param, code=self.code, headers=self.headers, details=self.details)

    @property
    def body(self) -> bytes:
        """The error as JSON, in OpenAI's form."""
        return msgspec.json.encode(
            ErrorResponse(ErrorBody(str(self), error_type(self.status), param=self.param, code=self.code))
        )


def error_type(status: int) -> str:
    """Return the `type` of the error object for an HTTP status."""
    named = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        429: "rate_limit_error",
        503: "overloaded_error",
    }
    return named.get(status, "invalid_request_error" if status < 500 else "server_error")


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """Return a 400: the request itself is wrong, and sending it again will not help."""
    return ApiError(400, message, param=param, code=code)


def overloaded(message: str, *, code: str, retry_after_s: int = RETRY_AFTER_S) -> ApiError:
    """Return a 429: there is no room for the request now."""
    return ApiError(429, message, code=code, headers={"retry-after": str(retry_after_s)})


def unavailable(message: str, *, code: str, retry_after_s: int = RETRY_AFTER_S) -> ApiError:
    """Return a 503: the server cannot serve this request now, and the request is not the reason."""
    return ApiError(503, message, code=code, headers={"retry-after": str(retry_after_s)})


def from_status(status: int, headers: Mapping[str, str] | None = None) -> ApiError:
    """Return an error whose message is the standard phrase of its status."""
    return ApiError(status, f"{HTTPStatus(status).phrase}.", code=HTTPStatus(status).name.lower(), headers=headers)


def no_such_path(path: str, known: tuple[str, ...]) -> ApiError:
    """Return a 404 that lists the known paths and suggests one if possible."""
    shown = path[:_SHOWN_PATH_CHARS]
    hint = (
        _respelt(shown, known) or _counterpart(path) or did_you_mean(shown, known, cutoff=NEAR_PATH, by_beginning=False)
    )
    return ApiError(
        404,
        f"There is no '{shown}' here.{hint} There are: {', '.join(known)}.",
        code=HTTPStatus.NOT_FOUND.name.lower(),
    )


def _counterpart(path: str) -> str:
    """Return a hint at the equivalent of another server's route, or an empty string."""
    name = COUNTERPARTS.get(path.rstrip("/"))
    return f" What is nearest to it here is '{name}'." if name else NOT_HERE.get(path.rstrip("/"), "")


def _respelt(path: str, known: tuple[str, ...]) -> str:
    """Return a hint for a path that is right except that `/v1` is missing, doubled or superfluous."""
    inner, num_prefixes = path, 0
    while inner.startswith("/v1/"):
        inner, num_prefixes = inner.removeprefix("/v1"), num_prefixes + 1
    if num_prefixes != 1 and _is_known(f"/v1{inner}", known):
        return f" Did you mean '/v1{inner}'? '/v1' is {'doubled' if num_prefixes else 'missing'}."
    if num_prefixes and _is_known(inner, known):
        return f" Did you mean '{inner}'? It is not under '/v1'."
    return ""


def _is_known(path: str, known: tuple[str, ...]) -> bool:
    """Whether the path exists. A part in braces matches anything."""
    return any(path == one or ("{" in one and path.startswith(one.partition("{")[0])) for one in known)


def wrong_method(method: str, path: str, allowed: str) -> ApiError:
    """Return a 405 that names the allowed methods."""
    return ApiError(
        405,
        f"'{path[:_SHOWN_PATH_CHARS]}' takes {allowed}, not {method[:_SHOWN_PATH_CHARS]}.",
        code=HTTPStatus.METHOD_NOT_ALLOWED.name.lower(),
        headers={"allow": allowed},
    )


def from_delta(delta: Delta) -> ApiError:
    """Return the error of a request that the engine refused or could not finish."""
    code = "engine_error" if delta.error_status >= 500 else None
    return ApiError(
        delta.error_status, delta.error or "The engine ended the request.", param=delta.error_param, code=code
    )


def as_sent(error: ApiError, path: str) -> ApiError:
    """Return a constraint's error with `path`, the field that the client sent, in place of the engine's field name."""
    if error.param is None or not error.param.startswith("structured_outputs"):
        return error
    param, message = _CONSTRAINT.sub(path, error.param, count=1), _CONSTRAINT.sub(path, str(error), count=1)
    return error.in_other_words(message, param=param)


def under_name(error: ApiError, name: str, sent: str) -> ApiError:
    """Return an error of the field `name` as one of the field `sent`, which the client used instead."""
    if error.param != name:
        return error
    return error.in_other_words(str(error).replace(f"'{name}'", f"'{sent}'"), param=sent)


def from_exception(error: BaseException) -> ApiError:
    """Return any exception as an `ApiError`. Text that was not written for clients is only logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestTooLargeError):
        lengths = {"num_tokens": error.num_tokens, "max_tokens": error.max_tokens}
        details = None if error.num_tokens is None else lengths
        return ApiError(400, str(error), param=error.param, code=CONTEXT_LENGTH_EXCEEDED, details=details)
    if isinstance(error, InvalidRequestError):
        return bad_request(str(error), param=error.param)
    if isinstance(error, EngineUnavailableError):
        return unavailable(f"No request can be taken now: {error}.", code="engine_unavailable")
    status = error.http_status if isinstance(error, HeadwayError) else 500
    logger.error("request failed", exc_info=error)
    if status == 503:
        return unavailable("The engine is not available; please retry.", code="engine_unavailable")
    return ApiError(500, "The server failed on this request; the reason is in its log.", code="internal_error")
