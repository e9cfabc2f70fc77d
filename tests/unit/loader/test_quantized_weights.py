"""Quantised Hugging Face checkpoints: the numbers that they stand for, the tokens of transformers with these numbers,
and what broken ones are told.

The checkpoints are written here, element by element, as the formats are published.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.triton_device import DEVICE, ON_GPU  # isort: split

from headway import LLM, SamplingParams
from headway.errors import CorruptModelError, UnsupportedModelError
from headway.layers.quantized_weight import dequantised
from headway.loader import open_checkpoint
from tests.unit.models.tiny import hf_model, save_folder, save_gguf

Written = tuple[dict[str, Tensor], Tensor]
"""The tensors of a layer by the ends of their names, and the weight that they stand for."""
GROUP = 32


def codes_of(weight: Tensor, rng: random.Random, low: int, high: int) -> list[list[int]]:
    """Random codes: what matters is how they are stored."""
    return [[rng.randint(low, high) for _ in range(weight.shape[1])] for _ in range(weight.shape[0])]


def scales_of(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return (torch.rand(shape) * 0.02 + 0.002).to(dtype)


def as_int32(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def by_group(codes: list[list[int]], zeros: Tensor | None, scales: Tensor, groups: list[int]) -> Tensor:
    """(code - zero) × scale in float32."""
    moved = torch.tensor(codes).float()
    if zeros is not None:
        moved -= zeros[:, groups].float()
    return moved * scales[:, groups].float()


def gptq(weight: Tensor, rng: random.Random, *, bits: int = 4, v2: bool = False, shuffled: bool = False) -> Written:
    outputs, inputs = weight.shape
    per_word, num_groups = 32 // bits, inputs // GROUP
    codes = codes_of(weight, rng, 0, 2**bits - 1)
    zeros = torch.tensor([[rng.randint(1, 2**bits - 1) for _ in range(num_groups)] for _ in range(outputs)])
    scales = scales_of(outputs, num_groups)
    groups = [column // GROUP for column in range(inputs)]
    if shuffled:
        rng.shuffle(groups)
    qweight = torch.zeros(inputs // per_word, outputs, dtype=torch.int32)
    for word in range(inputs // per_word):
        for row in range(outputs):
            packed = sum(codes[row][word * per_word + place] << (bits * place) for place in range(per_word))
            qweight[word, row] = as_int32(packed)
    qzeros = torch.zeros(num_groups, outputs // per_word, dtype=torch.int32)
    for group in range(num_groups):
        for word in range(outputs // per_word):
            stored = [int(zeros[word * per_word + place, group]) - (not v2) for place in range(per_word)]
            qzeros[group, word] = as_int32(sum(zero << (bits * place) for place, zero in enumerate(stored)))
    parts = {"qweight": qweight, "qzeros": qzeros, "scales": scales.t().contiguous()}
    parts["g_idx"] = torch.tensor(groups, dtype=torch.int32)
    return parts, by_group(codes, zeros, scales, groups)


def awq(weight: Tensor, rng: random.Random) -> Written:
    outputs, inputs = weight.shape
    num_groups, order = inputs // GROUP, [0, 2, 4, 6, 1, 3, 5, 7]
    codes = codes_of(weight, rng, 0, 15)
    zeros = torch.tensor([[rng.randint(0, 15) for _ in range(num_groups)] for _ in range(outputs)])
    scales = scales_of(outputs, num_groups)
    qweight = torch.zeros(inputs, outputs // 8, dtype=torch.int32)
    qzeros = torch.zeros(num_groups, outputs // 8, dtype=torch.int32)
    for word in range(outputs // 8):
        for column in range(inputs):
            packed = sum(codes[word * 8 + output][column] << (4 * place) for place, output in enumerate(order))
            qweight[column, word] = as_int32(packed)
        for group in range(num_groups):
            packed = sum(int(zeros[word * 8 + output, group]) << (4 * place) for place, output in enumerate(order))
            qzeros[group, word] = as_int32(packed)
    groups = [column // GROUP for column in range(inputs)]
    return {"qweight": qweight, "qzeros": qzeros, "scales": scales.t().contiguous()}, by_group(
        codes, zeros, scales, groups
    )


def packed(weight: Tensor, rng: random.Random, *, bits: int = 4, zeros: bool = False) -> Written:
    outputs, inputs = weight.shape
    per_word, num_groups, middle = 32 // bits, inputs // GROUP, 2 ** (bits - 1)
    codes = codes_of(weight, rng, -middle, middle - 1)
    scales = scales_of(outputs, num_groups, dtype=torch.bfloat16)
    words = torch.zeros(outputs, inputs // per_word, dtype=torch.int32)
    for row in range(outputs):
        for word in range(inputs // per_word):
            line = codes[row][word * per_word : (word + 1) * per_word]
            words[row, word] = as_int32(sum((code + middle) << (bits * place) for place, code in enumerate(line)))
    parts = {"weight_packed": words, "weight_scale": scales, "weight_shape": torch.tensor([outputs, inputs])}
    points = None
    if zeros:
        points = torch.tensor([[rng.randint(-middle, middle - 1) for _ in range(num_groups)] for _ in range(outputs)])
        stored = torch.zeros(outputs // per_word, num_groups, dtype=torch.int32)
        for word in range(outputs // per_word):
            for group in range(num_groups):
                own = [int(points[word * per_word + place, group]) + middle for place in range(per_word)]
                stored[word, group] = as_int32(sum(zero << (bits * place) for place, zero in enumerate(own)))
        parts["weight_zero_point"] = stored
    return parts, by_group(codes, points, scales, [column // GROUP for column in range(inputs)])


def int8_rows(weight: Tensor, rng: random.Random) -> Written:
    codes, scales = codes_of(weight, rng, -127, 127), scales_of(len(weight), 1, dtype=torch.bfloat16)
    found = by_group(codes, None, scales, [0] * weight.shape[1])
    return {"weight": torch.tensor(codes, dtype=torch.int8), "weight_scale": scales}, found


def fp8(weight: Tensor, rng: random.Random, *, per: str, name: str = "weight_scale") -> Written:
    codes = (torch.randn(weight.shape) * 3).to(torch.float8_e4m3fn)
    outputs, inputs = weight.shape
    height, width = {"tensor": (outputs, inputs), "row": (1, inputs), "block": (48, 40), "default block": (128, 128)}[
        per
    ]
    scales = scales_of(-(-outputs // height), -(-inputs // width), dtype=torch.float32)
    rows = [row // height for row in range(outputs)]
    found = codes.float() * scales[rows][:, [column // width for column in range(inputs)]]
    stored = scales.reshape(()) if per == "tensor" else scales
    return {"weight": codes, name: stored, "input_scale": torch.tensor(1.0)}, found


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"dynamic": False, "symmetric": True, **weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


GROUPS = {"type": "int", "strategy": "group", "group_size": GROUP}
FORMATS: dict[str, tuple[dict[str, Any], Callable[[Tensor, random.Random], Written]]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False}, gptq),
    "gptq 8 bits": ({"quant_method": "gptq", "bits": 8, "group_size": GROUP}, lambda w, r: gptq(w, r, bits=8)),
    "gptq v2": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
        lambda w, r: gptq(w, r, v2=True),
    ),
    "gptq desc_act": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True},
        lambda w, r: gptq(w, r, shuffled=True),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}, awq),
    "int4": (compressed("pack-quantized", num_bits=4, **GROUPS), packed),
    "int4 with zeros": (
        compressed("pack-quantized", num_bits=4, symmetric=False, **GROUPS),
        lambda w, r: packed(w, r, zeros=True),
    ),
    "packed int8": (compressed("pack-quantized", num_bits=8, **GROUPS), lambda w, r: packed(w, r, bits=8)),
    "int8": (compressed("int-quantized", type="int", num_bits=8, strategy="channel"), int8_rows),
    "fp8 rows": (
        compressed("float-quantized", type="float", num_bits=8, strategy="channel"),
        lambda w, r: fp8(w, r, per="row"),
    ),
    "fp8 tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, lambda w, r: fp8(w, r, per="tensor")),
    "fp8 blocks": (
        {"quant_method": "fp8", "weight_block_size": [48, 40]},
        lambda w, r: fp8(w, r, per="block", name="weight_scale_inv"),
    ),
    "fp8 blocks of compressed-tensors": (
        compressed("float-quantized", type="float", num_bits=8, strategy="block", block_structure=[48, 40]),
        lambda w, r: fp8(w, r, per="block"),
    ),
}

SPELLINGS: dict[str, tuple[dict[str, Any], Callable[[Tensor, random.Random], Written]]] = {
    "a zero point for the tensor": (
        compressed("pack-quantized", num_bits=8, type="int", strategy="tensor", symmetric=False),
        lambda w, r: one_zero_point(w, r),
    ),
    "the library's defaults": (compressed("pack-quantized", num_bits=4, group_size=GROUP), packed),
    "a preset": (
        {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"W8A8": ["Linear"]}},
        int8_rows,
    ),
    "the group's own format": (
        {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "config_groups": {"g": {"targets": ["Linear"], "format": "int-quantized", "weights": {"group_size": -1}}},
        },
        int8_rows,
    ),
    "symmetric, with zeros stored": (
        compressed("int-quantized", num_bits=8, strategy="channel"),
        lambda w, r: with_zeros(*int8_rows(w, r)),
    ),
    "former key of gptq v2": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "format": "gptq_v2"},
        lambda w, r: gptq(w, r, v2=True),
    ),
    "gptq leaves layers out": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "dynamic": {"-:.*layers.1.*": {}}},
        gptq,
    ),
    "one scale under the name of blocks": (
        {"quant_method": "fp8", "weight_block_size": None},
        lambda w, r: fp8(w, r, per="tensor", name="weight_scale_inv"),
    ),
    "blocks of the default size": (
        {"quant_method": "fp8"},
        lambda w, r: fp8(w, r, per="default block", name="weight_scale_inv"),
    ),
}
"""Other ways to say what a format of the list above says."""


def one_zero_point(weight: Tensor, rng: random.Random) -> Written:
    codes = torch.tensor(codes_of(weight, rng, -128, 127))
    scale, zero = torch.tensor([0.01]), torch.tensor([-17], dtype=torch.int8)
    places = torch.arange(4) * 8
    words = ((codes + 128).view(len(codes), -1, 4) << places).sum(-1)
    parts = {"weight_packed": words.to(torch.int32), "weight_scale": scale, "weight_zero_point": zero}
    return parts, (codes.float() - zero) * scale


def with_zeros(parts: dict[str, Tensor], stands_for: Tensor) -> Written:
    return parts | {"weight_zero_point": torch.zeros_like(parts["weight_scale"], dtype=torch.int8)}, stands_for


def write(name: str, folder: Path, family: str = "llama_biased") -> tuple[Path, Any]:
    """A folder in a format, all layers of the decoder quantised but one, and a model with what it stands for."""
    config, quantise = (FORMATS | SPELLINGS)[name]
    torch.manual_seed(1)
    rng, model = random.Random(1), hf_model(family)
    save_folder(model, folder)
    tensors = load_file(folder / "model.safetensors")
    weights = model.state_dict()
    for key in list(tensors):
        if ".layers." in key and tensors[key].dim() == 2 and "layers.1.mlp.down_proj" not in key:
            parts, stands_for = quantise(tensors.pop(key), rng)
            tensors |= {f"{key.removesuffix('weight')}{end}": part for end, part in parts.items()}
            weights[key] = stands_for
    model.load_state_dict(weights)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    return folder, model


GGUF_TYPES = ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "Q4_K and Q6_K"]


def write_gguf(types: str, path: Path) -> tuple[Path, Any]:
    """A file of random blocks, and a model with what they stand for. Of two types: the second for values and down."""
    first, _, second = types.partition(" and ")
    model = hf_model("qwen3", hidden_size=256, intermediate_size=256, head_dim=64)
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
    return save_gguf(model, path / "model.gguf", architecture="qwen3", blocks=blocks), model


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


# One of each layout that the kernels know.
LAYOUTS = ["gptq desc_act", "awq", "int4", "int8", "fp8 rows", "fp8 blocks", "Q4_1", "Q4_K and Q6_K"]


@pytest.mark.parametrize("name", [*FORMATS, *GGUF_TYPES] if ON_GPU else LAYOUTS)
def test_tokens_with_weights_that_stay_codes(name: str, tmp_path: Path) -> None:
    """On a GPU, or its kernels in the interpreter; there less of it, since it is slow."""
    path, model = write_gguf(name, tmp_path) if name in GGUF_TYPES else write(name, tmp_path)
    options = {"attention_backend": "triton", "device": DEVICE.type}
    if ON_GPU:
        assert_greedy_tokens(path, model, num_kv_blocks=64, block_size=16, **options)
    assert_greedy_tokens(path, model, num_tokens=12 if ON_GPU else 4, **SMALL, **options)


@pytest.mark.parametrize("types", GGUF_TYPES)
def test_numbers_and_tokens_of_gguf(types: str, tmp_path: Path) -> None:
    path, model = write_gguf(types, tmp_path)
    checkpoint = open_checkpoint(path)
    expected = model.state_dict()
    for key in checkpoint.quantized:
        assert torch.equal(dequantised(checkpoint.read_weight(key)), expected[key]), key
    assert_greedy_tokens(path, model, **SMALL)


@pytest.mark.parametrize("name", FORMATS)
def test_the_numbers_and_the_tokens(name: str, tmp_path: Path) -> None:
    folder, model = write(name, tmp_path)
    checkpoint = open_checkpoint(folder)
    expected = model.state_dict()
    assert set(checkpoint.index) == set(expected)
    for key, tensor in checkpoint.tensors():
        assert torch.equal(tensor, expected[key]), key
    assert checkpoint.num_bytes < sum(tensor.nbytes for tensor in expected.values())
    assert_greedy_tokens(folder, model, **SMALL)


@pytest.mark.parametrize("name", SPELLINGS)
def test_the_numbers_of_other_spellings(name: str, tmp_path: Path) -> None:
    folder, model = write(name, tmp_path)
    expected = model.state_dict()
    for key, tensor in open_checkpoint(folder).tensors():
        assert torch.equal(tensor, expected[key]), key


def test_what_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    """The cases are those of `test_quantization_config.py`."""
    folder, _ = write("int8", tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"]["transform_config"] = {"config_groups": {"R4": {"type": "hadamard", "apply": []}}}
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UnsupportedModelError, match=r"config\.json: quantization_config: 'transform_config' is"):
        open_checkpoint(folder)


LAYER = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("int4", lambda t: t[f"{LAYER}.weight_scale"].view(-1)[3:4].fill_(float("nan")), "weight_scale has values"),
        ("awq", lambda t: t[f"{LAYER}.scales"].view(-1)[3:4].zero_(), "scales has a scale of 0"),
        ("int4", lambda t: t.pop(f"{LAYER}.weight_scale"), "weight_scale is missing"),
        ("gptq", lambda t: t.pop(f"{LAYER}.qzeros"), "qzeros is missing"),
        ("gptq desc_act", lambda t: t.pop(f"{LAYER}.g_idx"), "g_idx is missing"),
        ("int4 with zeros", lambda t: t.pop(f"{LAYER}.weight_zero_point"), "weight_zero_point is missing"),
        ("int8", lambda t: t.pop(f"{LAYER}.weight_scale"), "weight_scale is missing"),
        ("int8", lambda t: t.pop(f"{LAYER}.weight"), "weight is missing"),
        ("int8", lambda t: t.update({f"{LAYER}.weight_scale": torch.ones(1)}), r"weight_scale is \[1, 1\]"),
        (
            "int8",
            lambda t: t.update({f"{LAYER}.weight_zero_point": torch.ones(64, 1, dtype=torch.int8)}),
            "weight_zero_point is not 0",
        ),
        ("gptq", lambda t: t[f"{LAYER}.g_idx"][5:6].fill_(99), "g_idx names a group that is not there"),
        ("awq", lambda t: t.update({f"{LAYER}.qweight": t[f"{LAYER}.qweight"][1:].clone()}), r"qweight is \[63, 8\]"),
        ("int4", lambda t: t[f"{LAYER}.weight_shape"][0:1].fill_(3), "weight_shape is not"),
        ("fp8 rows", lambda t: t.update({f"{LAYER}.weight": t[f"{LAYER}.weight"].to(torch.float8_e5m2)}), "F8_E5M2"),
        (
            "int8",
            lambda t: t.update({f"{LAYER}.weight": t[f"{LAYER}.weight"].to(torch.float8_e4m3fn)}),
            "not torch.int8",
        ),
        ("fp8 rows", lambda t: t.update({f"{LAYER}.weight": t[f"{LAYER}.weight"].char()}), "not torch.float8_e4m3fn"),
        ("fp8 blocks", lambda t: t.update({f"{LAYER}.weight_scale_inv": torch.ones(1, 1)}), "implies"),
        ("int8", lambda t: t.update({f"{LAYER}.weight_scale": torch.ones(5, 1)}), r"weight_scale is \[5, 1\]"),
    ],
)
def test_what_cannot_be_right_is_refused_with_the_tensors_name(
    name: str, damage: Callable[[dict[str, Tensor]], object], message: str, tmp_path: Path
) -> None:
    folder, _ = write(name, tmp_path)
    tensors = copy.copy(load_file(folder / "model.safetensors"))
    damage(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises((CorruptModelError, UnsupportedModelError), match=message) as caught:
        LLM(str(folder), dtype="float32")
    assert LAYER in str(caught.value)


def test_a_quantised_output_layer_beside_a_tied_embedding_is_used(tmp_path: Path) -> None:
    folder, _ = write("int8", tmp_path, family="llama_tied")
    tensors = load_file(folder / "model.safetensors")
    parts, stands_for = int8_rows(tensors["model.embed_tokens.weight"], random.Random(1))
    save_file(tensors | {f"lm_head.{end}": part for end, part in parts.items()}, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    assert not checkpoint.config.tie_embeddings
    assert torch.equal(checkpoint.read("lm_head.weight"), stands_for)


def test_groups_that_do_not_divide(tmp_path: Path) -> None:
    folder, _ = write("gptq", tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"]["group_size"] = 48
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CorruptModelError, match="64 inputs, which groups of 48 do not divide"):
        LLM(str(folder), dtype="float32")


@pytest.mark.parametrize("config", [[], [1], "gptq", 0])
def test_a_configuration_that_is_no_object(config: object, tmp_path: Path) -> None:
    folder = save_folder(hf_model("llama"), tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    with pytest.raises(CorruptModelError, match="'quantization_config' is no object"):
        open_checkpoint(folder)


def test_a_checkpoint_that_says_so_and_is_not(tmp_path: Path) -> None:
    folder = save_folder(hf_model("llama"), tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": FORMATS["awq"][0]}))
    with pytest.raises(CorruptModelError, match="but no tensor of it is"):
        open_checkpoint(folder)
