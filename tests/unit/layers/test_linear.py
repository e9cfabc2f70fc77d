"""Which `Ops` a name gives, which kind of `Linear` a weight becomes, and what every kind has in common."""

from __future__ import annotations

import pytest
import torch

from tests.triton_device import DEVICE  # isort: split

from headway import native
from headway.errors import ConfigError
from headway.layers import LinearFactory, create_ops
from headway.layers.linear import TorchLinear
from headway.layers.native_ops import Float32Linear, Int8Linear
from headway.layers.triton_ops import TritonLinear

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    ("quantization", "kernels", "device", "dtype", "kind"),
    [
        ("none", "torch", "cpu", BF16, TorchLinear),
        ("none", "torch", "cpu", F32, TorchLinear),
        ("none", "native", "cpu", F32, Float32Linear),
        ("none", "triton", "cpu", F32, TritonLinear),
        ("int8", "native", "cpu", F32, Int8Linear),
        ("int8", "torch", "cpu", F32, Int8Linear),
    ],
)
def test_kinds(quantization: str, kernels: str, device: str, dtype: torch.dtype, kind: type) -> None:
    factory = LinearFactory(quantization, kernels=kernels, device=device, dtype=dtype)
    assert type(factory.linear(torch.randn(32, 64, dtype=dtype), None)) is kind


@pytest.mark.parametrize(
    ("name", "device", "dtype", "message"),
    [
        ("int8", "cpu", BF16, "int8 weights run on the CPU"),
        ("int8", "cuda", F32, "int8 weights run on the CPU"),
        ("int5", "cpu", F32, "unknown quantization 'int5'; valid names are none, fp8, int8, int4"),
    ],
)
def test_weights_that_are_refused(name: str, device: str, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LinearFactory(name, kernels="torch", device=device, dtype=dtype)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("kind", [TorchLinear, TritonLinear, Float32Linear, Int8Linear])
def test_every_kind_tells_its_size_and_writes_where_it_is_told(kind: type, with_bias: bool) -> None:
    if kind in (Float32Linear, Int8Linear) and not native.is_available():
        pytest.skip("no C compiler: the native kernels are not built")
    device = DEVICE if kind is TritonLinear else "cpu"
    torch.manual_seed(0)
    weight, bias = torch.randn(20, 64, device=device), torch.randn(20, device=device) if with_bias else None
    linear, x = kind(weight, bias), torch.randn(3, 64, device=device)
    assert (linear.in_features, linear.out_features) == (64, 20)
    assert linear.num_bytes == sum(tensor.nbytes for tensor in linear.tensors)
    assert len(linear.tensors) == 1 + with_bias
    out = torch.full((4, 20), 9.0, device=device)
    assert linear(x, out[:3]).data_ptr() == out.data_ptr()
    torch.testing.assert_close(out[:3], linear(x))
    assert torch.equal(out[3], torch.full_like(out[3], 9.0))


@pytest.mark.parametrize(
    ("name", "device", "dtype", "message"),
    [
        ("native", "cpu", F16, "native ops run in float32"),
        ("native", "cuda", F32, "native ops run in float32"),
        ("cuda", "cpu", F32, "unknown ops 'cuda'; valid names are native, torch, triton"),
    ],
)
def test_ops_that_are_refused(name: str, device: str, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create_ops(name, device=device, dtype=dtype)


def test_triton_runs_on_cuda_or_in_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert create_ops("triton", device="cpu", dtype=torch.float32).name == "triton"
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match="triton ops run in .* on CUDA, not in torch.float32 on cpu"):
        create_ops("triton", device="cpu", dtype=torch.float32)
    with pytest.raises(ConfigError, match="not in torch.float64"):
        create_ops("triton", device="cuda", dtype=torch.float64)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="the package triton, which is not installed"):
        create_ops("triton", device="cuda", dtype=BF16)
