"""What integration tests share: models, which none of them changes, and what plain engines answer."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from headway import LLM
from headway.loader import gguf_checkpoint
from headway.loader.gguf_checkpoint import GGUFCheckpoint
from headway.models.checkpoint import Checkpoint
from headway.models.decoder import Decoder
from headway.worker import model_worker
from tests.integration.conversations import MAX_MODEL_LEN, MAX_TOKENS, Alone
from tests.integration.cut_model import write_cut_model
from tests.integration.every_kind import answers

if TYPE_CHECKING:
    from tests.unit.runner.tiny_llm import TinyLLM

MOST_KEPT = 2


@pytest.fixture(scope="session", autouse=True)
def _models_are_read_once() -> Iterator[None]:
    read, tokenizer = model_worker.load_decoder, GGUFCheckpoint.tokenizer
    kept: dict[Any, Decoder] = {}

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
        patch.setattr(GGUFCheckpoint, "tokenizer", functools.lru_cache(MOST_KEPT)(tokenizer))
        patch.setattr(gguf_checkpoint, "GGUFCheckpoint", functools.lru_cache(MOST_KEPT)(GGUFCheckpoint))
        yield


@pytest.fixture(scope="session")
def cut(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with the embedded one's tokenizer, for what does not depend on what a model says."""
    return str(write_cut_model(tmp_path_factory.mktemp("cut")))


@pytest.fixture(scope="session")
def plain_answers(cut: str) -> list[Any]:
    """What one engine answers, one token at a time."""
    llm = LLM(cut, dtype="float32", speculation="off")
    try:
        return answers(llm)
    finally:
        llm.shutdown()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyLLM:
    """With room for conversations."""
    from tests.unit.runner.tiny_llm import TinyLLM

    return TinyLLM(tmp_path_factory.mktemp("tiny"), MAX_MODEL_LEN)


@pytest.fixture(scope="session")
def alone(tiny: TinyLLM) -> Alone:
    """It remembers its answers."""
    return Alone(tiny.on_cpu(enable_prefix_caching=False), MAX_TOKENS)
