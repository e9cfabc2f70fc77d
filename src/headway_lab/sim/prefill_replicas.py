"""Simulated replicas that compute prompts for others, and the links over which the blocks of these prompts travel.

The link out of a replica sends the blocks of one prompt after those of another, and so does the link into one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from headway.core import Request
from headway.core.step_work import StepWork
from headway.front.roles import PrefillChoice, computes_elsewhere
from headway.front.router import Router
from headway.settings import SchedulerSettings
from headway_lab.sim.calibration import Machine
from headway_lab.sim.replica import Replica


@dataclass(frozen=True)
class Transfer:
    """Blocks of a prompt that are sent from one replica to another."""

    place: int
    """The place of the replica that receives them."""
    asked_s: float
    from_s: float
    """When both links were free."""
    to_s: float
    num_blocks: int


class PrefillReplicas:
    """Replicas that compute prompts for others, and the links between them."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        num_others: int,
        router: str,
        machine: Machine,
        scheduler: SchedulerSettings,
    ) -> None:
        self.replicas = replicas
        self.others: Sequence[Replica] = ()
        self.transfers: list[Transfer] = []
        self._block_size, self._token_s = machine.block_size, _prompt_token_s(machine, scheduler)
        self._link, self._bytes_per_block = machine.link, machine.bytes_per_block
        self.router = Router(router, block_size=machine.block_size, counts_uncached=True)
        for place, replica in enumerate(replicas):
            self.router.add(place, max_num_seqs=scheduler.max_num_seqs)
            replica.follow_cache()
        self._computing: dict[str, tuple[int, Request]] = {}  # with the place where they continue
        self._last_blocks: set[bytes] = set()  # of prompts that were computed here
        self._out_free_s = [0.0] * len(replicas)
        self._in_free_s = [0.0] * num_others

    def choose(self, request: Request, router: Router, to: int) -> int | None:
        """Which prefill replica is to compute the prompt of a request that was routed to another one; `None` if the
        latter computes it itself."""
        name, num_tokens = request.request_id, request.num_prompt_tokens
        num_full = (num_tokens - 1) // self._block_size
        digests = request.block_digests(self._block_size, num_full)[:num_full]
        place = self.router.route(name, num_prompt_tokens=num_tokens, num_answer_tokens=1, digests=lambda: digests)
        num_uncached = router.num_uncached(name)
        num_blocks = num_full - (num_tokens - num_uncached) // self._block_size
        choice = PrefillChoice(
            num_uncached=num_uncached,
            # A beginning that is cached there counts as if its queue were shorter.
            num_queued_prefill=max(self.router.num_prompt_tokens(place) - num_uncached, 0),
            num_queued_decode=router.num_prompt_tokens(to) - num_uncached,
            num_generating=router.num_generating(to),
            prefill_token_s=self.replicas[place].token_s or self._token_s,
            decode_token_s=self.others[to].token_s or self._token_s,
            transfer_s=self._link.seconds(num_blocks * self._bytes_per_block),
            num_blocks=num_blocks,
        )
        if not computes_elsewhere(choice):
            self.router.end(name)
            return None
        router.note_elsewhere(name, num_tokens - num_full * self._block_size)
        self._computing[name] = to, request
        return place

    def computed(self, place: int, name: str) -> tuple[int, Request]:
        """The place where a computed request continues, and the request with the address of its blocks."""
        to, request = self._computing.pop(name)
        num_full = (request.num_prompt_tokens - 1) // self._block_size
        self._last_blocks.add(request.block_digests(self._block_size, num_full)[num_full - 1])
        options = dataclasses.replace(request.options, blocks_at=str(place))
        max_tokens = request.max_total_tokens - request.num_prompt_tokens
        return to, Request(name, request.prompt_token_ids, max_tokens=max_tokens, options=options)

    def fetch(self, to: int, source: str, digests: Sequence[bytes]) -> list[float]:
        """When the blocks that a replica asks for now have arrived. All blocks of a prompt are sent at once, as soon as
        both links are free."""
        place, now_s, num_blocks, ends_s = int(source), self.others[to].now_s, 0, list[float]()
        for number, digest in enumerate(digests, start=1):
            num_blocks += 1
            if digest not in self._last_blocks and number < len(digests):
                continue
            from_s = max(now_s, self._out_free_s[place], self._in_free_s[to])
            to_s = from_s + self._link.seconds(num_blocks * self._bytes_per_block)
            self._out_free_s[place] = self._in_free_s[to] = to_s
            self.transfers.append(Transfer(to, now_s, from_s, to_s, num_blocks))
            ends_s += [to_s] * num_blocks
            num_blocks = 0
        return ends_s


def _prompt_token_s(machine: Machine, scheduler: SchedulerSettings) -> float:
    """Seconds for a token of a large prompt, which replicas use before their first step."""
    num_tokens = min(scheduler.max_num_batched_tokens, machine.max_model_len)
    return machine.cost.seconds(StepWork(num_tokens, 1, 1, 0, 1, num_tokens * num_tokens / 2)) / num_tokens
