"""What a runner is: it keeps the rows of the requests in the batch and runs planned steps on one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from headway.core.kv.moves import BlockMoves
from headway.core.scheduler_output import PendingStep, SchedulerOutput
from headway.structured.guides import TokenMasks

if TYPE_CHECKING:
    import torch

    from headway.attention import AttentionBackend
    from headway.models.decoder import Decoder


class UnsampledStep(Protocol):
    """A step that runs, or has run, up to its logits."""

    def sample(self, masks: TokenMasks) -> PendingStep:
        """Choose the tokens. A request that `masks` names chooses only from the tokens its mask allows. Called once."""
        ...


class PagedModel(NamedTuple):
    """A model over its KV cache."""

    decoder: Decoder
    attention: AttentionBackend


class Runner(Protocol):
    """Runs planned steps in the order of submission. It appends each sampled token to its own copy of the request."""

    verifies_ahead: bool
    """Whether a step may be submitted before it is known how many drafts the previous step accepted. If so, the runner
    itself tracks how many tokens a request has, and it fills in the drafts that are given as -1."""

    def submit(self, output: SchedulerOutput) -> PendingStep:
        """Run a step, or queue it on the device. A request that cannot enter the batch fails alone."""
        ...

    def forward(self, output: SchedulerOutput) -> UnsampledStep:
        """Run a step up to its logits. No other step may be submitted until its tokens have been sampled."""
        ...

    def move(self, moves: BlockMoves) -> None:
        """Copy the blocks of these moves without running a step."""
        ...

    def warm_up(self) -> int:
        """Prepare each kind of step, so that its first run is not slow. Called while nothing is in flight. Returns how
        many kinds of steps needed preparation."""
        ...

    def shutdown(self) -> None:
        """Drop the model and its cache. Nothing may be submitted afterwards."""
        ...


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """The limits of a batch, and how its steps run."""

    device: torch.device
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    eos_token_ids: tuple[int, ...] = ()
    seed: int = 0
    """The seed of a request that gives none is derived from this seed and the request's id."""
    graphs: Literal["off", "lazy", "all"] = "lazy"
    """When CUDA graphs are captured: never; for a step shape when it is seen a second time; or for all shapes, in
    `warm_up`."""
    max_num_lines: int | None = None
    """The most positions a step samples at, which drafts increase. `None`: one for each request."""
    synthetic_acceptance: float | None = None
    """For benchmarks: accept this many drafted tokens per request, whatever they are; see `StepDrafts`."""
    num_threads: int | None = None
    """How many threads torch uses during a step on the CPU. `None`: torch's own setting."""
