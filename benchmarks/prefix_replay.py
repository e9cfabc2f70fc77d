"""How much of real prompts the prefix cache saves, and which eviction order saves most when it is small.

Replays conversations, conversation trees and a block trace through the real scheduler and cache; the model is a
stand-in that answers what the data says, so that answers are cached as well. Three questions:

    found       with a cache that holds everything: tokens found, against the most that can be, which is counted here
                by comparing tokens, without digests, blocks or a scheduler
    the trace   hit rate at several sizes, against a plain LRU over the block ids of the trace
    eviction    with a cache of a tenth of what the workload fills: each policy, against the order that knows the future

The order that knows the future gives up the block whose next use is farthest away. A block is used whenever one below
it is, so that is always a leaf, and with blocks of one size no order does better (Belady).

    python benchmarks/prefix_replay.py DATA_FOLDER
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prefix_workloads import STEP_S, TracedRequest, Turn, chat_turns, conversations, trace, trace_turns, tree_paths

from headway.config import SchedulerConfig
from headway.core import KVCacheManager, PrefixCache, Request, Scheduler, SchedulerOutput, check_invariants
from headway.core.kv.blocks import CachedBlock, root_digest
from headway.core.kv.eviction import POLICIES, EvictionPolicy, create_eviction_policy
from headway.executor.fake import FakeExecutor

BLOCK_SIZE = 16
ROOT = root_digest(None)
ENOUGH_BLOCKS = 100_000  # for any of the workloads, whole
CHATS, TREES, TRACE = "mtbench101_all.jsonl", "oasst_en_100_tree.jsonl", "mooncake_conversation_first2000.jsonl"


@dataclass(frozen=True, slots=True)
class Outcome:
    num_input_tokens: int
    num_hit_tokens: int
    num_kept_blocks: int
    """Blocks in the cache at the end."""
    num_preemptions: int

    @property
    def rate(self) -> float:
        return self.num_hit_tokens / self.num_input_tokens


class Replay:
    """One run of a workload. The clock is virtual: a step takes the same time whatever is in it."""

    def __init__(self, turns: Sequence[Turn], *, num_blocks: int, policy: EvictionPolicy) -> None:
        self._turns = turns
        self._cache = PrefixCache(policy)
        self._scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=8192).resolve("cpu"),
            KVCacheManager(num_blocks=num_blocks, block_size=BLOCK_SIZE, prefix_cache=self._cache),
        )
        self._executor = FakeExecutor(self._answer)
        self._oracle = policy if isinstance(policy, FarthestNextUse) else None
        numbers = {turn: number for number, turn in enumerate(turns)}
        self._next: list[list[int]] = [[] for _ in turns]
        for turn in turns:
            if turn.after is not None:
                self._next[numbers[turn.after]].append(numbers[turn])
        self._arrivals = [(turn.arrival_s, number) for number, turn in enumerate(turns) if turn.after is None]

    def run(self) -> Outcome:
        """All turns, to the end of the last."""
        heapq.heapify(self._arrivals)
        requests: list[Request] = []
        now_s, num_steps = 0.0, 0
        while self._arrivals or self._scheduler.has_unfinished_requests:
            if not self._scheduler.has_unfinished_requests:
                now_s = max(now_s, self._arrivals[0][0])
            while self._arrivals and self._arrivals[0][0] <= now_s:
                requests.append(self._add(heapq.heappop(self._arrivals)[1]))
            self._step(now_s)
            now_s, num_steps = now_s + STEP_S, num_steps + 1
            if num_steps % 5000 == 0:
                check_invariants(self._scheduler)
        assert len(requests) == len(self._turns)
        return Outcome(
            num_input_tokens=sum(request.num_prompt_tokens for request in requests),
            num_hit_tokens=sum(request.num_cached_tokens for request in requests),
            num_kept_blocks=len(self._cache),
            num_preemptions=sum(request.num_preemptions for request in requests),
        )

    def _add(self, number: int) -> Request:
        turn = self._turns[number]
        request = Request(str(number), turn.prompt, max_tokens=len(turn.answer))
        self._scheduler.add_request(request)
        return request

    def _step(self, now_s: float) -> None:
        output = self._scheduler.schedule(now_s=now_s)
        if self._oracle is not None:
            self._oracle.see(output)
        for update in self._scheduler.update(output, self._executor.submit(output).result()):
            if update.finish_status is not None:
                for number in self._next[int(update.request_id)]:
                    heapq.heappush(self._arrivals, (self._turns[number].arrival_s, number))

    def _answer(self, request_id: str, num_tokens: int) -> int:
        turn = self._turns[int(request_id)]
        return turn.answer[num_tokens - len(turn.prompt)]


class FarthestNextUse:
    """Gives up what is not needed for longest, by the turns that are still to come. The limit for every policy."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._turns = turns
        self._uses: dict[bytes, deque[int]] = {ROOT: deque(range(len(turns)))}
        for number, digests in enumerate(map(_prompt_digests, turns)):
            for digest in digests:
                self._uses.setdefault(digest, deque()).append(number)

    def see(self, output: SchedulerOutput) -> None:
        """Turns that have been admitted are not to come any more."""
        for number in (int(new.request_id) for new in output.new_requests):
            for digest in (ROOT, *_prompt_digests(self._turns[number])):
                if number in self._uses[digest]:  # not so if it comes back from preemption
                    self._uses[digest].remove(number)

    def key(self, block: CachedBlock) -> float:
        if block.tail is None:
            return -next(iter(self._uses.get(block.digest, ())), math.inf)
        if block.num_hits:  # the copy goes on from it
            return -math.inf
        start = BLOCK_SIZE * block.depth
        end = start + len(block.tail)
        wanted = (
            number for number in self._uses.get(block.before, ()) if self._turns[number].prompt[start:end] == block.tail
        )
        return -next(wanted, math.inf)

    def found(self, block: CachedBlock) -> None:
        """Nothing to learn."""

    def evicted(self, key: float) -> None:
        """Nothing to learn."""


def _prompt_digests(turn: Turn) -> list[bytes]:
    num_blocks = (len(turn.prompt) - 1) // BLOCK_SIZE
    return Request("", turn.prompt, max_tokens=1).block_digests(BLOCK_SIZE, num_blocks)


# ---- counted independently --------------------------------------------------------------------------------------


def num_reusable_tokens(turns: Sequence[Turn]) -> int:
    """Prompt tokens in full blocks that an earlier turn has computed, found by comparing the tokens themselves. The
    last token of a prompt, and that of an answer, do not count: the one is always computed, the other never is."""
    places: dict[tuple[int, tuple[int, ...]], int] = {}  # (place in the tree, tokens of the next block) → its place
    num_reusable = 0
    for turn in turns:
        place = 0
        for block in _full_blocks(turn.prompt[:-1]):
            if (place, block) not in places:
                break
            place = places[place, block]
            num_reusable += BLOCK_SIZE
        place = 0
        for block in _full_blocks((turn.prompt + turn.answer)[:-1]):
            place = places.setdefault((place, block), len(places) + 1)
    return num_reusable


def _full_blocks(tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for end in range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE):
        yield tuple(tokens[end - BLOCK_SIZE : end])


def lru_rate(requests: Sequence[TracedRequest], num_blocks: int) -> float:
    """Hit rate of a plain LRU over the ids of the trace: no scheduler, one request after the other. Answers take room
    as well, and a request's first blocks count as used after its last ones."""
    recent: OrderedDict[tuple[int, int], None] = OrderedDict()
    num_hits = num_queried = 0
    for number, request in enumerate(requests):
        prompt = [(0, block_id) for block_id in request.block_ids]
        num_queried += BLOCK_SIZE * len(prompt) + 1
        num_hits += BLOCK_SIZE * sum(1 for _ in itertools.takewhile(recent.__contains__, prompt))
        answer = [(1 + number, place) for place in range(request.num_output_tokens // BLOCK_SIZE)]
        for block in reversed(prompt + answer):
            recent[block] = None
            recent.move_to_end(block)
        while len(recent) > num_blocks:
            recent.popitem(last=False)
    return num_hits / num_queried


# ---- the three questions ------------------------------------------------------------------------------------------


def compare_with_most(workloads: Mapping[str, Sequence[Turn]]) -> dict[str, int]:
    """Print what is found with a cache that holds all. Returns how many blocks each workload fills."""
    print("A cache that holds everything")
    print(f"{'workload':34}{'turns':>7}{'input':>11}{'reusable':>20}{'found':>20}{'of it':>8}")
    filled = {}
    for name, turns in workloads.items():
        num_input, num_reusable = sum(len(turn.prompt) for turn in turns), num_reusable_tokens(turns)
        found = replay(turns, num_blocks=ENOUGH_BLOCKS, policy="lru")
        filled[name] = found.num_kept_blocks
        print(
            f"{name:34}{len(turns):7,}{num_input:11,}"
            f"{num_reusable:12,} {num_reusable / num_input:7.2%}{found.num_hit_tokens:12,} {found.rate:7.2%}"
            f"{found.num_hit_tokens / num_reusable:8.2%}",
            flush=True,
        )
    return filled


def compare_with_trace(requests: Sequence[TracedRequest], num_filled: int) -> None:
    """Print hit rates on the trace beside those of the plain LRU."""
    print("\nThe trace at several sizes, LRU")
    print(f"{'cache':>14}{'blocks':>10}{'scheduler':>12}{'plain LRU':>12}{'points':>9}")
    turns = trace_turns(requests, BLOCK_SIZE)
    for share in (1.0, 0.5, 0.2, 0.1, 0.05):
        num_blocks = ENOUGH_BLOCKS if share == 1.0 else round(share * num_filled)
        ours, plain = replay(turns, num_blocks=num_blocks, policy="lru").rate, lru_rate(requests, num_blocks)
        name = "everything" if share == 1.0 else f"{share:.0%}"
        print(f"{name:>14}{num_blocks:10,}{ours:12.2%}{plain:12.2%}{100 * (ours - plain):+9.2f}", flush=True)


def compare_policies(workloads: Mapping[str, Sequence[Turn]], filled: Mapping[str, int], share: float) -> None:
    """Print hit rates of every policy with a small cache."""
    print(f"\nA cache of {share:.0%} of what the workload fills")
    print(f"{'workload':34}{'blocks':>8}" + "".join(f"{name:>10}" for name in (*POLICIES, "optimum")))
    for name, turns in workloads.items():
        num_blocks = round(share * filled[name])
        rates = [replay(turns, num_blocks=num_blocks, policy=policy).rate for policy in (*POLICIES, "optimum")]
        print(f"{name:34}{num_blocks:8,}" + "".join(f"{rate:10.2%}" for rate in rates), flush=True)


def replay(turns: Sequence[Turn], *, num_blocks: int, policy: str) -> Outcome:
    chosen = FarthestNextUse(turns) if policy == "optimum" else create_eviction_policy(policy)
    return Replay(turns, num_blocks=num_blocks, policy=chosen).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with the data sets")
    parser.add_argument("--at-once", type=int, nargs="+", default=[50, 200], help="conversations that go on at once")
    parser.add_argument("--share", type=float, default=0.1, help="size of the small cache")
    options = parser.parse_args()
    chats, paths = conversations(options.data / CHATS), tree_paths(options.data / TREES)
    traced = trace(options.data / TRACE, BLOCK_SIZE)
    workloads: dict[str, list[Turn]] = {}
    for num in options.at_once:
        workloads[f"chats, template, {num} at once"] = chat_turns(chats, render="template", num_at_once=num)
        workloads[f"chats, plain, {num} at once"] = chat_turns(chats, render="plain", num_at_once=num)
        workloads[f"tree paths, plain, {num} at once"] = chat_turns(paths, render="plain", num_at_once=num)
        workloads[f"trees, template, {num} at once"] = chat_turns(paths, render="template", num_at_once=num, once=True)
    workloads["block trace"] = trace_turns(traced, BLOCK_SIZE)
    filled = compare_with_most(workloads)
    compare_with_trace(traced, filled["block trace"])
    compare_policies(workloads, filled, options.share)


if __name__ == "__main__":
    main()
