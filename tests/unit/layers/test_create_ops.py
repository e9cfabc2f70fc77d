"""Which implementation of `Ops` a name and a device give."""

from __future__ import annotations

import pytest
import torch

from headway import layers, native
from headway.errors import ConfigError
from headway.layers import create_ops

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("torch", F32, "torch"),
        ("torch", BF16, "torch"),
        ("auto", F32, "native" if native.is_available() else "torch"),
        ("auto", BF16, "torch"),
    ],
)
def test_on_the_cpu(name: str, dtype: torch.dtype, expected: str) -> None:
    assert create_ops(name, device="cpu", dtype=dtype).name == expected


@pytest.mark.parametrize(
    ("name", "device", "dtype", "message"),
    [
        ("native", "cpu", F16, "native ops run in float32"),
        ("native", "cuda", F32, "native ops run in float32"),
        ("cuda", "cpu", F32, "unknown ops 'cuda'; valid names are auto, native, torch, triton"),
    ],
)
def test_refusals(name: str, device: str, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create_ops(name, device=device, dtype=dtype)


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
