"""Turns what goes wrong between here and the hub into errors that say what to do."""

from __future__ import annotations

import errno
from http import HTTPStatus
from typing import TYPE_CHECKING

from headway.errors import ModelError, ModelNotFoundError

if TYPE_CHECKING:
    from headway.loader.hub.model_id import HubModel

_HTTP_PACKAGES = ("httpx", "httpx2", "httpcore", "httpcore2", "ssl")
"""Packages whose errors are those of a connection. Which HTTP client there is depends on huggingface_hub's version."""


def is_connection_error(error: BaseException) -> bool:
    """Whether the network failed, and not the hub, this machine's disk, or the code."""
    package = type(error).__module__.partition(".")[0]
    return isinstance(error, ConnectionError | TimeoutError) or package in _HTTP_PACKAGES


def refusal(error: Exception, model: HubModel, *, endpoint: str, has_token: bool) -> ModelError:
    """The error for the user. `has_token`: whether the requests had a token."""
    from huggingface_hub import errors

    name, page = model.repo, f"{endpoint}/{model.repo}"
    if isinstance(error, errors.GatedRepoError):
        todo = (
            f"the token that is used has no access: accept the terms at {page} with its account, or use another token"
            if has_token
            else f"accept its terms at {page}, then give a token of that account in HF_TOKEN, or run 'hf auth login'"
        )
        return ModelNotFoundError(f"{name} is a gated model: {todo}")
    if isinstance(error, errors.RepositoryNotFoundError):
        todo = (
            "check the name, and whether the token that is used may read it"
            if has_token
            else "check the name. A private one needs a token: set HF_TOKEN, or run 'hf auth login'"
        )
        return ModelNotFoundError(f"no file or folder '{name}', and {endpoint} has no such model: {todo}")
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelNotFoundError(f"{name} has no revision '{model.revision}'; {page}/tree/main lists its branches")
    if isinstance(error, errors.EntryNotFoundError):
        return ModelNotFoundError(f"{name}: a file is gone from the hub; run '{model.command}' for what is there now")
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return ModelNotFoundError(f"{name} cannot be fetched: {_of_status(status, error, has_token=has_token)}")
    if is_connection_error(error):
        return ModelNotFoundError(
            f"no file or folder '{name}', and the Hugging Face hub cannot be reached at {endpoint}: {_reason(error)}. "
            f"Check the network and its proxy (HTTPS_PROXY), or fetch the model elsewhere with '{model.command}' and "
            "bring the folder that HF_HOME names, or give the path of a local model folder or .gguf file"
        )
    return ModelNotFoundError(f"fetching {name} from the Hugging Face hub failed: {_reason(error)}")


def disk_refusal(error: OSError, model: HubModel, folder: object) -> ModelError:
    """The error for the user if files cannot be written."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    todo = "free some space" if full else "make it writable"
    return ModelNotFoundError(
        f"{model.repo} cannot be kept in {folder}: {error.strerror or error}; {todo}, or choose another folder with "
        "the environment variable HF_HOME. What has arrived is kept, and the next run continues it"
    )


def _of_status(status: int, error: Exception, *, has_token: bool) -> str:
    response = getattr(error, "response", None)
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        after = response.headers.get("Retry-After") if response is not None else None
        wait = f"in {after} s" if after and after.isdigit() else "in some minutes"
        token = "" if has_token else "; with a token (HF_TOKEN) the hub allows more"
        return f"the hub has had too many requests from here (429). Try again {wait}{token}"
    if status in (401, 403):
        todo = "the token that is used is not valid, or may not do this" if has_token else "set HF_TOKEN"
        return f"the hub refuses access ({status}): {todo}"
    if status >= 500:
        return f"the hub has a fault ({status}); try again later"
    return f"the hub answers {status} ({_reason(error)})"


def _reason(error: Exception) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[0].strip() if lines else type(error).__name__
