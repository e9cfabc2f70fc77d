"""GGUF: a round trip keeps the logits, every type reads as the gguf package reads it, damage is named."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf.quants import dequantize as gguf_dequantize

from headway.errors import (
    CorruptModelError,
    MissingTensorError,
    ModelNotFoundError,
    TensorShapeError,
    UnsupportedModelError,
)
from headway.layers.ops import TorchOps
from headway.loader import open_checkpoint
from headway.loader.gguf_file import GGUFFile
from headway.models import Decoder, load_decoder
from headway.models.assembly import scaled_frequencies
from tests.unit.models.harness import Harness
from tests.unit.models.tiny import LLAMA3_ROPE, YARN_ROPE, hf_logits, hf_model, random_prompt, save_gguf

Type = gguf.GGMLQuantizationType
Metadata = dict[str, tuple[str, Any]]


def load(path: Path) -> Decoder:
    return load_decoder(open_checkpoint(path), ops=TorchOps())


def assert_same_logits(path: Path, model: Any) -> None:
    prompt = random_prompt(40)
    logits = Harness(load(path)).prompt_logits(prompt)
    torch.testing.assert_close(logits, hf_logits(model, prompt), atol=1e-5, rtol=1e-5)


def scaling(kind: str, factor: float | str | None = None, original: int | None = None, **more: float) -> Metadata:
    """Of rotary positions, as a file of llama.cpp says it."""
    values: Metadata = {"type": ("string", kind)}
    if factor is not None:
        values["factor"] = ("string" if isinstance(factor, str) else "float32", factor)
    if original is not None:
        values["original_context_length"] = ("uint32", original)
    values |= {key: ("float32", value) for key, value in more.items()}
    return {f"llama.rope.scaling.{key}": value for key, value in values.items()}


@pytest.mark.parametrize(
    ("family", "architecture", "metadata"),
    [
        ("llama", "llama", {}),
        ("llama_tied", "llama", {}),
        ("llama_biased", "llama", {}),
        ("llama_linear", "llama", scaling("linear", 4.0)),
        ("llama_yarn", "llama", scaling("yarn", YARN_ROPE["factor"], 64)),
        ("mistral", "llama", {}),
        ("qwen2", "qwen2", {}),
        ("qwen3", "qwen3", {}),
    ],
)
def test_round_trip(tmp_path: Path, family: str, architecture: str, metadata: Metadata) -> None:
    model = hf_model(family)
    path = save_gguf(model, tmp_path / "model.gguf", architecture=architecture, metadata=metadata)
    assert_same_logits(path, model)
    assert open_checkpoint(path).config.tie_embeddings == model.config.tie_word_embeddings


@pytest.mark.parametrize(
    ("metadata", "attribute", "value"),
    [
        # 4 times the original 64 is what the file declares too; of 256 the context becomes four times that.
        (scaling("yarn", 4.0, 64), "max_position", 256),
        (scaling("yarn", 4.0, 256), "max_position", 1024),
        (scaling("yarn", 4.0), "max_position", 1024),
        ({"llama.attention.sliding_window": ("uint32", 64)}, "max_position", 64),
        ({"general.file_type": ("uint32", 0)}, "torch_dtype", "float32"),
        ({"general.file_type": ("uint32", 1)}, "torch_dtype", "float16"),
        ({"general.file_type": ("uint32", 3)}, "torch_dtype", "bfloat16"),
        ({"general.file_type": ("uint32", 32)}, "torch_dtype", "bfloat16"),
    ],
)
def test_what_metadata_means(tmp_path: Path, metadata: Metadata, attribute: str, value: object) -> None:
    path = save_gguf(hf_model("llama"), tmp_path / "model.gguf", metadata=metadata)
    assert getattr(open_checkpoint(path).config, attribute) == value


def test_rope_factors_tensor_is_llama3_scaling(tmp_path: Path) -> None:
    model = hf_model("llama", rope_parameters=LLAMA3_ROPE)
    plain = 1.0 / 10000.0 ** (torch.arange(0, 16, 2, dtype=torch.float32) / 16)
    factors = (plain / model.model.rotary_emb.inv_freq).numpy()
    assert factors.max() > 2
    path = save_gguf(model, tmp_path / "model.gguf", extra_tensors={"rope_freqs.weight": factors})
    rope = open_checkpoint(path).config.rope
    torch.testing.assert_close(scaled_frequencies(rope, 16), model.model.rotary_emb.inv_freq)
    assert_same_logits(path, model)


# Types with another block size or table each; random bytes are valid data in all of them.
@pytest.mark.parametrize(
    "kind",
    [
        Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K,
        Type.IQ4_NL, Type.IQ4_XS, Type.IQ2_XXS, Type.IQ3_S, Type.IQ1_M, Type.TQ1_0, Type.TQ2_0, Type.MXFP4, Type.F16,
        Type.BF16,
    ],
)  # fmt: skip
def test_every_type_reads_as_the_gguf_package_reads_it(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    model = hf_model("llama", intermediate_size=256)
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 255, (64, 256 // block_size * block_bytes), dtype=np.uint8)
    name = "model.layers.0.mlp.down_proj.weight"
    path = save_gguf(model, tmp_path / "model.gguf", blocks={name: (raw, kind)})
    with np.errstate(all="ignore"):
        tensor = open_checkpoint(path).read(name).float().numpy()
        expected = gguf_dequantize(raw, kind)
    np.testing.assert_allclose(tensor, expected, rtol=1e-6, equal_nan=True)


def test_metadata_is_what_the_gguf_package_reads(tmp_path: Path) -> None:
    values: Metadata = {
        "a.bool": ("bool", True),
        "a.int8": ("int8", -3),
        "a.uint64": ("uint64", 2**60),
        "a.float64": ("float64", 0.1),
        "a.text": ("string", "häuser 🚄"),
        "a.empty": ("string", ""),
        "a.integers": ("array", [1, -2, 3]),
        "a.floats": ("array", [0.5, 1.5]),
        "a.words": ("array", ["", "two", "drei €"]),
    }
    path = save_gguf(hf_model("llama"), tmp_path / "model.gguf", metadata=values)
    ours = GGUFFile(path)
    library = gguf.GGUFReader(path)
    theirs = {key: field.contents() for key, field in library.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == theirs
    assert list(ours.tensors) == [tensor.name for tensor in library.tensors]
    for tensor in library.tensors:
        mine = ours.tensors[tensor.name]
        assert (mine.offset, mine.num_bytes) == (tensor.data_offset, tensor.n_bytes)


NAN_FACTOR = np.where(np.arange(8) == 2, np.nan, 1).astype(np.float32)
NORM = "blk.0.attn_norm.weight"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"architecture": "mamba"},
            UnsupportedModelError,
            "'mamba' is not supported; supported are llama, qwen2, qwen3",
        ),
        ({"metadata": {"llama.expert_count": ("uint32", 8)}}, UnsupportedModelError, "mixture-of-experts"),
        ({"metadata": {"split.count": ("uint16", 3)}}, UnsupportedModelError, "one part of a split"),
        ({"metadata": scaling("longrope")}, UnsupportedModelError, "'longrope'"),
        ({"metadata": scaling("yarn", 4.0, yarn_ext_factor=0.5)}, UnsupportedModelError, "yarn_ext_factor"),
        ({"metadata": scaling("linear", "x")}, CorruptModelError, "'factor' is 'x'"),
        ({"metadata": {"llama.rope.dimension_count": ("uint32", 8)}}, UnsupportedModelError, "rotating only 8"),
        ({"skip_tensors": ("token_embd.weight",)}, MissingTensorError, "token_embd"),
        ({"skip_tensors": ("blk.1.ffn_up.weight",)}, MissingTensorError, r"layers\.1\.mlp\.up_proj"),
        ({"skip_tensors": ("output_norm.weight",)}, MissingTensorError, r"model\.norm\.weight"),
        ({"architecture": "qwen3"}, MissingTensorError, "q_norm"),
        ({"extra_tensors": {"rope_freqs.weight": NAN_FACTOR}}, CorruptModelError, r"rope_freqs\.weight"),
        (
            {"skip_tensors": (NORM,), "extra_tensors": {NORM: np.ones(32, dtype=np.float32)}},
            TensorShapeError,
            r"input_layernorm\.weight is \[32\]",
        ),
    ],
)
def test_refusals(tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str) -> None:
    path = save_gguf(hf_model("llama"), tmp_path / "model.gguf", **options)
    with pytest.raises(error, match=message):
        load(path)


@pytest.mark.parametrize("key", ["embedding_length", "attention.head_count", "block_count", "context_length"])
@pytest.mark.parametrize("value", [0, "text", [1, 2]])
def test_nonsense_in_the_metadata_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: Any
) -> None:
    path = save_gguf(hf_model("llama"), tmp_path / "model.gguf")
    parse = GGUFFile._parse

    def parse_and_spoil(file: GGUFFile, cursor: Any) -> None:
        parse(file, cursor)
        file.metadata[f"llama.{key}"] = value

    monkeypatch.setattr(GGUFFile, "_parse", parse_and_spoil)
    with pytest.raises(CorruptModelError, match=re.escape(f"'{key}' is {value!r}")):
        open_checkpoint(path)


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return save_gguf(hf_model("llama"), tmp_path_factory.mktemp("gguf") / "model.gguf").read_bytes()


def _lfs_pointer(_: bytes) -> bytes:
    return b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda data: b"", CorruptModelError, "only 0 bytes"),
        (lambda data: data[:100], CorruptModelError, "truncated: the file ends inside its header"),
        (lambda data: data[:-1000], CorruptModelError, "is truncated: tensor"),
        (lambda data: b"GGML" + data[4:], CorruptModelError, "is not a GGUF file: it begins with b'GGML'"),
        (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], UnsupportedModelError, "GGUF version 1"),
        (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], UnsupportedModelError, "big-endian"),
        (lambda data: data[:16] + struct.pack("<Q", 2**63) + data[24:], CorruptModelError, "header"),
        (lambda data: data[:24] + struct.pack("<Q", 2**63) + data[32:], CorruptModelError, "header"),
        (lambda data: data.replace(b"\xc3\xa9", b"\xff\xff", 1), CorruptModelError, "not UTF-8"),
        (_lfs_pointer, CorruptModelError, "git lfs pull"),
    ],
)
def test_damaged_file(
    tmp_path: Path, intact: bytes, damage: Callable[[bytes], bytes], error: type[Exception], message: str
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(damage(intact))
    with pytest.raises(error, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


def test_any_truncation_is_an_error_and_never_a_crash(tmp_path: Path, intact: bytes) -> None:
    path = tmp_path / "model.gguf"
    for size in range(0, len(intact) - 32, 997):
        path.write_bytes(intact[:size])
        with pytest.raises(CorruptModelError):
            open_checkpoint(path)


def test_random_damage_to_the_header_is_a_typed_error_or_harmless(tmp_path: Path, intact: bytes) -> None:
    path = tmp_path / "model.gguf"
    generator = np.random.default_rng(0)
    for _ in range(100):
        data = bytearray(intact)
        for position in generator.integers(4, 4000, 4):
            data[position] = generator.integers(0, 256)
        path.write_bytes(data)
        try:
            open_checkpoint(path)
        except (CorruptModelError, UnsupportedModelError, MissingTensorError):
            pass


def test_folder_with_one_gguf_file_and_load_format(tmp_path: Path) -> None:
    path = save_gguf(hf_model("llama"), tmp_path / "model.gguf")
    assert open_checkpoint(tmp_path).path == open_checkpoint(path, "gguf").path == path
    with pytest.raises(ModelNotFoundError, match="is a GGUF file, but load_format is 'safetensors'"):
        open_checkpoint(path, "safetensors")
    (tmp_path / "other.gguf").write_bytes(path.read_bytes())
    with pytest.raises(ModelNotFoundError, match=r"several GGUF files.*model\.gguf, other\.gguf"):
        open_checkpoint(tmp_path)


def test_llama_tensors_are_stored_rotated_in_pairs(tmp_path: Path) -> None:
    """Guards the test helper: without the permutation the file would not be one llama.cpp can use."""
    model: transformers.LlamaForCausalLM = hf_model("llama")
    stored = GGUFFile(save_gguf(model, tmp_path / "model.gguf")).read("blk.0.attn_q.weight").view(np.float32)
    original = model.model.layers[0].self_attn.q_proj.weight.detach().numpy()
    np.testing.assert_array_equal(stored[1], original[8])
    np.testing.assert_array_equal(stored[2], original[1])
