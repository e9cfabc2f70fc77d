"""What "auto" becomes on each device, and what its kernels cannot run. What is slower than it could be is said."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headway import native
from headway.cache_dir import why_not_writable
from headway.config import EngineConfig
from headway.errors import ConfigError
from headway.kv.codes import plain_format
from headway.kv_formats import FORMATS
from headway.worker import formats
from headway.worker.formats import Formats, choose_device, choose_formats, keep_compiled_kernels


def chosen(device: str, checkpoint_dtype: str = "bfloat16", **options: Any) -> Formats:
    stored = options.pop("stored", "")
    config = EngineConfig.from_options(**options).resolve(device)
    return choose_formats(
        config.model,
        config.device,
        kv_cache_dtype=config.cache.kv_cache_dtype,
        checkpoint_dtype=checkpoint_dtype,
        stored=stored,
    )


@pytest.fixture
def no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "is_available", lambda: True)


@pytest.fixture
def no_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "is_available", lambda: False)


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr("headway.worker.formats.keep_compiled_kernels", lambda: None)


@pytest.mark.usefixtures("native_kernels")
def test_a_cpu_quantises_unless_a_dtype_was_asked_for() -> None:
    auto = chosen("cpu")
    assert (auto.dtype, auto.quantization, auto.kernels) == (torch.float32, "int8", "native")
    assert (auto.attention_backend, auto.kv_format) == ("cpu", plain_format(torch.float16))
    assert str(auto) == "int8 weights, float32 activations"
    exact = chosen("cpu", dtype="float32")
    assert (exact.quantization, exact.kernels, exact.kv_format) == ("none", "native", plain_format(torch.float32))
    assert str(exact) == "float32"
    assert chosen("cpu", dtype="float32", quantization="int8").quantization == "int8"
    assert chosen("cpu", quantization="none").quantization == "none"


@pytest.mark.usefixtures("no_native_kernels")
def test_without_native_kernels_torch_computes_in_float32() -> None:
    found = chosen("cpu")
    assert (found.dtype, found.quantization, found.kernels) == (torch.float32, "none", "torch")
    assert (found.attention_backend, found.kv_format) == ("torch_padded", plain_format(torch.float32))


def test_a_dtype_that_only_torch_knows_on_a_cpu() -> None:
    found = chosen("cpu", dtype="bfloat16")
    assert (found.dtype, found.kernels, found.attention_backend) == (torch.bfloat16, "torch", "torch_padded")


@pytest.mark.usefixtures("native_kernels")
def test_a_kv_format_that_only_torch_knows_on_a_cpu() -> None:
    found = chosen("cpu", kv_cache_dtype="bfloat16", attention_backend="torch_padded")
    assert (found.dtype, found.kernels, found.quantization) == (torch.float32, "torch", "none")
    assert found.kv_format == plain_format(torch.bfloat16)
    known = chosen("cpu", kv_cache_dtype="int8", attention_backend="torch_padded")
    assert (known.kernels, known.attention_backend) == ("native", "torch_padded")


@pytest.mark.usefixtures("triton")
def test_cuda_takes_the_checkpoints_dtype() -> None:
    found = chosen("cuda")
    assert (found.dtype, found.quantization, found.kernels) == (torch.bfloat16, "none", "triton")
    assert (found.attention_backend, found.kv_format) == ("triton", plain_format(torch.bfloat16))
    assert chosen("cuda", dtype="float32").dtype == torch.float32
    assert chosen("cuda", kv_cache_dtype="int8").kv_format == FORMATS["int8"]
    assert (found.torch_threads, found.native_threads) == (None, None)


@pytest.mark.usefixtures("triton")
def test_cuda_keeps_weights_as_they_are_stored() -> None:
    auto = chosen("cuda", stored="FP8")
    assert (auto.quantization, auto.keeps_stored, str(auto)) == ("none", True, "FP8 weights, bfloat16 activations")
    floats = chosen("cuda", stored="FP8", quantization="none")
    assert (floats.keeps_stored, str(floats)) == (False, "bfloat16")
    again = chosen("cuda", stored="Q4_K", quantization="int8")
    assert (again.quantization, again.keeps_stored, str(again)) == ("int8", False, "int8 weights, bfloat16 activations")


@pytest.mark.usefixtures("native_kernels")
def test_a_cpu_keeps_four_bits_when_it_is_told_to() -> None:
    assert not chosen("cpu", stored="Q4_1").keeps_stored
    kept = chosen("cpu", stored="Q4_1", quantization="stored")
    assert (kept.quantization, kept.keeps_stored, str(kept)) == ("int8", True, "Q4_1 weights, float32 activations")
    assert kept.kv_format == plain_format(torch.float16)


@pytest.mark.usefixtures("native_kernels")
def test_threads_go_to_those_who_compute() -> None:
    own = chosen("cpu", num_threads=3)
    assert (own.torch_threads, own.native_threads) == (1, 3)
    assert (chosen("cpu").torch_threads, chosen("cpu").native_threads) == (1, None)
    torchs = chosen("cpu", dtype="bfloat16", num_threads=3)
    assert (torchs.torch_threads, torchs.native_threads) == (3, None)


@pytest.mark.parametrize(
    ("device", "options", "message"),
    [
        ("cpu", {"quantization": "fp8"}, "'fp8' needs a GPU; use 'int8' or 'int4'"),
        ("cpu", {"quantization": "int8", "dtype": "bfloat16"}, "computes in float32 on the CPU"),
        ("cpu", {"quantization": "stored", "dtype": "float16"}, "computes in float32 on the CPU"),
        (
            "cpu",
            {"quantization": "int8", "kv_cache_dtype": "bfloat16", "attention_backend": "torch_padded"},
            "'int8' needs the CPU kernels, and they know no KV cache in 'bfloat16'",
        ),
        ("cuda", {"attention_backend": "cpu"}, "'cpu' does not run on CUDA"),
        ("cuda", {"kv_cache_dtype": "float16"}, "does not go with the Triton kernels and a model in bfloat16"),
        ("cpu", {"attention_backend": "triton"}, "needs a CUDA device"),
        (
            "cpu",
            {"kv_cache_dtype": "bf16"},
            "'bfloat16' is not for the CPU kernels; use float32, float16, fp8, int8, int4",
        ),
    ],
    ids=str,
)
@pytest.mark.usefixtures("triton", "no_interpreter", "native_kernels")
def test_what_cannot_run_is_refused_with_what_can(device: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chosen(device, **options)


@pytest.mark.usefixtures("triton")
def test_a_gpu_without_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an A100")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="quantization 'fp8' needs a GPU that knows float8"):
        chosen("cuda", quantization="fp8")
    with pytest.raises(ConfigError, match="an A100 does not; use 'int8'"):
        chosen("cuda", kv_cache_dtype="fp8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert chosen("cuda", kv_cache_dtype="fp8").kv_format == FORMATS["fp8"]


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch sees no CUDA device"):
        choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto").type == "cuda"
    assert choose_device("cpu").type == "cpu"


# ----------------------------------------------------------------------------------------------- what is slow is said
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_said_yet() -> Iterator[None]:
    formats._warn_once.cache_clear()
    yield
    formats._warn_once.cache_clear()


def said(caplog: pytest.LogCaptureFixture) -> str:
    """The one warning there is."""
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "\n" not in record.getMessage()
    return record.getMessage()


def test_a_format_without_cpu_kernels(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        chosen("cpu", "float32", dtype="bfloat16")
    assert "several times as slow: they know no bfloat16" in said(caplog)


def test_what_is_fast_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    for dtype in ("auto", "float32"):
        chosen("cpu", "bfloat16", dtype=dtype)
    assert not caplog.records


def test_cuda_without_triton(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    chosen("cuda", "bfloat16")
    assert "there is no package triton" in said(caplog)


def test_slow_attention_on_cuda(caplog: pytest.LogCaptureFixture) -> None:
    chosen("cuda", "bfloat16", attention_backend="torch_padded")
    assert "attention_backend 'torch_padded' is a slow reference on CUDA" in said(caplog)


def test_a_gpu_that_torch_does_not_see(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(formats, "_NVIDIA_DRIVER", str(tmp_path / "version"))
    assert choose_device("auto") == CPU
    assert not caplog.records
    (tmp_path / "version").write_text("550")
    assert choose_device("auto") == CPU == choose_device("cpu")
    assert "torch sees no CUDA device" in said(caplog)


@pytest.mark.parametrize("variable", ["TRITON_CACHE_DIR", "TRITON_HOME", "HOME"])
def test_an_unwritable_triton_cache(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str
) -> None:
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # so that what is set below is undone
    monkeypatch.setenv(variable, str(tmp_path))
    keep_compiled_kernels()
    assert not caplog.records
    folder = os.environ["TRITON_CACHE_DIR"]
    assert Path(folder).name == f"headway-{os.geteuid()}", "nobody else can put a kernel there"
    keep_compiled_kernels()
    assert os.environ["TRITON_CACHE_DIR"] == folder
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    monkeypatch.setenv(variable, str(tmp_path / "file" / "below"))
    keep_compiled_kernels()
    assert why_not_writable(Path(os.environ["TRITON_CACHE_DIR"])) is None
    assert "the GPU kernels are compiled for this run alone" in said(caplog)


def test_commands_show_it() -> None:
    """Nothing has to be switched on to see it."""
    code = "from headway import native; native.is_available()"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HEADWAY_NATIVE_ISA": "mmx"},
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = run.stderr.splitlines()
    assert "about 5 times as slow: unknown HEADWAY_NATIVE_ISA 'mmx'" in line
