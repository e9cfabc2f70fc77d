"""transformers' `generate` on the model of an engine: the loop that people write before they serve a model.

A batch is what `generate` takes: prompts are padded on the left to the longest of the batch, and all rows go on until
the longest answer has its tokens. A lone request is a batch of one. transformers is no requirement of Headway.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import io
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from headway.installing import install_command
from headway.loader.builtin_shapes import BUILTIN_SHAPES
from headway.loader.chosen_model import model_path
from headway_lab.claims.context import Infeasible
from headway_lab.claims.rectangular import batches_of
from headway_lab.workload.bench_requests import BenchRequest, Work

if TYPE_CHECKING:
    from headway.config import ModelConfig
    from headway.progress import Meter

_NEEDED = ("transformers", "accelerate")
_REQUIREMENTS = ("transformers>=5,<6", "accelerate>=1")


def check_installed() -> None:
    """`Infeasible` unless transformers is there, and what it needs to read files."""
    if any(importlib.util.find_spec(name) is None for name in _NEEDED):
        raise Infeasible(
            f"it compares with transformers, which is not installed: run '{install_command(*_REQUIREMENTS)}'"
        )


class TransformersLoop:
    """A model in transformers, on one device."""

    def __init__(self, model: Any, device: str) -> None:
        import torch

        self.model, self._device = model, device
        self._num_threads = torch.get_num_threads()

    @staticmethod
    def load(model: ModelConfig, *, device: str, dtype: str) -> TransformersLoop:
        """Load the model that an engine was configured with, in this number format; one with random weights is made up
        here as well."""
        import torch
        import transformers

        try:
            if model.load_format == "dummy":
                with torch.device(device):
                    loaded = _made_up(model.model or "", getattr(torch, dtype))
            else:
                loaded = _from_files(model_path(model), getattr(torch, dtype))
        except (OSError, ValueError, KeyError, AttributeError, NotImplementedError, ImportError) as error:
            raise Infeasible(f"transformers cannot load this model: {error}") from error
        loaded.generation_config = transformers.GenerationConfig()  # no sampling, no tokens that end an answer
        return TransformersLoop(loaded.to(device).eval(), device)

    def warm_up(self, request: BenchRequest, num_tokens: int = 4) -> int:
        """Generate a few tokens, so that what is made once is there. Returns the number of torch's threads: on a CPU
        its own choice or a single one, whichever is faster, since on a busy machine its threads wait for each other."""
        short = [dataclasses.replace(request, num_output_tokens=num_tokens)]
        self.seconds(short, 1)
        if self._device == "cpu":
            taken_s = {}
            for number in dict.fromkeys((1, self._num_threads)):
                self._num_threads = number
                taken_s[number] = self.seconds(short, 1)
            self._num_threads = min(taken_s, key=lambda number: taken_s[number])
        return self._num_threads

    def seconds(self, work: Work, size: int, progress: Meter | None = None) -> float:
        """Serve the requests in this order, `size` at a time, and return how many seconds that took."""
        import torch

        callers_threads = torch.get_num_threads()
        torch.set_num_threads(self._num_threads)
        started_s = time.perf_counter()
        try:
            for batch in batches_of(list(work), size):
                self._generate(batch)
                if progress is not None:
                    for _ in batch:
                        progress.advance()
            return time.perf_counter() - started_s
        finally:
            torch.set_num_threads(callers_threads)

    def _generate(self, batch: list[BenchRequest]) -> None:
        import torch

        num_in = max(one.num_prompt_tokens for one in batch)
        num_out = max(one.num_output_tokens for one in batch)
        padding = [num_in - one.num_prompt_tokens for one in batch]
        ids = [[0] * before + list(one.prompt_token_ids) for before, one in zip(padding, batch)]
        mask = [[0] * before + [1] * (num_in - before) for before in padding]
        with torch.inference_mode():
            out = self.model.generate(
                torch.tensor(ids, device=self._device),
                attention_mask=torch.tensor(mask, device=self._device),
                do_sample=False,
                max_new_tokens=num_out,
                pad_token_id=0,
            ).cpu()
        if tuple(out.shape) != (len(batch), num_in + num_out):
            raise RuntimeError(f"transformers made {tuple(out.shape)} tokens, not {(len(batch), num_in + num_out)}")


def _made_up(name: str, number_format: Any) -> Any:
    """Random weights in a shape: a built-in one, a file's, or a folder's."""
    import transformers

    if name in BUILTIN_SHAPES:
        shape = dict(BUILTIN_SHAPES[name])
    else:
        path = Path(name).expanduser()
        shape = json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
    kind = getattr(transformers, shape["architectures"][0])
    return transformers.AutoModelForCausalLM.from_config(kind.config_class(**shape), dtype=number_format)


def _from_files(path: Path, number_format: Any) -> Any:
    """A model from a folder or a GGUF file, whose weights are dequantised."""
    import gguf
    import transformers

    is_file = path.is_file()
    source = str(path.parent if is_file else path)
    # transformers reads a GGUF file several times, for seconds each; and it shows progress bars
    reads_once = mock.patch.object(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))
    with reads_once, contextlib.redirect_stderr(io.StringIO()):
        return transformers.AutoModelForCausalLM.from_pretrained(
            source, dtype=number_format, gguf_file=path.name if is_file else None
        )
