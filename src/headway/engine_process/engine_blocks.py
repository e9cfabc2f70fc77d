"""The KV blocks of an engine, as they are served to other engine processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from headway.transfer.block_server import BlockAt

if TYPE_CHECKING:
    from torch import Tensor

    from headway.core import KVCacheManager
    from headway.transfer.host_blocks import HostBlocks


class EngineBlocks:
    """Finds an engine's blocks by digest, in its prefix cache and in host memory."""

    def __init__(self, kv_cache: KVCacheManager, memory: HostBlocks) -> None:
        self._kv_cache = kv_cache
        self._memory = memory

    @property
    def block_bytes(self) -> int:
        return self._memory.slot_bytes

    def find(self, digest: bytes) -> BlockAt | None:
        """Where a block is, if the engine has it. A block is in the cache only after its step has finished, and nothing
        writes to it there."""
        cache, tiers = self._kv_cache.prefix_cache, self._kv_cache.tiers
        if cache is not None and (found := cache.find([digest])):
            return BlockAt(False, found[0].block_id)
        slot = None if tiers is None else tiers.host.slot_of(digest)
        return None if slot is None else BlockAt(True, slot)

    def copy_out(self, blocks: Sequence[BlockAt], pieces: Tensor, places: Sequence[int]) -> Callable[[], None]:
        """Queue copies after the launched steps and before later ones."""
        found = list(zip(blocks, places, strict=True))
        return self._memory.copy_out(
            [(at.number, place) for at, place in found if not at.is_on_host],
            [(at.number, place) for at, place in found if at.is_on_host],
            pieces,
        )
