"""The collective operations between the ranks of a model: summing partial products and gathering logits.

    threads            ranks that are threads of one process, for tests
    shared-memory      processes of one machine, on its CPU
    gloo               the same over sockets, if the native kernels are missing
    nccl               processes with a GPU each
    symmetric-memory   processes that share a GPU, which NCCL refuses
    none               one rank alone: missing parts count as zero, to measure a shard without its peers

All ranks call the same methods in the same order and get the same bits, because every sum is added up in one order. So
they compute the same logits. A draw depends only on the request's seed and the position, so they also choose the same
tokens without communicating.
"""

from __future__ import annotations

import datetime
import functools
import mmap
import pickle
import threading
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from headway import native
from headway.layers.linear import AfterNorm, Delta, IntoResidual, Linear, Norm

_TIMEOUT_S = 600.0  # a first step may compile kernels on one rank and find them on another
_PLACE_BYTES = 2**20  # the most that a rank exchanges at a time
_MEETING_S = 60.0  # ranks that have started find each other within this
_FLAG_BYTES = 256  # of shared memory: a counter of each rank's arrivals


class Collectives(ABC):
    """One rank's side of the collectives. Called by one thread."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in `x` or in a new tensor."""

    @abstractmethod
    def all_gather(self, x: Tensor) -> Tensor:
        """The tensors of all ranks: [size, *x.shape]."""

    def abort(self) -> None:  # noqa: B027 - most have nothing to do
        """Make calls that wait for a missing rank fail with an error. Called by any thread."""

    def close(self) -> None:  # noqa: B027
        """Release what the ranks share."""


class Absent(Collectives):
    """Collectives of one rank without its peers, whose parts count as zero."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = x.new_zeros(self.size, *x.shape)
        gathered[self.rank] = x
        return gathered


class Meeting:
    """Where the ranks of one process meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.parts: list[Tensor | None] = [None] * size
        self.barrier = threading.Barrier(size, timeout=_TIMEOUT_S)


class ThreadCollectives(Collectives):
    """Ranks in threads of one process."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__(rank, meeting.size)
        self._meeting = meeting

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.all_gather(x).sum(0)

    def all_gather(self, x: Tensor) -> Tensor:
        meeting = self._meeting
        meeting.parts[self.rank] = x
        meeting.barrier.wait()
        gathered = torch.stack([part for part in meeting.parts if part is not None])
        meeting.barrier.wait()  # after this the buffers may be written again
        return gathered

    def abort(self) -> None:
        self._meeting.barrier.abort()


class SharedMemoryCollectives(Collectives):
    """Ranks in processes of one machine. float32 is summed by the native kernels, in the order of the ranks."""

    def __init__(self, rank: int, size: int, path: str) -> None:
        """`path` is a file that the first rank creates and all ranks map."""
        super().__init__(rank, size)
        self._native = native.load().released
        num_bytes = self._native.hw_meeting_bytes(size, _PLACE_BYTES)
        with open(path, "a+b" if rank == 0 else "r+b") as file:
            if rank == 0:
                file.truncate(num_bytes)
            self._mapped = mmap.mmap(file.fileno(), num_bytes)
        self._memory = torch.frombuffer(self._mapped, dtype=torch.uint8)
        self._meeting = (self._memory.data_ptr(), rank, size, _PLACE_BYTES)
        self._turn = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return self.all_reduce(x.float()).to(x.dtype)
        whole = x.contiguous()
        for start in range(0, whole.nbytes, _PLACE_BYTES):
            count = min(_PLACE_BYTES, whole.nbytes - start) // 4
            self._check(self._native.hw_ranks_sum(*self._meeting, self._next(), whole.data_ptr() + start, count))
        return whole

    def all_gather(self, x: Tensor) -> Tensor:
        part = x.contiguous()
        gathered = part.new_empty(self.size, *part.shape)
        for start in range(0, part.nbytes, _PLACE_BYTES):
            num_bytes = min(_PLACE_BYTES, part.nbytes - start)
            source, target = part.data_ptr() + start, gathered.data_ptr() + start
            self._check(
                self._native.hw_ranks_gather(*self._meeting, self._next(), source, num_bytes, target, part.nbytes)
            )
        return gathered

    def abort(self) -> None:
        self._native.hw_meeting_abort(self._memory.data_ptr())

    def _next(self) -> int:
        self._turn += 1
        return self._turn

    def _check(self, has_met: int) -> None:
        if not has_met:
            raise RuntimeError("another rank has ended")


class GroupCollectives(Collectives):
    """Ranks in processes, through a process group of torch's: gloo between CPUs, NCCL between GPUs."""

    def __init__(self, rank: int, size: int, group: Any) -> None:
        super().__init__(rank, size)
        self._group = group

    @classmethod
    def gloo(cls, rank: int, size: int, store: torch.distributed.Store) -> GroupCollectives:
        gloo: Any = torch.distributed.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = datetime.timedelta(seconds=_TIMEOUT_S)
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        return cls(rank, size, gloo(store, rank, size, options))

    @classmethod
    def nccl(cls, rank: int, size: int, store: torch.distributed.Store, device: torch.device) -> GroupCollectives:
        options = torch.distributed.ProcessGroupNCCL.Options()
        options._timeout = datetime.timedelta(seconds=_TIMEOUT_S)
        with torch.cuda.device(device):
            return cls(rank, size, torch.distributed.ProcessGroupNCCL(store, rank, size, options))

    def all_reduce(self, x: Tensor) -> Tensor:
        self._group.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty(self.size, *x.shape)
        self._group.allgather([list(gathered.unbind())], [x.contiguous()]).wait()
        return gathered

    def abort(self) -> None:
        if hasattr(self._group, "abort"):
            self._group.abort()

    def close(self) -> None:
        self._group = None


class SymmetricCollectives(Collectives):
    """Ranks in processes that share a GPU or whose GPUs read each other's memory. Each rank writes its part to memory
    that all can read, and every rank adds the parts up. torch's own symmetric memory is not used: with it, a process
    that had ranks before cannot connect to newly started ones."""

    def __init__(self, rank: int, size: int, store: torch.distributed.Store, device: torch.device, *, num_bytes: int):
        from headway.layers.triton_ops import meet  # it takes Triton

        super().__init__(rank, size)
        own = torch.zeros(_FLAG_BYTES + num_bytes, dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)  # finish the writes before other ranks read them
        store.set_timeout(datetime.timedelta(seconds=_MEETING_S))
        store.set(f"memory of {rank}", pickle.dumps(reduce_tensor(own)).hex())
        self._memories = [own if other == rank else _opened(store.get(f"memory of {other}")) for other in range(size)]
        self._flags = own[: 8 * size].view(torch.int64)
        addresses = torch.tensor([memory.data_ptr() for memory in self._memories], dtype=torch.int64, device=device)
        turn = torch.zeros(1, dtype=torch.int64, device=device)
        self._meet = functools.partial(meet, self._flags, addresses, turn, rank=rank)
        self._beside = torch.cuda.Stream(device)

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.all_gather(x).sum(0, dtype=torch.float32).to(x.dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        parts = [memory[_FLAG_BYTES : _FLAG_BYTES + x.nbytes].view(x.dtype) for memory in self._memories]
        parts[self.rank].copy_(x.reshape(-1))
        self._meet()
        gathered = torch.stack(parts).view(self.size, *x.shape)
        self._meet()  # after this the buffers may be written again
        return gathered

    def abort(self) -> None:
        with torch.cuda.stream(self._beside):
            self._flags.fill_(2**62)  # as if all ranks had arrived, any number of times

    def close(self) -> None:
        self._memories.clear()
        torch.cuda.ipc_collect()


def _opened(shared: bytes) -> Tensor:
    rebuild, arguments = pickle.loads(bytes.fromhex(shared.decode()))
    opened: Tensor = rebuild(*arguments)
    return opened


class SummedLinear(Linear):
    """A layer whose inputs are divided among the ranks. Each rank's product is a partial sum; these are added up before
    they are used. The first rank adds the bias."""

    def __init__(self, own: Linear, ranks: Collectives) -> None:
        self._own = own
        self._ranks = ranks
        self.in_features, self.out_features = own.in_features, own.out_features

    @property
    def own(self) -> Linear:
        return self._own

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self._own.tensors

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        product = self._ranks.all_reduce(self._own(x))
        return product if out is None else out.copy_(product)

    def into_residual(self, next_norm: Tensor) -> IntoResidual:
        if not self._own.adds_in_place:
            return super().into_residual(next_norm)
        add = self._own.into_residual(next_norm)

        def summed(residual: Tensor, x: Tensor) -> None:
            if self._ranks.rank == 0:  # it adds the residual; the others contribute only their parts
                self._sum_into(residual, add(residual, x))
            else:
                self._own(x, residual)
                self._sum_into(residual, None)

        return summed

    def gated_into_residual(self) -> tuple[range, IntoResidual] | None:
        own = self._own.gated_into_residual()
        if own is None:
            return None
        rows, add = own

        def summed(residual: Tensor, gate_up: Tensor) -> None:
            if self._ranks.rank:
                residual.zero_()
            self._sum_into(residual, add(residual, gate_up))

        return rows, summed

    def whole_mlp(self, gate_up: Linear, norm: Norm) -> AfterNorm | None:
        product = self._own.whole_mlp(gate_up, norm)
        return None if product is None else lambda residual, delta: self._ranks.all_reduce(product(residual, delta))

    def _sum_into(self, residual: Tensor, delta: Delta) -> None:
        if isinstance(delta, Tensor):
            residual.add_(delta)
        summed = self._ranks.all_reduce(residual)
        if summed is not residual:
            residual.copy_(summed)
