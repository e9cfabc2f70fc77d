"""The ceilings of this machine."""

from __future__ import annotations

from headway.worker.ceilings import measure_ceilings


def test_the_machine_has_ceilings() -> None:
    ceilings = measure_ceilings("cpu", "int8 weights, float32 activations")
    assert ceilings.matmul_dtype == "float32"
    assert 1e8 < ceilings.bandwidth_bytes_s < 1e13
    assert 1e8 < ceilings.flops_s < 1e15
    assert "float32 matmul" in str(ceilings)
