"""Prefill and decode apart: which replicas do what, and where a prompt is computed.

`computes_elsewhere` says which prompts are computed on a prefill replica and travel from there as blocks. A prompt that
is computed where others generate makes all of these wait. One that is computed elsewhere makes none wait, but waits for
others there, and then for its blocks to come:

    here         queue here  + compute                   and everyone who generates here waits for the computing
    elsewhere    queue there + compute there + transfer  and for the copying in of blocks, which is a little

Seconds of waiting are added up, over the request itself and those who generate, and the smaller sum is taken; here, if
they are equal. Of those who generate at most `MOST_COUNTED` count: a queue on a prefill replica is also one for the
prompts that come next, of whom nothing is known yet, and without a limit a full batch would fill it for seconds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from headway.errors import ConfigError

TOGETHER = "together"
"""Instead of roles: every replica computes the prompts of its own requests."""

SHORT_TOKENS = 256
"""Up to this many prompt tokens are always computed where the answer is: beside a batch that generates they cost about
one step, and another replica would first have to be asked."""
MOST_COUNTED = 8
"""At most this many of the requests that generate count. Of 1 to 64, the mean time of whole requests was shortest about
here in simulations (8B on an H200; prompts of 1k and 4k, loads of 70% and 85%)."""
COPYING_SHARE = 0.1
"""Of the time of a transfer, what those who generate lose: blocks are copied into the device's memory beside steps."""
BLOCK_S = 2e-5
"""What both replicas have to do for a block beside sending its bytes: find, announce, insert."""


@dataclass(frozen=True)
class Roles:
    """How many replicas compute prompts only, and how many have requests from their arrival to their end."""

    num_prefill: int
    num_decode: int

    @staticmethod
    def parse(text: str) -> Roles:
        """From 'prefill=1,decode=3'."""
        found = re.fullmatch(r"prefill=([1-9]\d*),decode=([1-9]\d*)", text)
        if found is None:
            raise ConfigError(f"roles are given as prefill=P,decode=D, such as prefill=1,decode=3; not {text!r}.")
        return Roles(int(found[1]), int(found[2]))

    @property
    def num_replicas(self) -> int:
        return self.num_prefill + self.num_decode

    def __str__(self) -> str:
        return f"prefill={self.num_prefill},decode={self.num_decode}"


@dataclass(frozen=True)
class PrefillChoice:
    """What is known when a decode replica has been chosen for a request, of it and of the best prefill replica."""

    num_uncached: int
    """Tokens of the prompt that the decode replica does not have."""
    num_queued_prefill: int
    """Tokens of other prompts that the prefill replica has to compute first."""
    num_queued_decode: int
    """And the decode replica."""
    num_generating: int
    """Requests that have their first token, on the decode replica."""
    prefill_token_s: float
    """Seconds for a prompt token on the prefill replica."""
    decode_token_s: float
    """What a prompt token adds to a step of the decode replica, in seconds."""
    transfer_s: float
    """For all blocks that would travel."""
    num_blocks: int
    """How many blocks travel: whole ones only, so the last few tokens of a prompt are computed here in any case."""


def computes_elsewhere(choice: PrefillChoice) -> bool:
    """Whether the prompt is better computed on the prefill replica. More requests that generate, or a longer queue, on
    the decode replica never turn a yes into a no; nor a longer queue on the prefill replica, or a slower transfer, a no
    into a yes."""
    if choice.num_uncached <= SHORT_TOKENS or not choice.num_blocks:
        return False
    block_s = BLOCK_S * choice.num_blocks
    compute_s = choice.decode_token_s * choice.num_uncached
    here_s = choice.decode_token_s * choice.num_queued_decode + compute_s
    there_s = choice.prefill_token_s * (choice.num_queued_prefill + choice.num_uncached) + choice.transfer_s + block_s
    spared_s = max(compute_s - COPYING_SHARE * choice.transfer_s - block_s, 0.0)  # each of those who generate
    return there_s < here_s + min(choice.num_generating, MOST_COUNTED) * spared_s
