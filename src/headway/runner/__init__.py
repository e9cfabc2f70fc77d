"""Steps on tensors: rows of requests, forward to the logits, sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.runner.base import PendingStep, Runner, RunnerSettings, UnsampledStep

if TYPE_CHECKING:
    from headway.attention import AttentionBackend
    from headway.kv.host_blocks import HostBlocks
    from headway.models.decoder import Decoder

__all__ = ["PendingStep", "Runner", "RunnerSettings", "UnsampledStep", "create_runner"]


def create_runner(
    decoder: Decoder, attention: AttentionBackend, settings: RunnerSettings, host_blocks: HostBlocks | None = None
) -> Runner:
    """The runner that goes with the decoder's kernels: Triton's stage steps on the device, others run them at once."""
    if decoder.ops.name == "triton":
        from headway.runner.graphed_runner import create_graphed_runner

        return create_graphed_runner(decoder, attention, settings, host_blocks)
    from headway.runner.eager_runner import create_eager_runner

    return create_eager_runner(decoder, attention, settings, host_blocks)
