"""Options: every one documented and checked, unknown names refused with the nearest valid one."""

from __future__ import annotations

import dataclasses
import re
import typing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.config import EngineConfig, SchedulerConfig, iter_options
from headway.core import KVCacheManager, Scheduler
from headway.errors import ConfigError, did_you_mean
from headway.option_fields import parse_bytes

OPTION_NAMES = [field.name for _, field in iter_options()]


@pytest.mark.parametrize("field", [field for _, field in iter_options()], ids=OPTION_NAMES)
def test_every_option_documents_itself(field: dataclasses.Field[Any]) -> None:
    assert field.metadata["help"].endswith("."), "help is a sentence"
    assert field.default is not dataclasses.MISSING
    choices = field.metadata["choices"]
    assert choices is None or field.default in choices


def test_flat_options_reach_their_sections() -> None:
    assert len(OPTION_NAMES) == len(set(OPTION_NAMES)), "they share one namespace"
    config = EngineConfig.from_options(model="m", block_size=32, max_num_seqs=4, device="cpu")
    assert config.model.model == "m"
    assert config.cache.block_size == 32
    assert config.scheduler.max_num_seqs == 4
    assert config.device.device == "cpu"
    assert config == EngineConfig.from_options(device="cpu", max_num_seqs=4, block_size=32, model="m")


def test_what_is_left_open_is_settled_for_the_device() -> None:
    cpu, cuda = EngineConfig.from_options().resolve("cpu"), EngineConfig().resolve("cuda")
    for name, values in {
        "max_num_seqs": (64, 256),
        "max_num_batched_tokens": (512, 8192),
        "max_chunk_tokens": (512, 8192),
        "target_itl_ms": (0, 20),
        "long_prompt_step_ms": (500, 35),
        "full_step_tokens": (64, 1024),
    }.items():
        assert (getattr(cpu.scheduler, name), getattr(cuda.scheduler, name)) == values, name
    assert (cpu.cache.block_size, cuda.cache.block_size) == (16, 64)
    assert (cpu.device.async_scheduling, cuda.device.async_scheduling) == (False, True)
    assert (cpu.device.kind, cuda.device.kind) == ("cpu", "cuda")


def test_what_was_set_is_kept_on_any_device() -> None:
    limits = {"max_num_seqs": 3, "max_num_batched_tokens": 7, "target_itl_ms": 0, "long_prompt_step_ms": 0}
    config = EngineConfig.from_options(**limits, max_chunk_tokens=5, async_scheduling=True, block_size=2)
    for device in ("cpu", "cuda"):
        settled = config.resolve(device)
        assert settled.scheduler.as_options() == dataclasses.asdict(config.scheduler)
        assert (settled.device.async_scheduling, settled.cache.block_size) == (True, 2)
    assert not EngineConfig.from_options(async_scheduling=False).resolve("cuda").device.async_scheduling
    graphs = {"all": {}, "lazy": {"cuda_graph_capture": "lazy"}, "off": {"enforce_eager": True}}
    for kind, options in graphs.items():
        assert EngineConfig.from_options(**options).resolve("cuda").device.graphs == kind


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_scheduler_gets_a_record_with_nothing_left_open(device: str) -> None:
    settled = EngineConfig().resolve(device).scheduler
    assert None not in dataclasses.asdict(settled).values()
    assert SchedulerConfig(**settled.as_options()).resolve(device) == settled, "settled once is settled"
    with pytest.raises(TypeError):
        Scheduler(SchedulerConfig(), KVCacheManager(num_blocks=8, block_size=4))  # type: ignore[arg-type]


def test_a_limit_that_was_left_open_gives_way_to_one_that_was_set() -> None:
    assert SchedulerConfig(max_num_seqs=700).resolve("cpu").max_num_batched_tokens == 700
    assert SchedulerConfig(max_num_batched_tokens=32).resolve("cpu").max_num_seqs == 32
    assert SchedulerConfig(max_num_batched_tokens=32).resolve("cpu").max_chunk_tokens == 32
    for limit, grown in ((None, 128), (8, 8)):
        small = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=4, max_chunk_tokens=limit).resolve("cpu")
        again = SchedulerConfig(**{**small.as_options(), "max_num_batched_tokens": 128}).resolve("cpu")
        assert again.max_chunk_tokens == grown, "one that was left open grows with the steps"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefix_caching": "off"}, "prefix_caching is now enable_prefix_caching (True or False)."),
        (
            {"cuda_graphs": "lazy"},
            "cuda_graphs is now enforce_eager (True or False) and cuda_graph_capture ('start' or 'lazy').",
        ),
        ({"overlap": "auto"}, "overlap is now async_scheduling (True or False)."),
        ({"predict_lengths": "oracle"}, "predict_lengths is now length_predictor."),
        ({"enable_prefix_caching": "off"}, "enable_prefix_caching must be True or False, not 'off'."),
        ({"async_scheduling": "on"}, "async_scheduling must be True or False or None, not 'on'."),
    ],
    ids=str,
)
def test_a_former_spelling_is_an_error_that_names_the_new_one(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        EngineConfig.from_options(**options)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("blok_size", "block_size"), ("max_seqs", "max_num_seqs"), ("gpu_memory_utilisation", "gpu_memory_utilization")],
)
def test_unknown_option_names_the_nearest(wrong: str, right: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{wrong}'.*Did you mean '{right}'\?"):
        EngineConfig.from_options(**{wrong: 1})
    assert did_you_mean("zzzzzz", tuple(OPTION_NAMES)) == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 257}, "block_size must be between 1 and 256"),
        ({"gpu_memory_utilization": 1.01}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization"),
        ({"kv_cache_memory": 0}, "kv_cache_memory must be at least 1"),
        ({"num_kv_blocks": -1}, "num_kv_blocks must be at least 1"),
        ({"kv_cache_memory": 1, "num_kv_blocks": 1}, "give one of them"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"max_chunk_tokens": 0}, "max_chunk_tokens must be at least 1"),
        ({"skip_window": 0}, "skip_window must be at least 1"),
        ({"max_head_skips": -1}, "max_head_skips must be at least 0"),
        ({"max_num_seqs": 65, "max_num_batched_tokens": 64}, "every running request needs a token per step"),
        ({"target_itl_ms": -1}, "target_itl_ms must be a number that is not negative"),
        ({"target_itl_ms": float("nan")}, "target_itl_ms must be a number that is not negative"),
        ({"enforce_eager": True, "cuda_graph_capture": "lazy"}, "enforce_eager wants none at all"),
        ({"cuda_graph_capture": "on"}, "cuda_graph_capture must be one of start, lazy"),
        ({"enable_prefix_caching": False, "host_cache_memory": 1}, "enable_prefix_caching is False"),
        ({"max_model_len": 1}, "max_model_len must be at least 2"),
        ({"num_threads": 0}, "num_threads must be at least 1"),
        ({"dtype": "bfloat15"}, "Did you mean 'bfloat16'"),
        ({"device": "tpu"}, "device must be one of"),
        ({"attention_backend": "magic"}, "attention_backend must be one of"),
        ({"load_format": "pickle"}, "load_format must be one of"),
    ],
    ids=str,
)
def test_bad_values_are_refused_with_the_reason(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_options(**options)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2147483648", 2**31), ("2GiB", 2**31), ("500MB", 500_000_000), (" 1.5 kib ", 1536), ("0", 0), ("7b", 7)],
)
def test_parse_bytes(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected
    for bad in ("", "GiB", "-1", "1 2", "2 gigs", "1e9", "nan", "9" * 400):
        with pytest.raises(ConfigError, match="is not a number of bytes"):
            parse_bytes(bad)


@given(st.text())
def test_parse_bytes_raises_nothing_else(text: str) -> None:
    try:
        assert parse_bytes(text) >= 0
    except ConfigError:
        pass


WRONG_VALUES: dict[str, list[Any]] = {
    "whole number": ["8", 1.5, 8.0, True, None, [8], float("nan")],
    "number": ["0.5", False, None, [0.5], 1j],
    "switch": ["on", "True", 1, 0, None, [True]],
    "text": [5, True, b"x", ["x"], 0.5],
}


KINDS = {"int": "whole number", "float": "number", "bool": "switch"}


@pytest.mark.parametrize(("section", "option_field"), list(iter_options()), ids=OPTION_NAMES)
def test_a_value_of_another_type_is_refused_with_the_options_name(section: type, option_field: Any) -> None:
    """Whatever the option: new ones are checked by their declaration."""
    hint = str(typing.get_type_hints(section)[option_field.name])
    kind = next((kind for word, kind in KINDS.items() if word in hint), "text")
    for value in WRONG_VALUES[kind]:
        if value is None and "None" in hint:
            continue
        with pytest.raises(ConfigError, match=rf"^{option_field.name} must be (a|one of|text|True)"):
            EngineConfig.from_options(**{option_field.name: value})


def test_numbers_and_paths_of_other_libraries_become_pythons_own() -> None:
    config = EngineConfig.from_options(
        max_num_seqs=np.int64(8), gpu_memory_utilization=np.float32(0.5), tokenizer=Path("a/b"), target_itl_ms=20
    )
    assert type(config.scheduler.max_num_seqs) is int and type(config.cache.gpu_memory_utilization) is float
    assert config.model.tokenizer == "a/b" and config.scheduler.target_itl_ms == 20
    for seed in (-(2**63) - 1, 2**64):
        with pytest.raises(ConfigError, match="^seed must be a 64-bit number"):
            EngineConfig.from_options(seed=seed)
