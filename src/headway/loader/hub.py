"""Fetching a model from the Hugging Face hub, into its usual cache."""

from __future__ import annotations

import re
from pathlib import Path

from headway.errors import ModelNotFoundError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
_IGNORED = ["consolidated*.safetensors", "original/*"]


def looks_like_hub_id(model: str) -> bool:
    """`owner/name` or `name`; a path with other separators, or with a file's ending, is not one."""
    return _HUB_ID.fullmatch(model) is not None and not model.endswith((".gguf", ".json", ".safetensors"))


def download(model: str) -> Path:
    """The folder of a hub model, downloaded if it is not in the cache."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=_PATTERNS, ignore_patterns=_IGNORED))
    except Exception as error:  # the library raises its own, the HTTP client's and the system's errors
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelNotFoundError(
            f"no file or folder {model!r}, and fetching it from the Hugging Face hub failed: {reason}. "
            "Check the name and the network, or give the path of a local model folder or .gguf file"
        ) from error
