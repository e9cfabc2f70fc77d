"""The carriers that bring the bytes of KV blocks from one engine process to another, with both of their ends.

    Places      in the server: memory with room for some blocks, each place with a number
    Source      in the client: reads blocks out of the places, or off the socket, into slots

    shm     places are memory that both processes map; its descriptor came over the Unix socket
    cuda    places are device memory, opened by CUDA IPC; slots are on the device too, or in host memory
    tcp     places are memory of the server alone; bytes follow the message, with a checksum each

A place's number changes before and after the place is written. If a reader finds another number after its copy than the
message said, its copy is invalid.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from headway.transfer.block_messages import (
    PAGE_BYTES,
    Carrier,
    CudaHandle,
    Offer,
    Piece,
    TransferError,
    checksum,
    receive_into,
)

if TYPE_CHECKING:
    from torch import Tensor

    from headway.transfer.block_store import Slot

Bytes = NDArray[np.uint8]


def bytes_of_numbers(num_places: int) -> int:
    """The size of the table with each place's number, in whole pages."""
    return -(-8 * num_places // PAGE_BYTES) * PAGE_BYTES


# ---- the server's end -----------------------------------------------------------------------------------------------


class Places:
    """The server's memory for blocks in transfer."""

    def __init__(self, carrier: Carrier, block_bytes: int, num_places: int, device: str) -> None:
        import torch

        self.carrier = carrier
        self.block_bytes = block_bytes
        self.num_places = num_places
        self.descriptor = -1
        numbers_bytes, data_bytes = bytes_of_numbers(num_places), num_places * block_bytes
        if carrier == "tcp":
            is_pinned = device.startswith("cuda")
            self.pieces = torch.empty(num_places, block_bytes, dtype=torch.uint8, pin_memory=is_pinned)
            self.numbers: NDArray[np.uint64] = np.zeros(num_places, dtype=np.uint64)
            return
        shared_bytes = numbers_bytes + (data_bytes if carrier == "shm" else 0)
        self.descriptor = os.memfd_create("headway-blocks", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, shared_bytes)
        memory = np.frombuffer(mmap.mmap(self.descriptor, shared_bytes), dtype=np.uint8)
        self.numbers = memory[: 8 * num_places].view(np.uint64)
        if carrier == "shm":
            self.pieces = torch.from_numpy(memory[numbers_bytes:].reshape(num_places, block_bytes))
        else:
            self.pieces = torch.empty(num_places, block_bytes, dtype=torch.uint8, device=device)

    def begin_write(self, places: Sequence[int]) -> None:
        """Mark the contents of places as invalid, with odd numbers."""
        for place in places:
            self.numbers[place] += np.uint64(1 + int(self.numbers[place]) % 2)

    def end_write(self, place: int) -> int:
        """Mark a place as valid again. Returns its new number."""
        self.numbers[place] += np.uint64(1)
        return int(self.numbers[place])

    def close(self) -> None:
        """Close the memory. Clients keep their mappings."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


# ---- the client's end -----------------------------------------------------------------------------------------------


class Source(Protocol):
    """The client's end of a carrier."""

    block_bytes: int
    gives_back: bool

    def copy_in(self, connection: socket.socket, pieces: Sequence[Piece], slots: Sequence[Slot]) -> Sequence[bool]:
        """Fill the slots with the pieces' bytes. Returns for each slot whether they are valid."""

    def close(self) -> None:
        """Release memory that belongs to the server."""


def source_of(offer: Offer, descriptors: Sequence[int], cuda_device: int | None) -> Source:
    """Create the source that reads the memory in a server's offer. `cuda_device`: the device of this process, if it has
    one. Raises `TransferError` for an unusable offer."""
    if offer.block_bytes < 1 or offer.num_places < 1:
        raise TransferError("it does not speak as Headway does")
    if offer.carrier == "tcp":
        return _FromNetwork(offer)
    if len(descriptors) != 1:
        raise TransferError("it has not sent its memory")
    if offer.carrier == "shm":
        return _FromMemory(offer, descriptors[0])
    if cuda_device is None or offer.cuda is None:
        raise TransferError("its blocks are on a GPU, and this process has none")
    return _FromDevice(offer, descriptors[0], cuda_device)


def _in_host_memory(slots: Sequence[Slot]) -> list[memoryview]:
    found = [slot for slot in slots if isinstance(slot, memoryview)]
    if len(found) < len(slots):
        raise TransferError("blocks arrive on the device here, and only by CUDA IPC (arrival_memory)")
    return found


class _FromNetwork:
    gives_back = False

    def __init__(self, offer: Offer) -> None:
        self.block_bytes = offer.block_bytes

    def copy_in(self, connection: socket.socket, pieces: Sequence[Piece], slots: Sequence[Slot]) -> Sequence[bool]:
        are_good = []
        for piece, slot in zip(pieces, _in_host_memory(slots), strict=True):
            receive_into(connection, slot)
            are_good.append(checksum(slot) == piece.number)
        return are_good

    def close(self) -> None:
        pass


class _Numbered:
    """The numbers of a server's places."""

    gives_back = True

    def __init__(self, offer: Offer, descriptor: int, num_bytes: int) -> None:
        if os.fstat(descriptor).st_size < num_bytes:
            raise TransferError("its memory is smaller than it says")
        self.block_bytes = offer.block_bytes
        self._num_places = offer.num_places
        self._memory = np.frombuffer(mmap.mmap(descriptor, num_bytes, prot=mmap.PROT_READ), dtype=np.uint8)
        self._numbers = self._memory[: 8 * offer.num_places].view(np.uint64)

    def check(self, pieces: Sequence[Piece]) -> None:
        """Raise `TransferError` if a piece names a place that does not exist."""
        if not all(0 <= piece.place < self._num_places for piece in pieces):
            raise TransferError("it names memory that it does not have")

    def are_unchanged(self, pieces: Sequence[Piece]) -> list[bool]:
        """Whether each place still holds the block that the message named."""
        return [int(self._numbers[piece.place]) == piece.number for piece in pieces]

    def close(self) -> None:
        """Drop the views. The mapping is freed with the last one."""
        del self._memory, self._numbers


class _FromMemory(_Numbered):
    def __init__(self, offer: Offer, descriptor: int) -> None:
        start = bytes_of_numbers(offer.num_places)
        super().__init__(offer, descriptor, start + offer.num_places * offer.block_bytes)
        self._rows: Bytes = self._memory[start:].reshape(offer.num_places, offer.block_bytes)

    def copy_in(self, connection: socket.socket, pieces: Sequence[Piece], slots: Sequence[Slot]) -> Sequence[bool]:
        self.check(pieces)
        for piece, slot in zip(pieces, _in_host_memory(slots), strict=True):
            np.copyto(np.frombuffer(slot, dtype=np.uint8), self._rows[piece.place])  # without Python's lock
        return self.are_unchanged(pieces)

    def close(self) -> None:
        del self._rows
        super().close()


def copy_rows(slots: Sequence[Slot], rows: Sequence[Tensor]) -> None:
    """Let the device copy its rows, uint8 [bytes of a block], to slots."""
    import torch

    targets = [torch.frombuffer(slot, dtype=torch.uint8) if isinstance(slot, memoryview) else slot for slot in slots]
    places = [(target.data_ptr(), row.data_ptr()) for target, row in zip(targets, rows, strict=True)]
    start = 0
    while start < len(rows):  # one copy for all contiguous rows, as each copy takes a while to begin
        pair, (to, of), count = (targets[start], rows[start]), places[start], 1
        size = len(pair[0])
        most = min((first.untyped_storage().nbytes() - first.storage_offset()) // size for first in pair)
        while count < most and places[start + count : start + count + 1] == [(to + count * size, of + count * size)]:
            count += 1
        target, source = (first.as_strided((count * size,), (1,)) for first in pair)
        target.copy_(source, non_blocking=True)
        start += count


class _FromDevice(_Numbered):
    """Lets the device copy into slots, in its own or pinned memory, in a separate stream."""

    def __init__(self, offer: Offer, descriptor: int, device: int) -> None:
        import torch

        super().__init__(offer, descriptor, bytes_of_numbers(offer.num_places))
        assert offer.cuda is not None
        torch.cuda.set_device(device)  # of this thread
        self._stream = torch.cuda.Stream(device)
        self._rows = open_cuda(offer.cuda, offer.num_places, offer.block_bytes, device=device).unbind(0)

    def copy_in(self, connection: socket.socket, pieces: Sequence[Piece], slots: Sequence[Slot]) -> Sequence[bool]:
        import torch

        self.check(pieces)
        with torch.cuda.stream(self._stream):
            copy_rows(slots, [self._rows[piece.place] for piece in pieces])
        self._stream.synchronize()
        return self.are_unchanged(pieces)

    def close(self) -> None:
        self._stream.synchronize()
        del self._rows
        super().close()


# ---- device memory of another process -------------------------------------------------------------------------------


def share_cuda(memory: Tensor) -> CudaHandle:
    """A handle with which one other process can open this memory, as long as it exists here."""
    return CudaHandle(*memory.untyped_storage()._share_cuda_()[:6])


def open_cuda(handle: CudaHandle, num_rows: int, row_bytes: int, *, device: int) -> Tensor:
    """Open the memory of a handle as uint8 [num_rows, row_bytes], for copies on this process's `device`. The GPU that
    has the memory need not be visible here. Pending writes to it are not waited for."""
    import torch

    storage = torch.UntypedStorage._new_shared_cuda(
        device,
        handle.handle,
        handle.num_bytes,
        handle.offset_bytes,
        handle.counter_handle,
        handle.counter_offset,
        b"",
        False,
    )
    opened = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return opened.set_(storage, 0, (num_rows, row_bytes), (row_bytes, 1))
