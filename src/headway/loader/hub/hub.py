"""Asks the Hugging Face hub: which files a model has, and for their contents.

The requests are those of the package huggingface_hub, and so honour its environment variables: HF_ENDPOINT, HF_TOKEN,
HF_HOME, HF_HUB_CACHE, HF_HUB_DOWNLOAD_TIMEOUT, proxies. Its own download begins a file anew after each interruption,
so contents are asked for here, from where the last run has stopped.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from http import HTTPStatus
from pathlib import Path, PurePosixPath
from typing import Any

from headway.errors import ModelNotFoundError
from headway.loader.hub.cache import HubFile
from headway.loader.hub.model_id import HubModel
from headway.loader.hub.refusals import refusal

_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_RANGE_START = re.compile(r"bytes (\d+)-")
_BUSY = (408, 429, 500, 502, 503, 504)


@dataclass(frozen=True)
class Listing:
    """The files of a model at a commit."""

    commit: str
    files: Mapping[str, HubFile]

    def named(self, names: tuple[str, ...]) -> list[HubFile]:
        """These files."""
        return [self.files[name] for name in names]


@dataclass(frozen=True)
class Arrival:
    """An answer with a content, or with the rest of one."""

    start: int
    """Where it starts: 0 if the hub sends all, although only the rest was asked for."""
    chunks: Iterator[bytes]
    """The bytes as they arrive: what has been received when the connection is lost has been yielded."""


class Hub:
    """The hub that the environment names."""

    def __init__(self) -> None:
        from huggingface_hub import constants

        self.endpoint: str = constants.ENDPOINT
        self.cache = Path(constants.HF_HUB_CACHE)
        self._listing_timeout_s: float = constants.HF_HUB_ETAG_TIMEOUT
        self._timeout_s: float = constants.HF_HUB_DOWNLOAD_TIMEOUT

    @cached_property
    def _headers(self) -> dict[str, str]:
        from huggingface_hub.utils import build_hf_headers

        return dict(build_hf_headers(library_name="headway"))

    @property
    def has_token(self) -> bool:
        """Whether requests have a token."""
        return "authorization" in self._headers

    def listing(self, model: HubModel) -> Listing:
        """Ask which files the model has. Raises a `ModelError`, which says what to do."""
        from huggingface_hub import HfApi

        try:
            info = HfApi(endpoint=self.endpoint).model_info(
                model.repo, revision=model.revision, files_metadata=True, timeout=self._listing_timeout_s
            )
        except Exception as error:  # the library raises its own, the HTTP client's and the system's errors
            raise self.refusal(error, model) from error
        files = [_described(sibling) for sibling in info.siblings or []]
        if info.sha is None or _DIGEST.fullmatch(info.sha) is None or None in files:
            raise ModelNotFoundError(f"{self.endpoint} does not answer as a Hugging Face hub does about {model.repo}")
        return Listing(info.sha, {file.name: file for file in files if file is not None})

    @contextlib.contextmanager
    def content(self, model: HubModel, commit: str, file: HubFile, start: int) -> Iterator[Arrival]:
        """Ask for a file's content from byte `start` on. A context with the answer."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import hf_raise_for_status, http_stream_backoff

        url = hf_hub_url(model.repo, file.name, revision=commit, endpoint=self.endpoint)
        # The bytes as they are: a part of a compressed content could not be continued.
        headers = {**self._headers, "Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        # The library waits and asks again if the hub has too much to do; lost connections are the caller's matter.
        with http_stream_backoff(
            "GET",
            url,
            headers=headers,
            timeout=self._timeout_s,
            retry_on_exceptions=(),
            retry_on_status_codes=_BUSY,
        ) as response:
            hf_raise_for_status(response)
            begun = _RANGE_START.match(response.headers.get("Content-Range", ""))
            is_rest = response.status_code == HTTPStatus.PARTIAL_CONTENT and begun is not None
            yield Arrival(int(begun[1]) if is_rest and begun else 0, response.iter_bytes())

    def refusal(self, error: Exception, model: HubModel) -> Exception:
        """The error for the user."""
        return refusal(error, model, endpoint=self.endpoint, has_token=self.has_token)


def _described(sibling: Any) -> HubFile | None:
    """A file as the hub's answer describes it; `None` if the answer is not one that can be used."""
    digest = sibling.blob_id if sibling.lfs is None else sibling.lfs.sha256
    name = PurePosixPath(sibling.rfilename)
    if name.is_absolute() or ".." in name.parts or sibling.size is None or not digest:
        return None
    return HubFile(sibling.rfilename, sibling.size, digest) if _DIGEST.fullmatch(digest) else None
