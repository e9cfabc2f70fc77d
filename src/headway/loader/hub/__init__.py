"""Models of the Hugging Face hub: found in the cache folder, or fetched into it.

    find_model    for an engine: what the cache has whole is used as it is, without asking the hub
    pull_model    for `headway pull`: asks the hub for the present commit, and fetches what is missing or damaged

So a start needs no network once a model is here, and engines that start one after the other have the same weights, even
if the model changes on the hub meanwhile.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import AbstractContextManager
from pathlib import Path

from headway.errors import ModelError, ModelNotFoundError
from headway.loader.hub.cache import CachedModel
from headway.loader.hub.hub import Hub
from headway.loader.hub.model_id import HubModel
from headway.loader.hub.pulling import Pulled, Pulling, Show, check_kept, kept_model
from headway.progress import Meter, first_use, meter

logger = logging.getLogger(__name__)

__all__ = ["HubModel", "Pulled", "find_model", "is_offline", "pull_model"]

OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_TRUE = ("1", "ON", "YES", "TRUE")


def is_offline(asked: bool = False) -> bool:
    """Whether nothing may be fetched: because the option says so, or the environment, as for Hugging Face's tools."""
    return asked or any(os.environ.get(name, "").upper() in _TRUE for name in OFFLINE_VARIABLES)


def find_model(model: HubModel, load_format: str = "auto", *, offline: bool = False) -> Path:
    """The folder or the GGUF file of a model, fetched if the cache does not have it whole. Raises a `ModelError`."""
    hub = Hub()
    kept = kept_model(CachedModel(hub.cache, model.repo), model, load_format)
    if kept is not None and (kept.has_tokenizer or is_offline(offline)):
        return kept.path
    if is_offline(offline):
        raise _not_here(model, hub.cache)

    def show(num_bytes: int) -> AbstractContextManager[Meter]:
        what = f"Fetching {model} ({num_bytes / 1e6:,.0f} MB) to {hub.cache}: this happens once."
        return first_use(what, f"Fetching {model}", unit="bytes")

    try:
        return Pulling(hub, model, load_format).run(show=show, show_check=None, on_wait=_say_waiting).path
    except ModelNotFoundError as error:
        if kept is None:
            raise
        logger.warning("%s is used as the cache has it, without a tokenizer: %s", model, error)
        return kept.path


def pull_model(model: HubModel, load_format: str = "auto", *, offline: bool = False) -> Pulled:
    """Bring a model up to date, and check the content of every file, with progress on stderr. If nothing may be
    fetched, only check. Raises a `ModelError`."""
    hub = Hub()

    def shown(title: str) -> Show:
        return lambda num_bytes: meter(num_bytes, f"{title} {model}", unit="bytes")

    if is_offline(offline):
        pulled = check_kept(CachedModel(hub.cache, model.repo), model, load_format, shown("Checking"))
        if pulled is None:
            raise _not_here(model, hub.cache)
        return pulled
    return Pulling(hub, model, load_format).run(
        show=shown("Fetching"), show_check=shown("Checking"), on_wait=_say_waiting
    )


def _not_here(model: HubModel, folder: Path) -> ModelError:
    return ModelNotFoundError(
        f"no file or folder '{model.repo}', and {folder} does not hold the whole model {model}, and nothing may be "
        f"fetched (option offline, or {OFFLINE_VARIABLES[0]}). Run '{model.command}' where there is a network"
    )


def _say_waiting() -> None:
    print("Another process fetches this model; waiting for it.", file=sys.stderr, flush=True)
