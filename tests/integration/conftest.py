"""Engines of the embedded model in this process share its weights, which none of them changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from headway.loader.gguf_checkpoint import GGUFCheckpoint
from headway.models.checkpoint import Checkpoint
from headway.models.decoder import Decoder
from headway.worker import model_worker

MOST_KEPT = 2


@pytest.fixture(scope="session", autouse=True)
def _weights_are_read_once() -> Iterator[None]:
    read, kept = model_worker.load_decoder, {}

    def load_decoder(checkpoint: Checkpoint, *, ops: Any, progress: Any = None, **options: Any) -> Decoder:
        if not isinstance(checkpoint, GGUFCheckpoint):
            return read(checkpoint, ops=ops, progress=progress, **options)
        key = (checkpoint.path, type(ops), *options.items())
        if key not in kept:
            while len(kept) >= MOST_KEPT:
                del kept[next(iter(kept))]
            kept[key] = read(checkpoint, ops=ops, progress=progress, **options)
        return kept[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_worker, "load_decoder", load_decoder)
        yield
