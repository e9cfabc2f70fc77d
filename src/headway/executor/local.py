"""The executor in this process: one worker, driven from the load to its last step."""

from __future__ import annotations

from collections.abc import Sequence

from headway.config import ResolvedConfig
from headway.core.scheduler_output import SchedulerOutput, TokenMasks
from headway.executor.base import PendingStep, UnsampledStep
from headway.models.assembly import Progress
from headway.models.checkpoint import Checkpoint
from headway.worker.memory_plan import MemoryPlan
from headway.worker.model_worker import ModelWorker


class LocalExecutor:
    """Workers that run every step together; the first one's result counts."""

    def __init__(self, workers: Sequence[ModelWorker], plan: MemoryPlan, *, max_in_flight: int) -> None:
        self.plan = plan
        self.max_in_flight = max_in_flight
        self._workers = tuple(workers)

    @classmethod
    def from_config(
        cls,
        config: ResolvedConfig,
        checkpoint: Checkpoint,
        *,
        eos_token_ids: tuple[int, ...],
        progress: Progress | None = None,
    ) -> LocalExecutor:
        """Load the weights, then give the KV cache what the largest step leaves."""
        worker = ModelWorker(config, checkpoint.config, eos_token_ids=eos_token_ids)
        worker.load(checkpoint, progress)
        plan = worker.allocate(worker.profile())
        return cls([worker], plan, max_in_flight=2 if config.device.async_scheduling else 1)

    def submit(self, output: SchedulerOutput) -> PendingStep:
        """Run a step, or start it, on every worker."""
        if not self._workers:
            raise RuntimeError("the executor is shut down")
        first, *others = self._workers
        for worker in others:
            worker.submit(output)
        return first.submit(output)

    def forward(self, output: SchedulerOutput) -> UnsampledStep:
        """Run a step, or start it, on every worker, up to the logits."""
        if not self._workers:
            raise RuntimeError("the executor is shut down")
        return _UnsampledSteps([worker.forward(output) for worker in self._workers])

    def warm_up(self) -> int:
        """Make ready what would slow down first steps; returns for how many kinds of steps there was something to
        do."""
        return max((worker.warm_up() for worker in self._workers), default=0)

    def shutdown(self) -> None:
        """Drop the model and its cache."""
        for worker in self._workers:
            worker.shutdown()
        self._workers = ()


class _UnsampledSteps:
    """A step of every worker. All choose the same tokens, so the first one's count."""

    def __init__(self, steps: Sequence[UnsampledStep]) -> None:
        self._steps = steps

    def sample(self, masks: TokenMasks) -> PendingStep:
        """Choose the tokens."""
        first, *_ = [step.sample(masks) for step in self._steps]
        return first
