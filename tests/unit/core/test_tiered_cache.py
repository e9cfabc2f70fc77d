"""Where a block is, from the first wish for it to the device: one state at a time, and a decision that changes nothing
of the request."""

from __future__ import annotations

import pytest

from headway.core import DiskIndex, HostTier, KVCacheManager, PrefixCache, Request
from headway.core.kv.host_tier import PartState
from headway.core.kv.moves import BlockMoves
from headway.core.kv.tiered_cache import FetchKind, TieredCache
from headway.core.request_options import RequestOptions

BLOCK_SIZE = 4
THERE = RequestOptions(blocks_at="there:1")


def make(*, num_slots: int = 8, num_blocks: int = 8) -> tuple[KVCacheManager, TieredCache]:
    kv_cache = KVCacheManager(
        num_blocks=num_blocks, block_size=BLOCK_SIZE, prefix_cache=PrefixCache(), host_tier=HostTier(num_slots)
    )
    assert kv_cache.tiers is not None
    return kv_cache, kv_cache.tiers


def a_request(name: str = "a", num_blocks: int = 2, options: RequestOptions = THERE) -> tuple[Request, list[bytes]]:
    request = Request(name, [ord(name)] * (BLOCK_SIZE * num_blocks + 1), max_tokens=1, options=options)
    return request, request.block_digests(BLOCK_SIZE, num_blocks)[:num_blocks]


def states(tiers: TieredCache, digests: list[bytes]) -> list[PartState | None]:
    return [tiers.host.state_of(digest) for digest in digests]


def test_a_block_goes_from_state_to_state() -> None:
    kv_cache, tiers = make()
    request, digests = a_request()
    assert states(tiers, digests) == [None, None]
    decision = tiers.fetch(request, token_s=None)
    assert decision.kind is FetchKind.WAIT and decision.digests == digests
    assert states(tiers, digests) == [PartState.FETCHING] * 2 and kv_cache.take_transfers().has_transfers
    tiers.host.fetch_done(digests[0], True)
    tiers.may_prefetch(digests[0])
    assert states(tiers, digests) == [PartState.ON_HOST, PartState.FETCHING]
    moves = kv_cache.prefetch()
    assert len(moves.moved_in) == 1 and states(tiers, digests) == [PartState.PREFETCHED, PartState.FETCHING]
    tiers.landed(moves, has_failed=False)
    tiers.host.fetch_done(digests[1], True)
    table, num_computed = kv_cache.admit(request)
    assert num_computed == 8 and table[0] == moves.moved_in[0][1], "it has the block that was prefetched"
    assert states(tiers, digests) == [PartState.ON_HOST] * 2 and not tiers.host.pins and not tiers.num_prefetched
    assert [block for _, block in kv_cache.take_moves().moved_in] == [table[1]]
    tiers.check_invariants()


@pytest.mark.parametrize("why", ["failed", "needed by others", "request gone"])
def test_what_was_prefetched_is_given_back(why: str) -> None:
    kv_cache, tiers = make(num_blocks=4)
    request, digests = a_request()
    tiers.fetch(request, token_s=None)
    tiers.host.fetch_done(digests[0], True)
    tiers.may_prefetch(digests[0])
    moves = kv_cache.prefetch()
    assert tiers.num_prefetched == 1 and kv_cache.num_available_blocks == 4
    tiers.landed(moves, has_failed=why == "failed")
    if why == "needed by others":
        assert kv_cache.device.take(4) is not None
    elif why == "request gone":
        tiers.release(request)
    assert not tiers.num_prefetched and tiers.host.state_of(digests[0]) is PartState.ON_HOST
    tiers.check_invariants()


def test_prefetching_takes_no_promised_block() -> None:
    kv_cache, tiers = make(num_blocks=2)
    running, _ = a_request("r", 1)
    kv_cache.admit(running)
    request, digests = a_request()
    tiers.fetch(request, token_s=None)
    tiers.host.fetch_done(digests[0], True)
    tiers.may_prefetch(digests[0])
    assert kv_cache.num_promised_blocks == 2 and kv_cache.prefetch() == BlockMoves()


def test_what_a_request_should_do_is_said_and_not_noted() -> None:
    _, tiers = make(num_slots=2)
    plain, digests = a_request("p", options=RequestOptions())
    assert tiers.fetch(plain, token_s=None).kind is FetchKind.NOTHING, "there is no disk"
    tiers.host.disk = disk = DiskIndex(10)
    assert tiers.fetch(plain, token_s=None).kind is FetchKind.NOTHING, "nor anything on it"
    disk.add(digests[0])
    disk.note_fetched(1.0)
    assert tiers.fetch(plain, token_s=0.1).kind is FetchKind.COMPUTE
    assert not plain.has_fetched
    assert tiers.fetch(a_request("a")[0], token_s=None).kind is FetchKind.WAIT
    assert tiers.fetch(a_request("b")[0], token_s=None).kind is FetchKind.BLOCKED, "all slots are pinned"
    assert tiers.fetch(plain, token_s=10.0).kind is FetchKind.BLOCKED
    tiers.check_invariants()
