"""One model over several workers, each with a part of every layer (tensor parallel).

    rank 0        this process: the engine's own thread
    rank 1 ...    processes of their own: `rank_process`, or threads, in tests

Each step's plan is sent to all ranks once; they compute and sum (`layers/collectives.py`), and all of them choose the
same tokens, so no token is ever sent. Only rank 0's are read. Ranks have the same rows and the same blocks, each with
its own heads in them. What is outside the engine (a folder of blocks) is rank 0's affair: the others only say when
none of their copies has to do with a slot any more.

A rank that fails in any way ends, and one that gives no sign of life is ended (`rank_life`). The others would wait for
it, so the engine has failed then: `EngineDeadError` says which rank it was, and whoever runs the engine starts it
again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pickle
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from headway import native
from headway.child_process import python_command
from headway.config import ResolvedConfig
from headway.core.kv.moves import BlockMoves
from headway.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from headway.errors import ConfigError, EngineDeadError, HeadwayError
from headway.executor import PendingStep, UnsampledStep
from headway.executor.rank_life import SILENT_S, LifeWatch
from headway.layers.collectives import (
    Absent,
    Collectives,
    GroupCollectives,
    Meeting,
    SharedMemoryCollectives,
    SymmetricCollectives,
    ThreadCollectives,
)
from headway.loader import open_checkpoint
from headway.models.assembly import Progress
from headway.models.checkpoint import Checkpoint
from headway.models.decoder_config import Shard
from headway.runner import Runner
from headway.structured.guides import TokenMasks
from headway.transfer.block_store import BlockTransfers, Slots
from headway.transfer.host_blocks import SharedSlots
from headway.worker.memory_plan import MemoryPlan
from headway.worker.model_worker import Allocated, ModelWorker

if TYPE_CHECKING:
    from headway.transfer.block_store import Slot

logger = logging.getLogger(__name__)

_END_S = 2.0
"""All ranks have this long together to end by themselves, which is less than an engine process has to exit."""
_NAME_S = 2.0  # that a dead rank gets to be noticed, when a sum has failed


@dataclass(frozen=True)
class RankStart:
    """All that a rank has to know."""

    rank: int
    size: int
    config: ResolvedConfig
    model: str
    eos_token_ids: tuple[int, ...]
    collectives: str
    store: str
    """A file through which the ranks find each other."""
    memory: str
    """A file that is their shared memory."""
    slots: int
    """A descriptor: memory for their blocks on the host, if those go further; -1 if not."""
    log_level: int

    @property
    def max_in_flight(self) -> int:
        return 2 if self.config.device.async_scheduling else 1

    def join(self, meeting: Meeting | None) -> Collectives:
        """Meet the other ranks; waits for them."""
        if self.collectives == "none":
            return Absent(self.rank, self.size)
        if meeting is not None:
            return ThreadCollectives(self.rank, meeting)
        if self.collectives == "shared-memory":
            return SharedMemoryCollectives(self.rank, self.size, self.memory)
        store = torch.distributed.FileStore(self.store, self.size)
        if self.collectives == "gloo":
            return GroupCollectives.gloo(self.rank, self.size, store)
        device = torch.device("cuda", torch.cuda.current_device())
        if self.collectives == "nccl":
            return GroupCollectives.nccl(self.rank, self.size, store, device)
        limits = self.config.scheduler
        # The largest parts: activations of a step, and logits.
        vocab = open_checkpoint(self.model, self.config.model.load_format).config
        num_tokens = max(limits.max_num_batched_tokens, limits.max_num_lines)
        widest = max(num_tokens * vocab.hidden_size, limits.max_num_lines * vocab.vocab_size)
        return SymmetricCollectives(self.rank, self.size, store, device, num_bytes=4 * widest)

    def choose_device(self) -> None:
        """Each rank has a GPU, or all have the same."""
        if self.config.device.kind == "cuda":
            torch.cuda.set_device(self.rank % torch.cuda.device_count() if self.collectives != "none" else 0)


class RanksExecutor:
    """Rank 0, and the way to the others: an `Executor`."""

    def __init__(self, start: RankStart, checkpoint: Checkpoint, draft: Checkpoint | None, progress: Progress | None):
        Shard.of(checkpoint.config, 0, start.size)  # refuses before a process is started
        self._lost: str | None = None
        self._is_shut_down = False
        memory = start.join(None) if start.collectives == "shared-memory" else None  # there before others look for it
        self._peers = _start_peers(start, self._note_lost)
        try:
            self._collectives = memory or start.join(self._peers.meeting)
            worker = _loaded(start, checkpoint, draft, self._collectives, progress)
            own = _Ready(worker.plan(worker.profile()), _kernels(worker))
            plan = _agreed([own, *self._peers.receive()], num_ranks=start.size)
            self._peers.send(plan)
            ready = _allocated(start, worker, plan)
            self.plan, self._runner = ready.plan, ready.runner
            self._peers.receive()
            self._peers.note_ready()
        except BaseException as error:
            self._peers.kill()
            if isinstance(error, Exception) and not isinstance(error, HeadwayError):
                raise EngineDeadError(
                    f"{start.size} ranks could not be made ready: {error!r}. {self._lost or ''}"
                ) from error
            raise
        self.max_in_flight = start.max_in_flight
        self.transfers: BlockTransfers | None = None
        if ready.transfers is not None and ready.transfers.disk is not None:
            slots = _RankedSlots(ready.transfers.slots, self._peers)
            self.transfers = BlockTransfers(slots, disk=ready.transfers.disk)
        self.verifies_ahead = self._runner.verifies_ahead
        # Each thread has a current device of its own; steps belong to that of the thread that loads the model.
        self._cuda_device = torch.cuda.current_device() if start.config.device.kind == "cuda" else None

    @classmethod
    def from_config(
        cls,
        config: ResolvedConfig,
        checkpoint: Checkpoint,
        *,
        model: str,
        eos_token_ids: tuple[int, ...],
        draft: Checkpoint | None = None,
        progress: Progress | None = None,
    ) -> RanksExecutor:
        """Load the model, a part on every rank. `model`: where the checkpoint is, for the other ranks."""
        size = config.device.tensor_parallel_size
        collectives = _choose_collectives(config)
        if config.device.kind == "cpu":
            num_threads = max(1, (config.device.num_threads or len(os.sched_getaffinity(0))) // size)
            config = dataclasses.replace(config, device=dataclasses.replace(config.device, num_threads=num_threads))
        in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        folder = Path(tempfile.mkdtemp(prefix="headway-ranks-", dir=in_memory))
        # Not a file there: containers have little room for those.
        slots = os.memfd_create("headway-slots", os.MFD_CLOEXEC) if config.cache.disk_cache else -1
        try:
            start = RankStart(
                rank=0,
                size=size,
                config=config,
                model=model,
                eos_token_ids=eos_token_ids,
                collectives=collectives,
                store=str(folder / "store"),
                memory=str(folder / "memory"),
                slots=slots,
                log_level=logging.getLogger("headway").getEffectiveLevel(),
            )
            start.choose_device()
            return cls(start, checkpoint, draft, progress)
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # they have found each other
            if slots >= 0:
                os.close(slots)

    def submit(self, output: SchedulerOutput) -> PendingStep:
        """Run a step on all ranks, or start it."""
        return _RankedStep(self, self._run("submit", output, lambda runner: runner.submit(output)))

    def forward(self, output: SchedulerOutput) -> UnsampledStep:
        """Run a step on all ranks, or start it, up to the logits."""
        return _RankedForward(self, self._run("forward", output, lambda runner: runner.forward(output)))

    def move(self, moves: BlockMoves) -> None:
        """Copy blocks without a step, on all ranks."""
        self._run("move", moves, lambda runner: runner.move(moves))

    def warm_up(self) -> int:
        """Make ready on all ranks what would slow down first steps."""
        if self._is_shut_down:
            return 0
        found: int = self._run("warm_up", None, lambda runner: runner.warm_up())
        return found

    def shutdown(self) -> None:
        """End the other ranks, and drop the model and its cache."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        if self.transfers is not None:
            self.transfers.close()
            self.transfers = None
        self._peers.end()
        self._runner.shutdown()
        with contextlib.suppress(Exception):
            self._collectives.close()

    def sample(self, step: UnsampledStep, masks: TokenMasks) -> PendingStep:
        """Choose the tokens of the last `forward`, on all ranks."""
        return _RankedStep(self, self._run("sample", masks, lambda _: step.sample(masks)))

    def result(self, pending: PendingStep) -> ModelRunnerOutput:
        """Wait for rank 0, which has waited for the others' parts."""
        try:
            result = pending.result()
            if self._lost is not None:  # what it was to add is missing
                raise EngineDeadError(self._lost)
            return result
        except Exception as error:
            dead = self._failed(error)
            raise dead from dead.__cause__

    def _run(self, kind: str, payload: Any, run: Callable[[Runner], Any]) -> Any:
        if self._is_shut_down:
            raise RuntimeError("the executor is shut down")
        if self._lost is not None:
            raise EngineDeadError(self._lost)
        if self._cuda_device is not None and torch.cuda.current_device() != self._cuda_device:
            torch.cuda.set_device(self._cuda_device)
        try:
            self._peers.send((kind, payload))
            return run(self._runner)
        except Exception as error:
            dead = self._failed(error)
            raise dead from dead.__cause__

    def _failed(self, error: Exception) -> EngineDeadError:
        """Ranks do not agree any more. The one that died first is to blame, if one did; then the error of rank 0, which
        waited for it, says nothing."""
        self._peers.await_deaths(_NAME_S)
        self._peers.kill()
        cause = None if self._lost is not None else error
        if self._lost is None:
            self._lost = f"rank 0 failed: {type(error).__name__}: {error}"
        dead = EngineDeadError(f"A step over {self._peers.size} ranks failed, and the engine with it: {self._lost}.")
        dead.__cause__ = cause
        return dead

    def _note_lost(self, what: str) -> None:
        """A rank has ended by itself; called by the thread that watches it."""
        if self._lost is None and not self._is_shut_down:
            self._lost = what
            logger.error("%s; the engine ends", what)
        if hasattr(self, "_collectives"):
            self._collectives.abort()


class _RankedStep:
    def __init__(self, executor: RanksExecutor, pending: PendingStep) -> None:
        self._executor = executor
        self._pending = pending

    def result(self) -> ModelRunnerOutput:
        return self._executor.result(self._pending)


class _RankedForward:
    def __init__(self, executor: RanksExecutor, step: UnsampledStep) -> None:
        self._executor = executor
        self._step = step

    def sample(self, masks: TokenMasks) -> PendingStep:
        return self._executor.sample(self._step, masks)


class _RankedSlots:
    """The slots of all ranks: `Slots`."""

    def __init__(self, own: Slots, peers: _Peers) -> None:
        self._own = own
        self._peers = peers

    def bytes_of(self, slot: int) -> Slot:
        return self._own.bytes_of(slot)

    def settle(self, slots: Iterable[int]) -> None:
        """Wait for the copies of all ranks, behind all that they were told to do."""
        settled = tuple(slots)
        self._peers.send(("settle", settled))
        self._own.settle(settled)
        self._peers.receive()


def _choose_collectives(config: ResolvedConfig) -> str:
    """What there is for these devices; `ConfigError` for what cannot work."""
    chosen, size = config.device.collectives, config.device.tensor_parallel_size
    if config.device.kind == "cpu":
        if chosen in ("nccl", "symmetric-memory"):
            raise ConfigError(f"collectives '{chosen}' are for CUDA devices; use 'shared-memory' or 'auto' on the CPU.")
        if chosen == "shared-memory" and not native.is_available():
            raise ConfigError("collectives 'shared-memory' need the native kernels, which cannot be built; use 'gloo'.")
        if chosen == "auto":
            return "shared-memory" if native.is_available() else "gloo"
        return chosen
    num_devices = torch.cuda.device_count()
    if chosen == "auto":
        chosen = "nccl" if num_devices >= size else "symmetric-memory"
    if chosen == "none":
        return chosen
    if chosen in ("shared-memory", "gloo", "threads"):
        raise ConfigError(f"collectives '{chosen}' are for the CPU; use 'nccl', 'symmetric-memory' or 'auto' on CUDA.")
    if num_devices not in (1, *range(size, num_devices + 1)) or (chosen == "nccl" and num_devices < size):
        raise ConfigError(
            f"tensor_parallel_size {size} needs as many CUDA devices, and there are {num_devices}. On a single one "
            "ranks can share it with collectives 'symmetric-memory', which is for tests."
        )
    if num_devices < size:
        logger.warning("%d ranks share one GPU, which takes turns: for tests, not for speed", size)
        if config.cache.kv_cache_memory is None and config.cache.num_kv_blocks is None:
            raise ConfigError("Ranks that share a GPU cannot tell what is theirs: give kv_cache_memory.")
    return chosen


def _loaded(
    start: RankStart,
    checkpoint: Checkpoint,
    draft: Checkpoint | None,
    collectives: Collectives,
    progress: Progress | None = None,
) -> ModelWorker:
    worker = ModelWorker(start.config, checkpoint.config, eos_token_ids=start.eos_token_ids, ranks=collectives)
    worker.load(checkpoint, progress, draft=draft)
    return worker


def _allocated(start: RankStart, worker: ModelWorker, agreed: _Agreed) -> Allocated:
    if start.slots < 0:
        return worker.allocate(agreed.plan)
    return worker.allocate(agreed.plan, SharedSlots(start.slots, agreed.part_bytes, start.rank))


class _Ready(NamedTuple):
    """What a rank says when it has loaded its part."""

    plan: MemoryPlan
    kernels: str


class _Agreed(NamedTuple):
    """What all ranks lay out."""

    plan: MemoryPlan
    part_bytes: tuple[int, ...]
    """That each rank has of a block."""


def _kernels(worker: ModelWorker) -> str:
    formats = worker.formats
    return (
        f"{formats}, {formats.kernels} kernels, {formats.attention_backend} attention, {formats.kv_format.name} cache"
    )


def _agreed(ready: Sequence[_Ready], *, num_ranks: int) -> _Agreed:
    """As many blocks as every rank has room for. All must compute alike, since all choose tokens."""
    for rank, each in enumerate(ready):
        if each.kernels != ready[0].kernels:
            raise ConfigError(f"rank {rank} has {each.kernels}, and rank 0 {ready[0].kernels}: they would not agree.")
    plans = [each.plan for each in ready]
    plan = dataclasses.replace(
        plans[0],
        num_blocks=min(plan.num_blocks for plan in plans),
        num_host_slots=min(plan.num_host_slots for plan in plans),
        max_model_len=min(plan.max_model_len for plan in plans),
        num_ranks=num_ranks,
    )
    return _Agreed(plan, tuple(plan.bytes_per_block for plan in plans))


# ---- the other ranks, as rank 0 sees them ---------------------------------------------------------------------------


class _Peer:
    """One of them: the way to it, and how to end it."""

    def __init__(self, name: str, connection: Connection, process: subprocess.Popen[bytes] | None) -> None:
        self.name = name
        self.connection = connection
        self.ended = threading.Event()
        self._process = process
        self._why: str | None = None

    def kill(self, why: str | None = None) -> None:
        """End its process, also one that is stopped."""
        if self._process is not None and self._process.poll() is None:
            self._why = why
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def how_it_ended(self, status: int) -> str:
        """Why it was killed, or its exit status or signal."""
        if self._why is not None:
            return f"{self._why}, and is ended"
        return f"{self.name} ended with {signal.Signals(-status).name if status < 0 else f'status {status}'}"

    def receive(self) -> Any:
        """What it says; raises what it raised, or `EngineDeadError` if it is gone."""
        while not self.connection.poll(0.1):
            if self.ended.is_set():
                raise EngineDeadError(f"{self.name} ended before it answered; its own messages say why.")
        try:
            said = self.connection.recv()
        except (EOFError, ConnectionResetError):
            raise EngineDeadError(f"{self.name} ended before it answered; its own messages say why.") from None
        if isinstance(said, Exception):
            raise said
        return said


class _Peers:
    """All of them. Nothing is sent to one that another does not get."""

    def __init__(self, peers: Sequence[_Peer], meeting: Meeting | None, life: LifeWatch | None) -> None:
        self.size = len(peers) + 1
        self.meeting = meeting
        self._peers = peers
        self._life = life

    def note_ready(self) -> None:
        """From now on they are not silent for long."""
        if self._life is not None:
            self._life.limit_s = SILENT_S

    def send(self, message: object) -> None:
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        for peer in self._peers:
            peer.connection.send_bytes(data)

    def receive(self) -> list[Any]:
        return [peer.receive() for peer in self._peers]

    def await_deaths(self, seconds: float) -> None:
        """Give a rank that is ending the time to be named."""
        for peer in self._peers:
            if peer.ended.wait(seconds / len(self._peers)):
                return

    def end(self) -> None:
        """Let all go, and wait until they have."""
        for peer in self._peers:
            with contextlib.suppress(OSError):
                peer.connection.send_bytes(pickle.dumps(("end", None)))
        until_s = time.monotonic() + _END_S
        for peer in self._peers:
            if not peer.ended.wait(max(0.0, until_s - time.monotonic())):
                logger.info("%s does not end by itself; it is ended", peer.name)
        self.kill()

    def kill(self) -> None:
        """End what still runs."""
        for peer in self._peers:
            peer.kill()
        if self._life is not None:
            self._life.close()
        for peer in self._peers:
            peer.ended.wait(_END_S)
            peer.connection.close()
        if self.meeting is not None:
            self.meeting.barrier.abort()


def _start_peers(start: RankStart, on_lost: Callable[[str], None]) -> _Peers:
    if start.collectives == "none":
        return _Peers([], None, None)
    starts = [dataclasses.replace(start, rank=rank) for rank in range(1, start.size)]
    if start.collectives == "threads":
        meeting = Meeting(start.size)
        return _Peers([_start_thread(one, meeting, on_lost) for one in starts], meeting, None)
    life = LifeWatch()
    peers = _Peers([_start_process(one, life, on_lost) for one in starts], None, life)
    life.start()
    try:
        peers.receive()  # they have come as far as this: nobody waits for one that could not even start
    except EngineDeadError:
        peers.kill()
        raise
    return peers


def _start_process(start: RankStart, life: LifeWatch, on_lost: Callable[[str], None]) -> _Peer:
    ours, theirs = socket.socketpair()
    our_life, their_life = socket.socketpair()
    started: Future[_Peer] = Future()

    def live() -> None:
        """A process ends with the thread that started it (`end_with_parent`), so this one waits for its end."""
        arguments = map(str, (theirs.fileno(), their_life.fileno(), os.getpid()))
        try:
            process = subprocess.Popen(
                python_command("headway.executor.rank_process", *arguments),
                pass_fds=(theirs.fileno(), their_life.fileno(), *([start.slots] if start.slots >= 0 else [])),
                stdin=subprocess.DEVNULL,
            )
        except Exception as error:
            started.set_exception(error)
            return
        peer = _Peer(f"rank {start.rank} (process {process.pid})", Connection(ours.detach()), process)
        started.set_result(peer)
        status = process.wait()
        peer.ended.set()
        if status != 0:
            on_lost(peer.how_it_ended(status))

    threading.Thread(target=live, name=f"rank {start.rank}", daemon=True).start()
    with theirs, their_life:
        peer = started.result()
    life.follow(our_life, peer.name, peer.kill)
    with contextlib.suppress(BrokenPipeError):  # it has ended, which is noticed when it is to answer
        peer.connection.send(start)
    return peer


def _start_thread(start: RankStart, meeting: Meeting, on_lost: Callable[[str], None]) -> _Peer:
    left, right = socket.socketpair()
    ours, theirs = Connection(left.detach()), Connection(right.detach())
    peer = _Peer(f"rank {start.rank} (a thread)", ours, None)

    def run() -> None:
        try:
            serve(start, theirs, meeting)
        except Exception as error:
            if not isinstance(error, EOFError | OSError | threading.BrokenBarrierError):
                logger.exception("rank %d failed", start.rank)
            on_lost(f"{peer.name} failed: {type(error).__name__}: {error}")
            meeting.barrier.abort()
        finally:
            peer.ended.set()
            theirs.close()

    threading.Thread(target=run, name=f"rank {start.rank}", daemon=True).start()
    return peer


# ---- a rank ---------------------------------------------------------------------------------------------------------


def serve(start: RankStart, connection: Connection, meeting: Meeting | None) -> None:
    """Load the rank's part, then run what rank 0 runs, until it says that this is the end."""
    try:
        start.choose_device()
        collectives = start.join(meeting)
        model = start.config.model
        checkpoint = open_checkpoint(start.model, model.load_format, seed=model.seed)
        draft = None
        if model.draft_model is not None:
            draft = open_checkpoint(model.draft_model, model.load_format, seed=model.seed)
        worker = _loaded(start, checkpoint, draft, collectives)
        connection.send(_Ready(worker.plan(worker.profile()), _kernels(worker)))
        ready = _allocated(start, worker, connection.recv())
        connection.send("ready")
    except HeadwayError as error:
        connection.send(error)
        raise
    _run_steps(ready, connection, max_in_flight=start.max_in_flight)
    ready.runner.shutdown()
    collectives.close()


def _run_steps(ready: Allocated, connection: Connection, *, max_in_flight: int) -> None:
    runner, transfers = ready.runner, ready.transfers
    pending: deque[PendingStep] = deque()
    forwarded: UnsampledStep | None = None
    while True:
        kind, payload = pickle.loads(connection.recv_bytes())
        if kind == "end":
            return
        if kind == "warm_up":
            runner.warm_up()
        elif kind == "move":
            runner.move(payload)
        elif kind == "settle":
            assert transfers is not None
            transfers.slots.settle(payload)
            connection.send("settled")
        elif kind == "sample":
            assert forwarded is not None
            pending.append(forwarded.sample(payload))
            forwarded = None
        else:
            while len(pending) >= max_in_flight:
                pending.popleft().result()
            if kind == "forward":
                forwarded = runner.forward(payload)
            else:
                pending.append(runner.submit(payload))
