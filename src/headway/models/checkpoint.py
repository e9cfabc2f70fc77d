"""What a checkpoint is: a description, an index of tensors, and a way to read one of them."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headway.models.decoder_config import DecoderConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from headway.layers.quantized_weight import Weight
    from headway.tokenizer import Tokenizer


_NUM_SAMPLES, _SAMPLE_BYTES = 512, 4096


@dataclass(frozen=True)
class TensorInfo:
    """What the headers say about a tensor."""

    shape: tuple[int, ...]
    num_bytes: int
    """Size in the file."""


class Checkpoint(ABC):
    """Weights that can be read one tensor at a time. Tensor names are those of Hugging Face checkpoints.

    Opening one reads the headers, and an output layer that is stored although it is tied, and checks everything that
    can be checked from them.
    """

    name: str
    """Shown to people: the file, folder, hub id or shape."""
    path: Path | None
    """The file or folder of the weights; None if there is none."""
    config: DecoderConfig
    index: Mapping[str, TensorInfo]
    quantized: Collection[str] = frozenset()
    """Names of the weights that are stored as codes and scales."""

    def identity(self) -> bytes:
        """A hash that changes with the weights and is the same for copies on other machines. It covers file names, file
        sizes and samples of the contents, so a change of more than a 512th of a file is noticed."""
        digest = hashlib.blake2b(repr((self.config, sorted(self.index.items()))).encode(), digest_size=16)
        for path in self._weight_files():
            size = path.stat().st_size
            digest.update(f"{path.name} {size}".encode())
            with path.open("rb") as file:
                for place in range(_NUM_SAMPLES):
                    file.seek(size * place // _NUM_SAMPLES)
                    digest.update(file.read(_SAMPLE_BYTES))
        return digest.digest()

    def _weight_files(self) -> Sequence[Path]:
        assert self.path is not None, "weights without a file need an identity of their own"
        return sorted(self.path.glob("*.safetensors")) if self.path.is_dir() else [self.path]

    @property
    def num_bytes(self) -> int:
        """Size of all tensors in the file or files."""
        return sum(info.num_bytes for info in self.index.values())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every tensor in turn; the caller decides how long each one stays in memory."""
        for name in self.index:
            yield name, self.read(name)

    @abstractmethod
    def read(self, name: str, *, device: torch.device | str = "cpu") -> Tensor:
        """Read one tensor into new memory.

        `device` is where the tensor will be used. Files are read to the CPU in any case; dummy weights are generated on
        `device`.
        """

    def read_part(self, name: str, dim: int, part: range, *, device: torch.device | str = "cpu") -> Tensor:
        """Some rows (`dim` 0) or columns (1) of a tensor. The default reads the whole tensor and drops the rest."""
        return self.read(name, device=device).narrow(dim, part.start, len(part)).clone()

    def read_weight(self, name: str, *, device: torch.device | str = "cpu") -> Weight:
        """The weight of a linear layer: codes and scales if it is stored so, otherwise what `read` returns."""
        return self.read(name, device=device)

    @abstractmethod
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that came with the weights, if one did."""
