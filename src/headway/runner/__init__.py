"""Steps on tensors: rows of requests, forward to the logits, sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.core.scheduler_output import PendingStep
from headway.runner.base import PagedModel, Runner, RunnerSettings, UnsampledStep

if TYPE_CHECKING:
    from headway.transfer.host_blocks import HostBlocks

__all__ = ["PagedModel", "PendingStep", "Runner", "RunnerSettings", "UnsampledStep", "create_runner"]


def create_runner(
    model: PagedModel,
    settings: RunnerSettings,
    *,
    draft: PagedModel | None = None,
    host_blocks: HostBlocks | None = None,
) -> Runner:
    """The runner that fits the decoder's kernels. With Triton's, steps are queued on the device; with others, each step
    runs when it is submitted. `draft` is a model that drafts tokens for the main one."""
    if model.decoder.ops.name == "triton":
        from headway.runner.graphed_runner import create_graphed_runner

        return create_graphed_runner(model, settings, draft=draft, host_blocks=host_blocks)
    from headway.runner.eager_runner import create_eager_runner

    return create_eager_runner(model, settings, draft=draft, host_blocks=host_blocks)
