"""Roles of replicas where prefill and decode are divided, and the choice of where a prompt is computed.

`computes_elsewhere` decides which prompts are computed on a prefill replica and travel from there as blocks. A prompt
computed on a decode replica delays all requests that generate there. A prompt computed elsewhere delays none of them,
but waits for other prompts there, and then for the transfer of its blocks:

    here         queue here  + compute                   and everyone who generates here waits for the computing
    elsewhere    queue there + compute there + transfer  and for the copying in of blocks, which is a little

The seconds of waiting are summed over the request itself and the generating requests, and the smaller sum wins; a tie
means here. At most `MOST_COUNTED` generating requests count. A queue on a prefill replica also delays later prompts, of
which nothing is known yet, and without a limit a full batch would fill that queue for seconds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from headway.errors import ConfigError

TOGETHER = "together"
"""The option's value for no roles: every replica computes the prompts of its requests."""

SHORT_TOKENS = 256
"""Up to this many prompt tokens are always computed on the decode replica: beside its batch they cost about one step,
and a request to another replica takes time too."""
MOST_COUNTED = 8
"""At most this many of the generating requests count. Of 1 to 64, the mean time of whole requests was shortest about
here in simulations (8B on an H200; prompts of 1k and 4k, loads of 70% and 85%)."""
COPYING_SHARE = 0.1
"""The part of a transfer's time that generating requests lose, as blocks are copied into device memory during steps."""
BLOCK_S = 2e-5
"""Seconds per block that both replicas spend besides sending its bytes: to find, announce and insert it."""


@dataclass(frozen=True)
class Roles:
    """How many replicas only compute prompts, and how many answer requests."""

    num_prefill: int
    num_decode: int

    @staticmethod
    def parse(text: str) -> Roles:
        """Parse a text such as 'prefill=1,decode=3'. Raises `ConfigError`."""
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
    """The facts about a request's decode replica and the best prefill replica, from which the choice is made."""

    num_uncached: int
    """Tokens of the prompt that are not cached on the decode replica."""
    num_queued_prefill: int
    """Tokens of other prompts that the prefill replica has to compute first."""
    num_queued_decode: int
    """Tokens of other prompts that the decode replica has to compute first."""
    num_generating: int
    """Requests on the decode replica that have their first token."""
    prefill_token_s: float
    """Seconds for a prompt token on the prefill replica."""
    decode_token_s: float
    """What a prompt token adds to a step of the decode replica, in seconds."""
    transfer_s: float
    """Seconds of transfer for all blocks that would travel."""
    num_blocks: int
    """The number of blocks that would travel. Only full blocks do, so a prompt's last few tokens are always computed
    here."""


def computes_elsewhere(choice: PrefillChoice) -> bool:
    """Whether the prompt is better computed on the prefill replica. The result is monotone: more generating requests or
    a longer queue on the decode replica never change True to False, and a longer queue on the prefill replica or a
    slower transfer never changes False to True."""
    if choice.num_uncached <= SHORT_TOKENS or not choice.num_blocks:
        return False
    block_s = BLOCK_S * choice.num_blocks
    compute_s = choice.decode_token_s * choice.num_uncached
    here_s = choice.decode_token_s * choice.num_queued_decode + compute_s
    there_s = choice.prefill_token_s * (choice.num_queued_prefill + choice.num_uncached) + choice.transfer_s + block_s
    spared_s = max(compute_s - COPYING_SHARE * choice.transfer_s - block_s, 0.0)  # each of those who generate
    return there_s < here_s + min(choice.num_generating, MOST_COUNTED) * spared_s
