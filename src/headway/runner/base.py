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
    from headway.transfer.block_store import BlockTransfers


class UnsampledStep(Protocol):
    """A step that runs, or has run, up to its logits."""

    def sample(self, masks: TokenMasks) -> PendingStep:
        """Choose the tokens; those of the named requests from what their masks allow. Called once."""
        ...


class PagedModel(NamedTuple):
    """A model over its KV cache."""

    decoder: Decoder
    attention: AttentionBackend


class Runner(Protocol):
    """Runs planned steps in the order of submission. It appends each sampled token to its own copy of the request."""

    verifies_ahead: bool
    """Whether a step may be submitted before it is known how many drafts the one before has accepted: then it is the
    runner that knows how many tokens a request has, and that guesses the drafts that are given as -1."""

    transfers: BlockTransfers | None
    """What fetches and stores blocks beside the steps."""

    def submit(self, output: SchedulerOutput) -> PendingStep:
        """Run a step, or queue it on the device. A request that cannot enter the batch fails alone."""
        ...

    def forward(self, output: SchedulerOutput) -> UnsampledStep:
        """The same up to the logits. Nothing may be submitted before its tokens have been sampled."""
        ...

    def move(self, moves: BlockMoves) -> None:
        """Make the copies of these moves without a step."""
        ...

    def warm_up(self) -> int:
        """Do now what would make a first step of its kind slow, while nothing is in flight. Returns for how many kinds
        of steps there was something to do."""
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
    """Requests without a seed of their own draw theirs from this one and their id."""
    graphs: Literal["off", "lazy", "all"] = "lazy"
    """CUDA graphs: none; of each shape of a step when it comes up again; or of all shapes, by `warm_up`."""
    max_num_lines: int | None = None
    """Most places that a step chooses tokens at, where requests verify drafts; `None`: one for each request."""
    synthetic_acceptance: float | None = None
    """For benchmarks: so many drafted tokens are accepted at each place, whatever they are; see `StepDrafts`."""
    num_threads: int | None = None
    """Threads that torch gets for the time of a step on the CPU; `None`: as many as it has."""
