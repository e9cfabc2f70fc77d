"""Moves blocks beside the steps: between host memory and what is behind it, and to the device before it is their turn.

    loop ── take_ended() ──► pump ── fetch_done, store_done ──► scheduler     what has come may let requests enter
         ── begin(moves) ──►      ── fetches, stores ─────────► BlockTransfers
         ── wait(most_s) ──►                                                  while requests wait for nothing else
         ── close() ───────►                                                  what is kept goes to disk

Whatever goes wrong is a block that does not come: its tokens are computed.
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
"""How long the end of an engine may take for storing what it has kept."""
LOAD_LATEST_S = 2.0
"""How long the start of an engine may take for bringing blocks from disk to host memory."""
_LOADED_AT_A_TIME = 64
_LONGEST_SETTLING_S = 10.0  # transfers for another scheduler may take this long to end


def create_pump(scheduler: Scheduler, executor: Executor, *, now: Callable[[], float]) -> BlockPump | None:
    """`None` if the scheduler has no tiers. Where nothing can be transferred, whatever is asked for fails at once."""
    tiers = scheduler.kv_cache.tiers
    if tiers is None:
        return None
    return BlockPump(scheduler, executor, tiers, executor.transfers or BlockTransfers(NoSlots()), now=now)


class BlockPump:
    """Between a scheduler's tiers and an executor's transfers. Called by the thread that makes the steps."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        tiers: TieredCache,
        transfers: BlockTransfers,
        *,
        now: Callable[[], float],
    ) -> None:
        """The transfers may have been those of another scheduler, whose blocks are forgotten. What is on disk is
        known."""
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
        """Whether there is something for `take_ended`."""
        return self._transfers.has_news

    def take_ended(self) -> None:
        """Tell the scheduler of transfers that have ended, and copy to the device what has come for requests that wait
        for other blocks still."""
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
        """Begin the transfers of a plan. Whatever goes wrong, each of them ends. `is_use`: a request wants what is
        fetched."""
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

    def wait(self, most_s: float) -> None:
        """Until a transfer has ended, or so long."""
        self._transfers.wait(most_s)

    def close(self) -> None:
        """Bring what is kept to disk, as far as `STORE_REST_S` suffice. To be called when no step is in flight, before
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
        """Make copies without a step."""
        has_failed = True
        try:
            self._executor.move(moves)
            has_failed = False
        finally:
            self._tiers.landed(moves, has_failed=has_failed)

    def _load_latest(self) -> None:
        """What was used last is going to be asked for first, and is there sooner from host memory than from disk."""
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
        """As many blocks at a time as host memory holds."""
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
