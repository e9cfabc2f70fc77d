"""Moves KV blocks while steps run: between host memory and disk or peers, and to the device ahead of their requests.

    loop ── take_ended() ──► pump ── fetch_done, store_done ──► scheduler     what has come may let requests enter
         ── begin(moves) ──►      ── fetches, stores ─────────► BlockTransfers
         ── wait(most_s) ──►                                                  while requests wait for nothing else
         ── close() ───────►                                                  what is kept goes to disk

A failed transfer only means that a block does not arrive, and its tokens are computed instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from headway.core import DiskIndex, Scheduler
from headway.core.kv.moves import BlockMoves
from headway.core.kv.tiered_cache import TieredCache
from headway.errors import EngineDeadError
from headway.executor import Executor
from headway.transfer.block_store import BlockTransfers, NoSlots

logger = logging.getLogger(__name__)

STORE_REST_S = 8.0
"""The longest that an engine may spend on storing its kept blocks when it ends."""
LOAD_LATEST_S = 2.0
"""The longest that an engine may spend on loading blocks from disk into host memory when it starts."""
_LOADED_AT_A_TIME = 64
_LONGEST_SETTLING_S = 10.0  # transfers for another scheduler may take this long to end


def create_pump(scheduler: Scheduler, executor: Executor, *, now: Callable[[], float]) -> BlockPump | None:
    """Create a pump, or return `None` if the scheduler has no tiers. If the executor has no transfers, each one fails
    at once."""
    tiers = scheduler.kv_cache.tiers
    if tiers is None:
        return None
    return BlockPump(scheduler, executor, tiers, executor.transfers or BlockTransfers(NoSlots()), now=now)


class BlockPump:
    """Connects a scheduler's tiers to an executor's transfers. The thread that makes the steps calls it."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        tiers: TieredCache,
        transfers: BlockTransfers,
        *,
        now: Callable[[], float],
    ) -> None:
        """The transfers may have served another scheduler before, whose blocks in host memory are dropped. Blocks on
        disk are indexed. Raises `RuntimeError` if transfers under way do not end."""
        self._scheduler = scheduler
        self._executor = executor
        self._tiers = tiers
        self._transfers = transfers
        self._now = now
        if not transfers.settle(_LONGEST_SETTLING_S):
            raise RuntimeError("transfers of blocks do not end")
        if transfers.disk is not None:
            tiers.host.disk = index = DiskIndex(transfers.disk.max_blocks)
            for digest in transfers.disk.digests():
                index.add(digest)
            self._load_latest()

    @property
    def has_news(self) -> bool:
        """Whether `take_ended` has something to process."""
        return self._transfers.has_news

    def take_ended(self) -> None:
        """Report ended transfers to the scheduler, and copy arrived blocks to the device for requests that still wait
        for others."""
        for ended in self._transfers.take():
            if ended.is_fetch:
                self._scheduler.fetch_done(ended.digest, ended.ok, seconds=ended.seconds)
            else:
                self._tiers.host.store_done(ended.digest, ended.ok)
        self._prefetch()
        index, disk = self._tiers.host.disk, self._transfers.disk
        if disk is not None and index is not None:
            added, lost = disk.take_changes()
            for digest in added:
                index.add(digest)
            for digest in lost:
                index.discard(digest)

    def begin(self, moves: BlockMoves, *, is_use: bool = True) -> None:
        """Begin the transfers of a plan. If that fails, they are all reported as failed. `is_use`: a request needs the
        fetched blocks."""
        try:
            self._transfers.begin(moves, is_use=is_use)
            return
        except EngineDeadError as error:  # which the next step says too
            logger.warning("blocks can be neither fetched nor stored: %s", error)
        except Exception:
            logger.exception("blocks can be neither fetched nor stored")
        for digest, _, _ in moves.fetched:
            self._scheduler.fetch_done(digest, False)
        for digest, _ in moves.stored:
            self._tiers.host.store_done(digest, False)

    def clear_disk(self) -> None:
        """Delete all blocks on disk, including those of other engines with the same model."""
        index, disk = self._tiers.host.disk, self._transfers.disk
        if index is not None and disk is not None:
            index.clear()
            disk.clear()

    def wait(self, most_s: float) -> None:
        """Wait until a transfer has ended, for at most `most_s`."""
        self._transfers.wait(most_s)

    def close(self) -> None:
        """Store the kept blocks on disk, for at most `STORE_REST_S`. Must be called when no step is in flight, before
        the executor is shut down."""
        if self._transfers.disk is None:
            return
        try:
            self._store_rest()
            self._transfers.disk.note_order(self._tiers.order_of_use)
        except EngineDeadError as error:
            logger.warning("kept blocks are not stored: %s", error)
        except Exception:
            logger.exception("blocks are lost that were to be stored")

    def _prefetch(self) -> None:
        moves = self._scheduler.kv_cache.prefetch()
        if moves.has_copies:
            try:
                self._copy(moves)
            except EngineDeadError:
                raise
            except Exception as error:
                logger.warning("blocks are not copied before their requests begin: %s", error)
        if moves.has_transfers:
            self.begin(moves)

    def _copy(self, moves: BlockMoves) -> None:
        """Make copies outside a step."""
        has_failed = True
        try:
            self._executor.move(moves)
            has_failed = False
        finally:
            self._tiers.landed(moves, has_failed=has_failed)

    def _load_latest(self) -> None:
        """Load the most recently used blocks from disk into host memory, since they are the likeliest to be needed
        first."""
        until_s, loaded = self._now() + LOAD_LATEST_S, list[bytes]()
        while (left_s := until_s - self._now()) > 0:
            if self._transfers.num_under_way:
                if not self._transfers.wait(left_s):
                    break  # the rest of them comes later, or never
                self.take_ended()
            elif wanted := self._tiers.fetch_latest(_LOADED_AT_A_TIME):
                loaded += wanted
                self.begin(self._scheduler.kv_cache.take_transfers(), is_use=False)
            else:
                break
        self._tiers.note_latest(loaded)

    def _store_rest(self) -> None:
        """Store the kept blocks in rounds of as many as host memory holds."""
        until_s, stats, kv_cache = self._now() + STORE_REST_S, self._tiers.host.stats, self._scheduler.kv_cache
        num_failed = stats.num_failed_stores
        while (left_s := until_s - self._now()) > 0:
            self.take_ended()
            if stats.num_failed_stores > num_failed:
                break
            self._tiers.store_rest()
            moves = kv_cache.take_moves()
            if moves.has_copies:
                self._copy(moves)
            if moves.has_transfers:
                self.begin(moves)
            if not moves.has_copies:
                if not self._transfers.num_under_way:
                    return
                self._transfers.wait(left_s)
        logger.warning("not all kept blocks could be stored")
