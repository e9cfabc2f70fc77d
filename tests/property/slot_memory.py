"""The KV memory as a runner sees it: what each slot holds, and whether a request reads back what it must.

The keys and values of a token depend on all tokens before it, so a slot holds a whole prefix, as a number: equal
numbers mean equal tokens from the first one on. Whose tokens they were does not matter.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

from headway.core import SchedulerOutput
from headway.core.kv.moves import BlockMoves

NOTHING = 0
"""The prefix without tokens. Also what a slot holds that was never written, and what a failed step leaves."""


class SlotMemory:
    """Follows plans as a runner does: moves, tables, tokens, writes; then reads everything that attention would."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots = [NOTHING] * (num_blocks * block_size)
        self.tables: dict[str, list[int]] = {}
        self.prefixes: dict[str, list[int]] = {}  # after each token of a request that is in the batch
        self.host: dict[int, list[int]] = {}  # slots of the host tier that were ever written
        self._numbers: dict[tuple[int, int], int] = {}
        self._numbers_of: dict[tuple[int, ...], list[int]] = {}  # of whole prefixes that were asked for
        self._writer: list[tuple[int, str] | None] = [None] * len(self.slots)  # the step and the request, of the last

    def run(self, output: SchedulerOutput, sampled: Mapping[str, int]) -> None:
        """Compute a planned step. The tokens that it samples are known here at once; a scheduler learns them later."""
        self.move_blocks(output.moves)
        for request_id in (*output.preempted_request_ids, *output.finished_request_ids):
            self.tables.pop(request_id, None)
        for new in output.new_requests:
            assert new.request_id not in self.tables, f"{new.request_id} enters twice"
            self.tables[new.request_id] = list(new.block_ids)
            self.prefixes[new.request_id] = []
            self._extend(new.request_id, (*new.prompt_token_ids, *new.output_token_ids))
        for share in output.scheduled:
            self.tables[share.request_id].extend(share.new_block_ids)
        num_owners = Counter(itertools.chain.from_iterable(self.tables.values()))
        for share in output.scheduled:
            end = share.num_computed_tokens + share.num_tokens
            written = self.tables[share.request_id][share.num_computed_tokens // self.block_size :]
            assert all(num_owners[block] == 1 for block in written), f"{share.request_id} writes into a shared block"
            self._write(output.step_id, share.request_id, share.num_computed_tokens, end)
        for share in output.scheduled:
            self._read(share.request_id, share.num_computed_tokens + share.num_tokens)
        for request_id, token in sampled.items():
            self._extend(request_id, (token,))

    def drop(self, output: SchedulerOutput) -> None:
        """A step could not be submitted: nothing of it is done, but it is known who has left."""
        for request_id in (*output.preempted_request_ids, *output.finished_request_ids):
            self.tables.pop(request_id, None)

    def fail(self, step_id: int, request_id: str) -> None:
        """What a step has written for a request was garbage."""
        for slot, writer in enumerate(self._writer):
            if writer == (step_id, request_id):
                self.slots[slot] = NOTHING

    def holds(self, block_id: int, tokens: tuple[int, ...]) -> bool:
        """Whether a block holds the last of these tokens, as many as lie in it."""
        first = (len(tokens) - 1) // self.block_size * self.block_size
        return self._known_numbers(tokens)[first:] == self._block(block_id)[: len(tokens) - first]

    def host_holds(self, slot: int, tokens: tuple[int, ...]) -> bool:
        """Whether a slot of the host tier holds the last of these tokens, a full block."""
        return self._known_numbers(tokens)[-self.block_size :] == self.host[slot]

    def numbers(self, tokens: Sequence[int], before: int = NOTHING) -> list[int]:
        """The prefix after each token."""
        numbers = []
        for token in tokens:
            before = self._numbers.setdefault((before, token), len(self._numbers) + 1)
            numbers.append(before)
        return numbers

    def _known_numbers(self, tokens: tuple[int, ...]) -> list[int]:
        if tokens not in self._numbers_of:
            self._numbers_of[tokens] = self.numbers(tokens)
        return self._numbers_of[tokens]

    def _extend(self, request_id: str, tokens: Sequence[int]) -> None:
        prefixes = self.prefixes[request_id]
        prefixes += self.numbers(tokens, prefixes[-1] if prefixes else NOTHING)

    def move_blocks(self, moves: BlockMoves) -> None:
        """Out one by one, then across, all of them read before any is written, then in."""
        targets = [block for _, block in (*moves.copied, *moves.moved_in)]
        assert len(set(targets)) == len(targets), "two blocks are moved to one place"
        self.host |= {slot: self._block(block) for block, slot in moves.moved_out}
        for target, content in [(target, self._block(source)) for source, target in moves.copied]:
            self._set_block(target, content)
        for slot, block in moves.moved_in:
            self._set_block(block, self.host[slot])

    def _block(self, block_id: int) -> list[int]:
        return self.slots[block_id * self.block_size : (block_id + 1) * self.block_size]

    def _set_block(self, block_id: int, content: list[int]) -> None:
        place = slice(block_id * self.block_size, (block_id + 1) * self.block_size)
        self.slots[place] = content
        self._writer[place] = [None] * self.block_size

    def _write(self, step_id: int, request_id: str, start: int, end: int) -> None:
        table, prefixes = self.tables[request_id], self.prefixes[request_id]
        for position in range(start, end):
            slot = table[position // self.block_size] * self.block_size + position % self.block_size
            self.slots[slot] = prefixes[position]
            self._writer[slot] = (step_id, request_id)

    def _read(self, request_id: str, end: int) -> None:
        found = [number for block in self.tables[request_id] for number in self._block(block)]
        assert found[:end] == self.prefixes[request_id][:end], f"{request_id} reads something else than its own tokens"
