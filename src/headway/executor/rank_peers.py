"""The other ranks as rank 0 sees them: it starts, commands, watches and ends them here.

They are separate processes (`headway.worker.rank_process`), or threads in tests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pickle
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

from headway.child_process import python_command
from headway.errors import EngineDeadError
from headway.layers.collectives import Meeting
from headway.worker.rank import Command, Layout, Signal, serve
from headway.worker.rank_life import SILENT_S, LifeWatch
from headway.worker.rank_start import RankStart

logger = logging.getLogger(__name__)

_END_S = 2.0
"""The time for all ranks together to end by themselves. It is shorter than an engine process's time to exit."""


class Peer:
    """Another rank: the connection to it, and the means to end it."""

    def __init__(self, name: str, connection: Connection, process: subprocess.Popen[bytes] | None) -> None:
        self.name = name
        self.connection = connection
        self.ended = threading.Event()
        self._process = process
        self._why: str | None = None

    def kill(self, why: str | None = None) -> None:
        """Kill its process, even a stopped one."""
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
        """Return its next message. Raises the error that the rank raised, or `EngineDeadError` if it is gone."""
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


class Peers:
    """All other ranks. Every message is sent to all of them."""

    def __init__(self, peers: Sequence[Peer], meeting: Meeting | None, life: LifeWatch | None) -> None:
        self.size = len(peers) + 1
        self.meeting = meeting
        self._peers = peers
        self._life = life

    def note_ready(self) -> None:
        """Apply the shorter limit of silence, now that all ranks are ready."""
        if self._life is not None:
            self._life.limit_s = SILENT_S

    def send(self, message: Command | Layout) -> None:
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        for peer in self._peers:
            peer.connection.send_bytes(data)

    def receive(self) -> list[Any]:
        return [peer.receive() for peer in self._peers]

    def await_deaths(self, seconds: float) -> None:
        """Wait until a rank has ended, so that an error can name it."""
        for peer in self._peers:
            if peer.ended.wait(seconds / len(self._peers)):
                return

    def end(self) -> None:
        """Ask all ranks to end, and wait until they have."""
        for peer in self._peers:
            with contextlib.suppress(OSError):
                peer.connection.send_bytes(pickle.dumps(Signal.END))
        until_s = time.monotonic() + _END_S
        for peer in self._peers:
            if not peer.ended.wait(max(0.0, until_s - time.monotonic())):
                logger.info("%s does not end by itself; it is ended", peer.name)
        self.kill()

    def kill(self) -> None:
        """Kill the ranks that still run."""
        for peer in self._peers:
            peer.kill()
        if self._life is not None:
            self._life.close()
        for peer in self._peers:
            peer.ended.wait(_END_S)
            peer.connection.close()
        if self.meeting is not None:
            self.meeting.barrier.abort()


def start_peers(start: RankStart, on_lost: Callable[[str], None]) -> Peers:
    if start.collectives == "none":
        return Peers([], None, None)
    starts = [dataclasses.replace(start, rank=rank) for rank in range(1, start.size)]
    if start.collectives == "threads":
        meeting = Meeting(start.size)
        return Peers([_start_thread(one, meeting, on_lost) for one in starts], meeting, None)
    life = LifeWatch()
    peers = Peers([_start_process(one, life, on_lost) for one in starts], None, life)
    life.start()
    try:
        peers.receive()  # all ranks have started: none is waited for that could not even start
    except EngineDeadError:
        peers.kill()
        raise
    return peers


def _start_process(start: RankStart, life: LifeWatch, on_lost: Callable[[str], None]) -> Peer:
    ours, theirs = socket.socketpair()
    our_life, their_life = socket.socketpair()
    started: Future[Peer] = Future()

    def live() -> None:
        """Start the rank's process and wait for its end. A process ends with the thread that started it
        (`end_with_parent`)."""
        arguments = map(str, (theirs.fileno(), their_life.fileno(), os.getpid()))
        try:
            process = subprocess.Popen(
                python_command("headway.worker.rank_process", *arguments),
                pass_fds=(theirs.fileno(), their_life.fileno(), *([start.slots] if start.slots >= 0 else [])),
                stdin=subprocess.DEVNULL,
            )
        except Exception as error:
            started.set_exception(error)
            return
        peer = Peer(f"rank {start.rank} (process {process.pid})", Connection(ours.detach()), process)
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


def _start_thread(start: RankStart, meeting: Meeting, on_lost: Callable[[str], None]) -> Peer:
    left, right = socket.socketpair()
    ours, theirs = Connection(left.detach()), Connection(right.detach())
    peer = Peer(f"rank {start.rank} (a thread)", ours, None)

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
