"""Quantised Hugging Face checkpoints: the numbers that they stand for, the tokens of transformers with these numbers,
and what broken ones are told.

The checkpoints are written here as the formats are published.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.triton_device import DEVICE, ON_GPU, choose  # isort: split

from headway import LLM, SamplingParams
from headway.errors import CorruptModelError, UnsupportedModelError
from headway.layers.quantized_weight import dequantised
from headway.loader import open_checkpoint
from tests.unit.models.tiny import hf_model, save_folder, save_gguf

Written = tuple[dict[str, Tensor], Tensor]
"""The tensors of a layer by the ends of their names, and the weight that they stand for."""
GROUP = 32
TENSOR = (10**6, 10**6)
"""A tile that has all of a weight."""


def codes_of(weight: Tensor, low: int, high: int) -> Tensor:
    """Random codes: what matters is how they are stored."""
    return torch.randint(low, high + 1, weight.shape)


def scales_of(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return (torch.rand(shape) * 0.02 + 0.002).to(dtype)


def words(codes: Tensor, bits: int, *, dim: int, order: Sequence[int] | None = None) -> Tensor:
    """Neighbours along a dimension side by side in words of 32 bits, the first in the lowest; or in another order."""
    neighbours = codes.long().movedim(dim, -1).unflatten(-1, (-1, 32 // bits))
    places = torch.arange(0, 32, bits)
    return (neighbours[..., order or slice(None)] << places).sum(-1).to(torch.int32).movedim(-1, dim).contiguous()


def by_group(codes: Tensor, zeros: Tensor | None, scales: Tensor, groups: Tensor) -> Tensor:
    """(code - zero) × scale in float32."""
    moved = codes.float() if zeros is None else codes.float() - zeros[:, groups].float()
    return moved * scales[:, groups].float()


def groups_of(weight: Tensor) -> Tensor:
    return torch.arange(weight.shape[1]) // GROUP


def gptq(weight: Tensor, *, bits: int = 4, v2: bool = False, shuffled: bool = False) -> Written:
    codes, groups = codes_of(weight, 0, 2**bits - 1), groups_of(weight)
    zeros = codes_of(weight[:, ::GROUP], 1, 2**bits - 1)
    scales = scales_of(*zeros.shape)
    if shuffled:
        groups = groups[torch.randperm(len(groups))]
    parts = {
        "qweight": words(codes.t(), bits, dim=0),
        "qzeros": words(zeros.t() - (0 if v2 else 1), bits, dim=1),
        "scales": scales.t().contiguous(),
        "g_idx": groups.int(),
    }
    return parts, by_group(codes, zeros, scales, groups)


def awq(weight: Tensor) -> Written:
    codes, zeros, order = codes_of(weight, 0, 15), codes_of(weight[:, ::GROUP], 0, 15), [0, 2, 4, 6, 1, 3, 5, 7]
    scales = scales_of(*zeros.shape)
    parts = {
        "qweight": words(codes.t(), 4, dim=1, order=order),
        "qzeros": words(zeros.t(), 4, dim=1, order=order),
        "scales": scales.t().contiguous(),
    }
    return parts, by_group(codes, zeros, scales, groups_of(weight))


def packed(weight: Tensor, *, bits: int = 4, zeros: bool = False) -> Written:
    middle = 2 ** (bits - 1)
    codes = codes_of(weight, -middle, middle - 1)
    scales = scales_of(len(weight), weight.shape[1] // GROUP, dtype=torch.bfloat16)
    parts = {
        "weight_packed": words(codes + middle, bits, dim=1),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    points = codes_of(scales, -middle, middle - 1) if zeros else None
    if points is not None:
        parts["weight_zero_point"] = words(points + middle, bits, dim=0)
    return parts, by_group(codes, points, scales, groups_of(weight))


def int8_rows(weight: Tensor, *, zeros: bool = False) -> Written:
    codes, scales = codes_of(weight, -127, 127), scales_of(len(weight), 1, dtype=torch.bfloat16)
    parts = {"weight": codes.char(), "weight_scale": scales}
    if zeros:
        parts["weight_zero_point"] = torch.zeros_like(scales, dtype=torch.int8)
    return parts, by_group(codes, None, scales, groups_of(weight) * 0)


def one_zero_point(weight: Tensor) -> Written:
    codes, scale, zero = codes_of(weight, -128, 127), torch.tensor([0.01]), torch.tensor([-17], dtype=torch.int8)
    parts = {"weight_packed": words(codes + 128, 8, dim=1), "weight_scale": scale, "weight_zero_point": zero}
    return parts, (codes.float() - zero) * scale


def fp8(weight: Tensor, *, tile: tuple[int, int], name: str = "weight_scale") -> Written:
    codes = (torch.randn(weight.shape) * 3).to(torch.float8_e4m3fn)
    (outputs, inputs), (height, width) = weight.shape, tile
    scales = scales_of(-(-outputs // height), -(-inputs // width), dtype=torch.float32)
    found = codes.float() * scales[torch.arange(outputs) // height][:, torch.arange(inputs) // width]
    stored = scales.reshape(()) if tile == TENSOR else scales
    return {"weight": codes, name: stored, "input_scale": torch.tensor(1.0)}, found


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"dynamic": False, "symmetric": True, **weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
GROUPS = {"type": "int", "strategy": "group", "group_size": GROUP}
CHANNEL = {"num_bits": 8, "strategy": "channel"}
BLOCKS = partial(fp8, tile=(48, 40))
FORMATS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Written]]] = {
    "gptq": (GPTQ | {"sym": False}, gptq),
    "gptq 8 bits": (GPTQ | {"bits": 8}, partial(gptq, bits=8)),
    "gptq v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, partial(gptq, v2=True)),
    "gptq desc_act": (GPTQ | {"desc_act": True}, partial(gptq, shuffled=True)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}, awq),
    "int4": (compressed("pack-quantized", num_bits=4, **GROUPS), packed),
    "int4 with zeros": (
        compressed("pack-quantized", num_bits=4, symmetric=False, **GROUPS),
        partial(packed, zeros=True),
    ),
    "packed int8": (compressed("pack-quantized", num_bits=8, **GROUPS), partial(packed, bits=8)),
    "int8": (compressed("int-quantized", type="int", **CHANNEL), int8_rows),
    "fp8 rows": (compressed("float-quantized", type="float", **CHANNEL), partial(fp8, tile=(1, 10**6))),
    "fp8 tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, partial(fp8, tile=TENSOR)),
    "fp8 blocks": (
        {"quant_method": "fp8", "weight_block_size": [48, 40]},
        partial(BLOCKS, name="weight_scale_inv"),
    ),
    "fp8 blocks of compressed-tensors": (
        compressed("float-quantized", type="float", num_bits=8, strategy="block", block_structure=[48, 40]),
        BLOCKS,
    ),
}

SPELLINGS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Written]]] = {
    "a zero point for the tensor": (
        compressed("pack-quantized", num_bits=8, type="int", strategy="tensor", symmetric=False),
        one_zero_point,
    ),
    "the library's defaults": (compressed("pack-quantized", num_bits=4, group_size=GROUP), packed),
    "the group's own format": (
        {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "config_groups": {"g": {"targets": ["Linear"], "format": "int-quantized", "weights": {"group_size": -1}}},
        },
        int8_rows,
    ),
    "symmetric, with zeros stored": (compressed("int-quantized", **CHANNEL), partial(int8_rows, zeros=True)),
    "one scale under the name of blocks": (
        {"quant_method": "fp8", "weight_block_size": None},
        partial(fp8, tile=TENSOR, name="weight_scale_inv"),
    ),
    "blocks of the default size": (
        {"quant_method": "fp8"},
        partial(fp8, tile=(128, 128), name="weight_scale_inv"),
    ),
}
"""Other ways to say what a format of the list above says."""


def write(name: str, folder: Path, family: str = "llama_biased") -> tuple[Path, Any]:
    """A folder in a format, all layers of the decoder quantised but one, and a model with what it stands for."""
    config, quantise = (FORMATS | SPELLINGS)[name]
    model = hf_model(family, seed=1)
    save_folder(model, folder)
    tensors = load_file(folder / "model.safetensors")
    weights = model.state_dict()
    for key in list(tensors):
        if ".layers." in key and tensors[key].dim() == 2 and "layers.1.mlp.down_proj" not in key:
            parts, stands_for = quantise(tensors.pop(key))
            tensors |= {f"{key.removesuffix('weight')}{end}": part for end, part in parts.items()}
            weights[key] = stands_for
    model.load_state_dict(weights)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    set_quantization(folder, config)
    return folder, model


def set_quantization(folder: Path, config: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))


GGUF_TYPES = ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "Q4_K and Q6_K"]


def write_gguf(types: str, path: Path) -> tuple[Path, Any]:
    """A file of random blocks, and a model with what they stand for. Of two types: the second for values and down."""
    first, _, second = types.partition(" and ")
    # In the order of "llama" rows of queries and keys are moved, as they are stored.
    family, architecture = ("llama_tied", "llama") if types in ("Q4_0", "Q8_0") else ("qwen3", "qwen3")
    model = hf_model(family, hidden_size=256, intermediate_size=256, head_dim=64)
    rng, weights, blocks = np.random.default_rng(3), model.state_dict(), {}
    for name, weight in weights.items():
        if weight.dim() == 2:
            is_second = second and any(part in name for part in ("v_proj", "down_proj", "embed"))
            kind = gguf.GGMLQuantizationType[second if is_second else first]
            data = random_blocks(kind, weight.shape[0], weight.shape[1], rng)
            blocks[name] = (data, kind)
            weights[name] = torch.from_numpy(gguf.quants.dequantize(data, kind))
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)
    return save_gguf(model, path / "model.gguf", architecture=architecture, blocks=blocks), model


def random_blocks(
    kind: gguf.GGMLQuantizationType, rows: int, columns: int, rng: np.random.Generator
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes as they come, but for the scales of blocks."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    data = rng.integers(0, 256, (rows, columns // block_size, block_bytes), dtype=np.uint8)
    largest = {"Q8_0": 127, "Q4_K": 63 * 15, "Q6_K": 127 * 32}.get(kind.name, 15)
    scales = ((rng.random((rows, columns // block_size, 2)) + 0.5) * 0.3 / largest).astype(np.float16)
    if kind.name in ("Q4_1", "Q4_K"):
        scales[:, :, 1] *= np.float16(-8 if kind.name == "Q4_1" else 7)
        data[:, :, :4] = scales.view(np.uint8)
    else:
        at = 208 if kind.name == "Q6_K" else 0
        data[:, :, at : at + 2] = scales[:, :, :1].copy().view(np.uint8)
    return data.reshape(rows, -1)


PROMPTS = [[5, 9, 17, 3], [8], [4, 4, 70, 2, 33, 61, 7, 12, 90]]
# Too few blocks for all, and prompts in chunks.
SMALL: dict[str, Any] = {"num_kv_blocks": 12, "block_size": 4, "max_num_batched_tokens": 6}


def assert_greedy_tokens(path: Path, model: Any, num_tokens: int = 12, **options: Any) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    llm = LLM(str(path), dtype="float32", max_model_len=32, max_num_seqs=4, **options)
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params, use_tqdm=False), strict=True):
        with torch.inference_mode():
            made = model.generate(
                torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        assert list(output.outputs[0].token_ids) == made[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", choose([*FORMATS, *GGUF_TYPES], "gptq desc_act", "awq", "fp8 blocks", "Q4_K and Q6_K"))
def test_tokens_with_weights_that_stay_codes(name: str, tmp_path: Path) -> None:
    """On a GPU, or its kernels in the interpreter; there less of it, since it is slow."""
    path, model = write_gguf(name, tmp_path) if name in GGUF_TYPES else write(name, tmp_path)
    options = {"attention_backend": "triton", "device": DEVICE.type}
    if ON_GPU:
        assert_greedy_tokens(path, model, num_kv_blocks=64, block_size=16, **options)
    assert_greedy_tokens(path, model, num_tokens=12 if ON_GPU else 2, **SMALL, **options)


@pytest.mark.skipif(ON_GPU, reason="gloo is for the CPU")
def test_two_ranks_give_the_tokens_of_one(tmp_path: Path) -> None:
    """With the GPU's kernels, in the interpreter, which threads cannot share: processes. One layer is floats."""
    path, _ = write("fp8 rows", tmp_path)
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=3, ignore_eos=True, detokenize=False)
    limits: dict[str, Any] = {"max_model_len": 16, "max_num_seqs": 2, "num_kv_blocks": 4}
    found = []
    for ranks in ({}, {"tensor_parallel_size": 2, "collectives": "gloo"}):
        llm = LLM(str(path), dtype="float32", attention_backend="triton", device="cpu", **limits, **ranks)
        outputs = llm.generate([[5, 9, 17], [8]], params, use_tqdm=False)
        found.append([list(output.outputs[0].token_ids) for output in outputs])
        llm.shutdown()
    assert found[0] == found[1]


@pytest.mark.parametrize("name", [*FORMATS, *SPELLINGS, *GGUF_TYPES])
def test_the_numbers_and_the_tokens(name: str, tmp_path: Path) -> None:
    path, model = write_gguf(name, tmp_path) if name in GGUF_TYPES else write(name, tmp_path)
    checkpoint = open_checkpoint(path)
    expected = model.state_dict()
    for key in checkpoint.quantized:
        assert torch.equal(dequantised(checkpoint.read_weight(key)), expected[key]), key
    assert checkpoint.num_bytes < sum(tensor.nbytes for tensor in expected.values())
    if name not in GGUF_TYPES:
        assert set(checkpoint.index) == set(expected)
        for key, tensor in checkpoint.tensors():
            assert torch.equal(tensor, expected[key]), key
    if name not in SPELLINGS:
        assert_greedy_tokens(path, model, **SMALL)


LAYER = "model.layers.0.self_attn.q_proj"
DAMAGES: list[tuple[str, Callable[[dict[str, Tensor]], object], str]] = [
    ("int4", lambda t: t["weight_scale"].view(-1)[3:4].fill_(float("nan")), "weight_scale has values"),
    ("awq", lambda t: t["scales"].view(-1)[3:4].zero_(), "scales has a scale of 0"),
    ("int4", lambda t: t.pop("weight_scale"), "weight_scale is missing"),
    ("gptq", lambda t: t.pop("qzeros"), "qzeros is missing"),
    ("gptq desc_act", lambda t: t.pop("g_idx"), "g_idx is missing"),
    ("int4 with zeros", lambda t: t.pop("weight_zero_point"), "weight_zero_point is missing"),
    ("int8", lambda t: t.pop("weight_scale"), "weight_scale is missing"),
    ("int8", lambda t: t.pop("weight"), "weight is missing"),
    ("int8", lambda t: t.update(weight_scale=torch.ones(1)), r"weight_scale is \[1, 1\]"),
    ("int8", lambda t: t.update(weight_scale=torch.ones(5, 1)), r"weight_scale is \[5, 1\]"),
    ("int8", lambda t: t.update(weight_zero_point=torch.ones(64, 1, dtype=torch.int8)), "weight_zero_point is not 0"),
    ("gptq", lambda t: t["g_idx"][5:6].fill_(64 // GROUP), "g_idx names a group that is not there"),
    ("awq", lambda t: t.update(qweight=t["qweight"][1:].clone()), r"qweight is \[63, 8\]"),
    ("int4", lambda t: t["weight_shape"][0:1].fill_(3), "weight_shape is not"),
    ("fp8 rows", lambda t: t.update(weight=t["weight"].to(torch.float8_e5m2)), "F8_E5M2"),
    ("int8", lambda t: t.update(weight=t["weight"].to(torch.float8_e4m3fn)), "not torch.int8"),
    ("fp8 rows", lambda t: t.update(weight=t["weight"].char()), "not torch.float8_e4m3fn"),
    ("fp8 blocks", lambda t: t.update(weight_scale_inv=torch.ones(1, 1)), "implies"),
]


@pytest.mark.parametrize(("name", "damage", "message"), DAMAGES)
def test_what_cannot_be_right_is_refused_with_the_tensors_name(
    name: str, damage: Callable[[dict[str, Tensor]], object], message: str, tmp_path: Path
) -> None:
    folder, _ = write(name, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    parts = {key.removeprefix(f"{LAYER}."): tensors.pop(key) for key in list(tensors) if key.startswith(f"{LAYER}.")}
    damage(parts)
    save_file(tensors | {f"{LAYER}.{end}": part for end, part in parts.items()}, folder / "model.safetensors")
    with pytest.raises((CorruptModelError, UnsupportedModelError), match=message) as caught:
        LLM(str(folder), dtype="float32")
    assert LAYER in str(caught.value)


def test_a_quantised_output_layer_beside_a_tied_embedding_is_used(tmp_path: Path) -> None:
    folder, _ = write("int8", tmp_path, family="llama_tied")
    tensors = load_file(folder / "model.safetensors")
    parts, stands_for = int8_rows(tensors["model.embed_tokens.weight"])
    save_file(tensors | {f"lm_head.{end}": part for end, part in parts.items()}, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    assert not checkpoint.config.tie_embeddings
    assert torch.equal(checkpoint.read("lm_head.weight"), stands_for)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("gptq", FORMATS["gptq"][0] | {"group_size": 48}, "64 inputs, which groups of 48 do not divide"),
        ("int8", FORMATS["int8"][0] | {"transform_config": {"config_groups": {"R4": 1}}}, "'transform_config' is"),
        (None, [], "'quantization_config' is no object"),
        (None, [1], "'quantization_config' is no object"),
        (None, "gptq", "'quantization_config' is no object"),
        (None, 0, "'quantization_config' is no object"),
        (None, FORMATS["awq"][0], "but no tensor of it is"),
    ],
)
def test_configurations_that_are_refused(name: str | None, config: object, message: str, tmp_path: Path) -> None:
    """Those of `test_quantization_config.py` too; and such as do not fit the tensors."""
    folder = save_folder(hf_model("llama"), tmp_path) if name is None else write(name, tmp_path)[0]
    set_quantization(folder, config)
    with pytest.raises((CorruptModelError, UnsupportedModelError), match=message):
        LLM(str(folder), dtype="float32")
