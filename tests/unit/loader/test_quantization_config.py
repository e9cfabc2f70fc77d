"""What a `quantization_config` may say: known keys change nothing or are read, all others are refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from headway.errors import CorruptModelError, UnsupportedModelError
from headway.loader.quantization_config import Awq, Compressed, Fp8, Gptq, read_quantization

REFUSED, DAMAGED = UnsupportedModelError, CorruptModelError
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
        }
    },
}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
FP8: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
HADAMARD = {"config_groups": {"R4": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "input"}]}}}
TOP = "config.json: quantization_config"
GROUP = f"{TOP}: config_groups: group_0"


def compressed(**weights: Any) -> dict[str, Any]:
    changed = copy.deepcopy(COMPRESSED)
    changed["config_groups"]["group_0"]["weights"] |= weights
    return changed


def group(**scheme: Any) -> dict[str, Any]:
    changed = copy.deepcopy(COMPRESSED)
    changed["config_groups"]["group_0"] |= scheme
    return changed


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"quant_method": "bitsandbytes"}, REFUSED, "config.json is quantised with bitsandbytes"),
        ({"bits": 4}, REFUSED, "is quantised with unknown"),
        ({"quant_method": 8}, DAMAGED, f"{TOP}: 'quant_method' is 8"),
        (COMPRESSED | {"transform_config": HADAMARD}, REFUSED, f"{TOP}: 'transform_config' is {{'config_groups'"),
        (
            COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            REFUSED,
            f"{TOP}: sparsity_config: 'format' is 'sparse-24-bitmask'",
        ),
        (COMPRESSED | {"sparsity_config": ["dense"]}, DAMAGED, f"{TOP}: 'sparsity_config' is ['dense']"),
        (
            COMPRESSED | {"sparsity_config": {"format": "dense", "block": 4}},
            REFUSED,
            f"{TOP}: sparsity_config: 'block' (here 4) is not a known key",
        ),
        (COMPRESSED | {"moe_sparsity_config": {"method": "prune"}}, REFUSED, f"{TOP}: 'moe_sparsity_config' is"),
        (COMPRESSED | {"rotation": "spin"}, REFUSED, f"{TOP}: 'rotation' (here 'spin') is not a known key"),
        (COMPRESSED | {"quantization_status": "half"}, REFUSED, f"{TOP}: 'quantization_status' is 'half'"),
        (COMPRESSED | {"ignore": "lm_head"}, DAMAGED, f"{TOP}: 'ignore' is 'lm_head', which is not a list of names"),
        (COMPRESSED | {"format": "marlin-24"}, REFUSED, f"{GROUP}: weights says int8 by channel, marlin-24"),
        (COMPRESSED | {"format": None}, REFUSED, "int8 by channel, None"),
        (COMPRESSED | {"config_groups": {}}, REFUSED, "config_groups"),
        (COMPRESSED | {"config_groups": None}, REFUSED, "config_groups"),
        (COMPRESSED | {"config_groups": "W8A8"}, DAMAGED, f"{TOP}: 'config_groups' is 'W8A8', which is not an object"),
        (COMPRESSED | {"config_groups": {"W8A8": "Linear"}}, DAMAGED, "config_groups: 'W8A8' is 'Linear'"),
        (COMPRESSED | {"config_groups": {"NVFP4": ["Linear"]}}, REFUSED, "preset 'NVFP4' is not supported"),
        (COMPRESSED | {"config_groups": {"W8A8": [1]}}, DAMAGED, "config_groups: 'W8A8' is [1]"),
        (group(weights=None), REFUSED, f"{GROUP} has no quantised weights"),
        (group(weights=[8]), DAMAGED, f"{GROUP}: 'weights' is [8], which is not an object"),
        (group(targets="Linear"), DAMAGED, f"{GROUP}: 'targets' is 'Linear'"),
        (group(rotations=1), REFUSED, f"{GROUP}: 'rotations' (here 1) is not a known key"),
        (group(input_activations={"clip": 3}), REFUSED, f"{GROUP}: input_activations: 'clip' (here 3)"),
        (group(output_activations=3), DAMAGED, f"{GROUP}: 'output_activations' is 3"),
        (compressed(num_bits="8"), DAMAGED, f"{GROUP}: weights: 'num_bits' is '8', which is not a positive integer"),
        (compressed(num_bits=3), REFUSED, "int3 by channel"),
        (compressed(type="nf"), REFUSED, "nf8 by channel"),
        (compressed(strategy="group", group_size="a"), DAMAGED, f"{GROUP}: weights: 'group_size' is 'a'"),
        (compressed(strategy="group", group_size=0), DAMAGED, f"{GROUP}: weights: 'group_size' is 0"),
        (compressed(strategy="group", group_size=-2), DAMAGED, f"{GROUP}: weights: 'group_size' is -2"),
        (compressed(strategy="group"), DAMAGED, "strategy 'group' does not go with 'group_size' None"),
        (compressed(group_size=64), DAMAGED, "strategy 'channel' does not go with 'group_size' 64"),
        (compressed(strategy="tensor_group", group_size=16), REFUSED, "int8 by tensor_group"),
        (compressed(strategy="block", block_structure=[128, 128]), REFUSED, "int8 by block"),
        (compressed(type="float", strategy="block", block_structure=[0, 1]), DAMAGED, "'block_structure' is [0, 1]"),
        (compressed(type="float", strategy="block", block_structure="8xa"), DAMAGED, "'block_structure' is [8, 'a']"),
        (compressed(type="float", strategy="block", block_structure="9" * 5000), DAMAGED, "'block_structure' is ["),
        (compressed(symmetric="no"), DAMAGED, f"{GROUP}: weights: 'symmetric' is 'no', which is not true or false"),
        (compressed(dynamic=True), REFUSED, f"{GROUP}: weights: 'dynamic' is True"),
        (compressed(scale_dtype="torch.uint8"), REFUSED, f"{GROUP}: weights: 'scale_dtype' is 'torch.uint8'"),
        (compressed(actorder="random"), REFUSED, f"{GROUP}: weights: 'actorder' is 'random'"),
        (compressed(scale_exponent=2), REFUSED, f"{GROUP}: weights: 'scale_exponent' (here 2) is not a known key"),
        (GPTQ | {"bits": 3}, REFUSED, "gptq with 3 bits"),
        (GPTQ | {"bits": "4"}, DAMAGED, f"{TOP}: 'bits' is '4'"),
        (GPTQ | {"group_size": 0}, DAMAGED, f"{TOP}: 'group_size' is 0"),
        (GPTQ | {"checkpoint_format": "marlin"}, REFUSED, f"{TOP}: 'checkpoint_format' is 'marlin'"),
        (GPTQ | {"is_marlin_format": True}, REFUSED, f"{TOP}: 'is_marlin_format' is True"),
        (GPTQ | {"pack_dtype": "int16"}, REFUSED, f"{TOP}: 'pack_dtype' is 'int16'"),
        (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}}, REFUSED, f"{TOP}: dynamic: '+:.*down.*' is {{'bits': 8}}"),
        (GPTQ | {"extra_config": {"lm_head": {"bits": 8}}}, REFUSED, f"{TOP}: 'extra_config' is"),
        (GPTQ | {"adapter": {"name": "lora"}}, REFUSED, f"{TOP}: 'adapter' is"),
        (GPTQ | {"rotation": "hadamard"}, REFUSED, f"{TOP}: 'rotation' is 'hadamard'"),
        (GPTQ | {"desc_act": "yes"}, DAMAGED, f"{TOP}: 'desc_act' is 'yes'"),
        (GPTQ | {"nested_scales": True}, REFUSED, f"{TOP}: 'nested_scales' (here True)"),
        (AWQ | {"version": "gemv"}, REFUSED, "version gemv"),
        (AWQ | {"bits": 8}, REFUSED, "awq with 8 bits"),
        (AWQ | {"backend": "llm-awq"}, REFUSED, f"{TOP}: 'backend' is 'llm-awq'"),
        (AWQ | {"checkpoint_format": "gemv_fast"}, REFUSED, "version gemv_fast"),
        (AWQ | {"zero_point": False}, REFUSED, f"{TOP}: 'zero_point' is False"),
        (FP8 | {"weight_block_size": [128]}, DAMAGED, f"{TOP}: 'weight_block_size' is [128]"),
        (FP8 | {"weight_block_size": [True, 128]}, DAMAGED, f"{TOP}: 'weight_block_size' is [True, 128]"),
        (FP8 | {"fmt": "e5m2"}, REFUSED, f"{TOP}: 'fmt' is 'e5m2'"),
        (FP8 | {"export": {}}, REFUSED, f"{TOP}: 'export' (here {{}}) is not a known key"),
    ],
)
def test_refused_by_name(config: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        read_quantization(config, "config.json")
    assert message in str(caught.value)


INT8 = Compressed(
    kind="int",
    bits=8,
    strategy="channel",
    group_size=None,
    block=None,
    is_packed=False,
    is_symmetric=True,
    is_reordered=False,
)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            COMPRESSED
            | {"transform_config": {}, "sparsity_config": {}, "version": "0.9.2", "kv_cache_scheme": {"num_bits": 8}}
            | {"ignore": ["lm_head"], "quantization_status": "compressed", "global_compression_ratio": 1.5},
            INT8,
        ),
        (COMPRESSED | {"transform_config": {"config_groups": {}}, "sparsity_config": {"format": "dense"}}, INT8),
        (group(input_activations={"num_bits": 8, "dynamic": True, "strategy": "token"}, output_activations=None), INT8),
        (compressed(actorder="static", observer="mse", observer_kwargs={}, group_size=-1, block_structure=None), INT8),
        (COMPRESSED | {"config_groups": {"w8a8": ["Linear"]}}, INT8),
        (GPTQ | {"meta": {"quantizer": "x"}, "desc_act": True, "group_size": -1}, Gptq(4, None, False, True)),
        (GPTQ | {"desc_act": True, "sym": False, "dynamic": {"-:lm_head": {}}}, Gptq(4, 128, True, True)),
        (GPTQ | {"format": "gptq_v2", "checkpoint_format": None, "dynamic": None}, Gptq(4, 128, False, False)),
        ({"quant_method": "AWQ", "w_bit": 4, "q_group_size": 64, "version": "GEMM"}, Awq(64)),
        (AWQ | {"modules_to_not_convert": None, "do_fuse": False, "desc_act": False, "backend": "auto"}, Awq(128)),
        (FP8 | {"fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "ue8m0"}, Fp8((128, 128), False)),
        (FP8 | {"weight_block_size": None, "ignored_layers": ["lm_head"]}, Fp8(None, False)),
        ({"quant_method": "fp8"}, Fp8((128, 128), True)),
    ],
)
def test_read(config: dict[str, Any], expected: object) -> None:
    assert read_quantization(config, "config.json") == expected
