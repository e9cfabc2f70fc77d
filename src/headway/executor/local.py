"""The executor for one device in this process, with a runner that a worker has prepared."""

from __future__ import annotations

import torch

from headway.config import ResolvedConfig
from headway.core.kv.moves import BlockMoves
from headway.core.scheduler_output import SchedulerOutput
from headway.errors import ConfigError
from headway.executor import PendingStep, UnsampledStep
from headway.models.assembly import Progress
from headway.models.checkpoint import Checkpoint
from headway.runner import Runner
from headway.transfer.block_store import BlockTransfers
from headway.worker.model_worker import Allocated, ModelWorker


class LocalExecutor:
    """Hands every step to the runner."""

    def __init__(self, ready: Allocated, *, max_in_flight: int) -> None:
        self.plan = ready.plan
        self.max_in_flight = max_in_flight
        self.verifies_ahead = ready.runner.verifies_ahead
        self.transfers: BlockTransfers | None = ready.transfers
        self._runner: Runner | None = ready.runner
        # Each thread has a current device of its own; steps belong to that of the thread that loads the model.
        self._cuda_device = torch.cuda.current_device() if ready.plan.device.startswith("cuda") else None

    @classmethod
    def from_config(
        cls,
        config: ResolvedConfig,
        checkpoint: Checkpoint,
        *,
        eos_token_ids: tuple[int, ...],
        draft: Checkpoint | None = None,
        progress: Progress | None = None,
    ) -> LocalExecutor:
        """Load the weights, then size the KV cache to the memory that the largest step leaves."""
        worker = ModelWorker(config, checkpoint.config, eos_token_ids=eos_token_ids)
        worker.load(checkpoint, progress, draft=draft)
        ready = worker.allocate(worker.plan(worker.profile()))
        return cls(ready, max_in_flight=2 if config.device.async_scheduling else 1)

    def submit(self, output: SchedulerOutput) -> PendingStep:
        """Run a step, or start it."""
        return self._ready().submit(output)

    def forward(self, output: SchedulerOutput) -> UnsampledStep:
        """Run a step, or start it, up to the logits."""
        return self._ready().forward(output)

    def move(self, moves: BlockMoves) -> None:
        """Copy blocks without a step."""
        self._ready().move(moves)

    def warm_up(self) -> int:
        """Prepare what would slow down the first steps. Returns how many kinds of steps were prepared."""
        if self._runner is None:
            return 0
        try:
            return self._runner.warm_up()
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                "There is not enough GPU memory left for the CUDA graphs of all steps. Lower --gpu-memory-utilization "
                f"or --max-num-seqs, or use --cuda-graph-capture lazy or --enforce-eager. ({error})"
            ) from error

    def shutdown(self) -> None:
        """Drop the model and its cache."""
        if self.transfers is not None:
            self.transfers.close()
            self.transfers = None
        if self._runner is not None:
            self._runner.shutdown()
        self._runner = None

    def _ready(self) -> Runner:
        if self._runner is None:
            raise RuntimeError("the executor is shut down")
        if self._cuda_device is not None and torch.cuda.current_device() != self._cuda_device:
            torch.cuda.set_device(self._cuda_device)
        return self._runner
