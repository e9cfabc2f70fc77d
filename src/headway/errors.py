"""Every error Headway raises on purpose, as one tree.

`HeadwayError` is the root. Each class knows the HTTP status a server answers with, so no layer has to guess. Errors a
caller can repair (a bad parameter, a bad option) are also `ValueError`s, as Python users expect.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any


class HeadwayError(Exception):
    """Root of all errors raised by Headway itself."""

    http_status = 500


class ConfigError(HeadwayError, ValueError):
    """An engine option is unknown, out of range, or conflicts with another one."""

    http_status = 400


class InvalidRequestError(HeadwayError, ValueError):
    """A request is malformed. `param` names the field at fault, where there is one."""

    http_status = 400

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RequestTooLargeError(InvalidRequestError):
    """A request is well formed but can never fit: longer than the context, or than the whole KV cache."""

    num_tokens: int | None = None
    """The length of the prompt, if it exceeds the context."""
    max_tokens: int | None = None
    """The longest prompt that the context allows, if the prompt exceeds it."""

    @classmethod
    def for_context(cls, why: str, *, num_tokens: int, max_model_len: int, param: str) -> RequestTooLargeError:
        """Make the error for a prompt that exceeds the context. Clients recognise the first sentence of the message and
        then drop the beginning of a conversation, or ask another model."""
        error = cls(f"This model's maximum context length is {max_model_len} tokens. However, {why}.", param)
        error.num_tokens, error.max_tokens = num_tokens, max_model_len - 1
        return error


class RequestFailedError(HeadwayError):
    """Requests could not continue: the model's output was not a number, or a step failed. The engine still works.

    `outputs` are the `RequestOutput`s of all requests of the call, in the order of its prompts. Those of failed
    requests (finish reason "error") have the output so far. `errors` has the reasons by request id.
    """

    def __init__(self, errors: Mapping[str, str], outputs: Sequence[Any]) -> None:
        first = next(iter(errors.items()))
        more = f" (and {len(errors) - 1} more of {len(outputs)})" if len(errors) > 1 else ""
        super().__init__(f"Request '{first[0]}' failed: {first[1]}{more}")
        self.errors = dict(errors)
        self.outputs = list(outputs)


class RequestNotFoundError(HeadwayError, KeyError):
    """No live request has this id."""

    http_status = 404

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0])


class ModelError(HeadwayError):
    """Root of everything that can go wrong while a model is found, read or built."""


class ModelNotFoundError(ModelError):
    """The path or id does not lead to a model."""


class UnsupportedModelError(ModelError):
    """The model is intact but its architecture, or a feature of it, is not implemented."""


class CorruptModelError(ModelError):
    """A model file is truncated, damaged, or contradicts its own header."""


class MissingTensorError(ModelError):
    """The files lack a tensor that the architecture needs."""


class TensorShapeError(ModelError):
    """A tensor's shape is not the one that the configuration implies."""


class NativeBuildError(HeadwayError):
    """The native CPU kernels could not be compiled or loaded."""


class OutOfMemoryError(HeadwayError):
    """The weights or the smallest useful KV cache do not fit in the memory that was granted."""

    http_status = 503


class EngineDeadError(HeadwayError):
    """The engine has failed and can serve no more requests."""

    http_status = 503


class EngineStartError(HeadwayError):
    """The engine process ended before it was ready. The message is for the operator."""

    http_status = 503


class EngineUnavailableError(HeadwayError):
    """No request can be taken now: the engine process is starting, has stopped, or is being shut down."""

    http_status = 503


_LEAST_BEGINNING = 3


def did_you_mean(
    name: str, valid: Mapping[str, Any] | tuple[str, ...], *, cutoff: float = 0.6, by_beginning: bool = True
) -> str:
    """A sentence with the valid name nearest to `name`, or an empty string if none is as near as `cutoff`. With
    `by_beginning` a name also matches if one of the two begins with the other."""
    near = difflib.get_close_matches(name, list(valid), n=1, cutoff=cutoff)
    if not near and by_beginning and len(name) >= _LEAST_BEGINNING:
        near = [one for one in valid if one.startswith(name) or name.startswith(one)]
    return f" Did you mean '{near[0]}'?" if near else ""
