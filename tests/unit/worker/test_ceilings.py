"""The ceilings of this machine."""

from __future__ import annotations

from headway.worker.ceilings import measure_ceilings


def test_the_machine_has_ceilings() -> None:
    for dtype_name, multiplied in (("float32", "float32"), ("int8 weights, float32 activations", "int8")):
        ceilings = measure_ceilings("cpu", dtype_name)
        assert ceilings.matmul_dtype == multiplied
        assert 1e8 < ceilings.bandwidth_bytes_s < 1e13
        assert 1e8 < ceilings.flops_s < 1e15
        assert f"{multiplied} matmul" in str(ceilings)
