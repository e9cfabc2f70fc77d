"""The embedded model's file with its tokenizer and a corner of its weights: for tests of what does not depend on what a
model says, at a tenth of its cost."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from headway.loader.embedded import embedded_model_path
from headway.loader.gguf_file import Q4_1, Q8_0, GGUFFile, GGUFType

NUM_LAYERS = 2
SIZES = {576: 192, 1536: 256}
"""Of the model -> of its cut: three heads, each with keys of its own."""
METADATA = {"block_count": NUM_LAYERS, "embedding_length": 192, "feed_forward_length": 256, "attention.head_count": 3}
SCALES = {"token_embd": 0.05, "attn_q": 3.0, "attn_v": 2.0, "output_norm": 40.0}
"""Next to the embedding of the last token, which would choose itself again, all that it attends to matters."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def write_cut_model(folder: Path) -> Path:
    """Types, metadata and tokenizer stay as they are: only numbers in the header differ."""
    whole = GGUFFile(embedded_model_path())
    names = [name for name in whole.tensors if not name.startswith("blk.") or int(name.split(".")[1]) < NUM_LAYERS]
    beginning = whole.path.read_bytes()[: min(tensor.offset for tensor in whole.tensors.values())]
    header = bytearray(beginning[: beginning.index(_string("token_embd.weight"))])
    struct.pack_into("<Q", header, 8, len(names))
    for key, value in METADATA.items():
        place = header.index(_string(f"llama.{key}")) + len(_string(f"llama.{key}"))
        struct.pack_into("<I", header, place + 4, value)
    directory, data = b"", b""
    for name in names:
        tensor = whole.tensors[name]
        shape = [SIZES.get(size, size) for size in tensor.shape]
        part = whole.read(name)[: shape[0] if len(shape) == 2 else 1]
        part = part[:, : shape[-1] // tensor.type.block_size * tensor.type.block_bytes]
        directory += _string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        directory += struct.pack("<IQ", tensor.type.id, len(data))
        data += _padded(_scaled(part, tensor.type, SCALES.get(name.split(".")[-2], 1.0)))
    path = folder / "cut.gguf"
    path.write_bytes(_padded(bytes(header) + directory) + data)
    return path


def _scaled(part: Bytes, kind: GGUFType, factor: float) -> bytes:
    """A block begins with its scale, and Q4_1's with its offset, too."""
    floats, size = {Q8_0: (np.float16, 2), Q4_1: (np.float16, 4)}.get(kind, (np.float32, kind.block_bytes))
    blocks = part.reshape(-1, kind.block_bytes).copy()
    blocks[:, :size] = (blocks[:, :size].copy().view(floats) * floats(factor)).view(np.uint8)
    return blocks.tobytes()


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 32)
