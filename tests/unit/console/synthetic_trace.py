"""A trace as torch writes it on a GPU, made up: every number in it can be checked by hand."""

from __future__ import annotations

from typing import Any

from headway.console.step_trace import SPAN_PREFIX

HOST, DEVICE, STREAM = 100, 0, 7
STEP_US = 1000.0

KERNELS = (
    # name, start within the step, duration
    ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_gemm>(Params)", 100.0, 500.0),
    ("_paged_decode_attention_kernel", 600.0, 200.0),
    ("_rms_norm_kernel", 800.0, 50.0),
    ("_sample_partial_kernel", 900.0, 40.0),
)
"""Busy 790 of 1,000 µs: gaps of 50 before the sampler, and 60 + 100 from one step to the next."""

SPANS = (("schedule", 0.0, 60.0), ("submit", 60.0, 40.0), ("wait", 100.0, 840.0), ("update", 940.0, 20.0))


def synthetic_trace(num_steps: int) -> dict[str, Any]:
    """Steps of 1,000 µs one after another, with host spans still as annotations of their thread."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": HOST, "tid": 0, "args": {"name": "py"}}]
    for step in range(num_steps):
        start = 5000.0 + step * STEP_US
        events.append(_event("user_annotation", SPAN_PREFIX + "step", start, STEP_US, HOST, HOST))
        events.append(_event("gpu_user_annotation", SPAN_PREFIX + "step", start, STEP_US, DEVICE, STREAM))
        for name, offset, duration in SPANS:
            events.append(_event("user_annotation", SPAN_PREFIX + name, start + offset, duration, HOST, HOST))
        events.append(_event("cpu_op", "aten::mm", start + 65, 30, HOST, HOST))
        events.append(_event("cpu_op", "aten::empty", start + 70, 5, HOST, HOST))
        for name, offset, duration in KERNELS:
            events.append(_event("kernel", name, start + offset, duration, DEVICE, STREAM))
    return {"schemaVersion": 1, "traceEvents": events}


def _event(category: str, name: str, start: float, duration: float, pid: int, tid: int) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "pid": pid, "tid": tid}
