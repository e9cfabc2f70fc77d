"""Which implementation of `Ops` a name and a device give."""

from __future__ import annotations

import pytest
import torch

from headway import layers, native
from headway.errors import ConfigError
from headway.layers import create_ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_runs_everywhere(dtype: torch.dtype) -> None:
    assert create_ops("torch", device="cpu", dtype=dtype).name == "torch"


def test_auto_on_the_cpu() -> None:
    best = "native" if native.is_available() else "torch"
    assert create_ops("auto", device="cpu", dtype=torch.float32).name == best
    assert create_ops("auto", device="cpu", dtype=torch.bfloat16).name == "torch"


def test_auto_on_cuda_is_triton_where_the_package_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert create_ops("auto", device="cuda", dtype=dtype).name == "triton"
    assert create_ops("auto", device="cuda", dtype=torch.float64).name == "torch"
    monkeypatch.setattr(layers, "_triton_available", lambda: False)
    assert create_ops("auto", device="cuda", dtype=torch.bfloat16).name == "torch"
    with pytest.raises(ConfigError, match="the package triton, which is not installed"):
        create_ops("triton", device="cuda", dtype=torch.bfloat16)


def test_triton_runs_on_cuda_or_in_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert create_ops("triton", device="cpu", dtype=torch.float32).name == "triton"
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match="triton ops run in .* on CUDA, not in torch.float32 on cpu"):
        create_ops("triton", device="cpu", dtype=torch.float32)
    with pytest.raises(ConfigError, match="not in torch.float64"):
        create_ops("triton", device="cuda", dtype=torch.float64)


def test_native_is_float32_on_the_cpu() -> None:
    with pytest.raises(ConfigError, match="native ops run in float32"):
        create_ops("native", device="cpu", dtype=torch.float16)
    with pytest.raises(ConfigError, match="native ops run in float32"):
        create_ops("native", device="cuda", dtype=torch.float32)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown ops 'cuda'; valid names are auto, native, torch, triton"):
        create_ops("cuda", device="cpu", dtype=torch.float32)
