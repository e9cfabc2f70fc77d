"""The parent of a front end: a small process that is reliable because it does very little.

    headway serve ──► front end (HTTP) ──► engine processes, helpers          one process group, ended together
         │  ▲ ticks of its event loop, the listening socket
         │  └────────┘
         └ passes signals on; kills and restarts a front end that is blocked, and restarts one that has died

The parent reads no options: the front end reads the command line and hands over the listening socket once it is bound.
Connections that arrive while there is no front end wait in the socket's backlog. `front_end_rules` decides when a front
end is ended and whether another follows.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from headway.child_process import DUMP_SIGNAL
from headway.cli.front_end_rules import Exit, FrontEndWatch, Order, RestartRule
from headway.server.parent_link import (
    BOUND,
    FRONT_END_VARIABLE,
    OVER,
    READY,
    STOPPING,
    TICK,
    TICK_S,
    MessageReader,
)

LATE_S = TICK_S / 2
"""A tick of the parent that is later than this does not count against the front end."""
ORPHAN_S = 3.0
"""How long engines and helpers may take to end after their front end, if it has served; then they are killed."""
KILLED_S = 2.0
"""How long the kernel may take to end killed processes."""
LOOK_S = 0.02
_PR_SET_CHILD_SUBREAPER = 36
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PASSED_ON = (signal.SIGUSR1, DUMP_SIGNAL)
MAY_BE_IGNORED = (signal.SIGHUP, signal.SIGTSTP)


class Parent:
    """Runs front ends, one after the other, until one ends without a restart."""

    def __init__(self, command: Sequence[str]) -> None:
        """`command` starts a front end."""
        self._command = command
        self._rule = RestartRule()
        self._wakeup, self._waker = socket.socketpair()
        self._front_end: FrontEnd | None = None
        self._listener: socket.socket | None = None
        self._num_restarts = 0
        self._is_stopping = False

    def run(self) -> int:
        """Run front ends until no restart follows. Returns the exit code."""
        self._take_signals()
        try:
            return self._run()
        finally:
            signal.set_wakeup_fd(-1)  # the socket closes with this object, and orphans may still end

    def _run(self) -> int:
        while True:
            self._front_end = front_end = FrontEnd(self._command, self._listener, self._num_restarts)
            adopt_orphans()
            status = self._accompany(front_end)
            next_step = self._rule.next(status, front_end.watch)
            self._end_group(front_end)
            front_end.close()
            self._front_end = None
            if isinstance(next_step, Exit):
                return next_step.code
            _say(f"the front end ended with status {status}; it is started again in {next_step.after_s:g} s")
            self._wait(time.monotonic() + next_step.after_s)
            if self._is_stopping:
                return 0
            self._num_restarts += 1

    def _accompany(self, front_end: FrontEnd) -> int:
        """Watch a front end until it has ended. Returns its status."""
        tick_s = time.monotonic() + TICK_S
        while front_end.status is None:
            self._poll(tick_s)
            now_s = time.monotonic()
            if now_s < tick_s:
                continue
            if now_s - tick_s <= LATE_S:
                front_end.watch.pass_time(TICK_S)
            tick_s = now_s + TICK_S
            order = front_end.watch.order()
            if order is Order.LEAVE:
                return -signal.SIGKILL
            self._carry_out(order, front_end)
        front_end.read()  # its last messages
        return front_end.status

    def _carry_out(self, order: Order, front_end: FrontEnd) -> None:
        if order is Order.DUMP:
            _say(f"the front end (process {front_end.pid}) {front_end.watch.why}; its stacks:")
            front_end.signal(DUMP_SIGNAL)
        elif order is Order.KILL:
            _say(f"the front end (process {front_end.pid}) is killed")
            front_end.signal_group(signal.SIGKILL)

    def _end_group(self, front_end: FrontEnd) -> None:
        """End every process that the front end started. Until then their memory and GPUs are not free."""
        now_s = time.monotonic()
        kill_s = now_s + (ORPHAN_S if front_end.watch.is_ready else 0.0)
        is_killed = False
        while front_end.signal_group(0):
            now_s = time.monotonic()
            if not is_killed and now_s >= kill_s:
                front_end.signal_group(signal.SIGKILL)
                is_killed = True
            if now_s >= kill_s + KILLED_S:
                _say(f"a process of the group {front_end.pid} does not end although it was killed")
                return
            self._poll(now_s + LOOK_S)

    # ---- signals ----------------------------------------------------------------------------------------------------

    def _take_signals(self) -> None:
        """Receive all signals as bytes on the wake-up socket. Ignored signals, such as SIGHUP under nohup, stay
        ignored."""
        for end in (self._wakeup, self._waker):
            end.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        for number in (*STOP_SIGNALS, *PASSED_ON, signal.SIGTSTP, signal.SIGCHLD):
            if number not in MAY_BE_IGNORED or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # inherited by the front end, which may write to the terminal

    def _poll(self, until_s: float) -> None:
        """Wait for events until `until_s` at most, and handle them."""
        front_end = self._front_end
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        if front_end is not None and front_end.is_connected:
            poll.register(front_end.connection, select.POLLIN)
        happened = dict(poll.poll(max(0.0, until_s - time.monotonic()) * 1e3))
        # The front end's messages are read first: how a signal is passed on depends on whether it is ready.
        if front_end is not None and front_end.is_connected and front_end.connection.fileno() in happened:
            front_end.read()
            self._keep_listener(front_end)
        if self._wakeup.fileno() in happened:
            for number in self._wakeup.recv(4096):
                self._handle(number)

    def _wait(self, until_s: float) -> None:
        while time.monotonic() < until_s and not self._is_stopping:
            self._poll(until_s)

    def _keep_listener(self, front_end: FrontEnd) -> None:
        """Keep the listening socket until shutdown begins; then new connections must not wait for a front end."""
        if front_end.listener is not None:
            self._listener, front_end.listener = front_end.listener, None
        if front_end.watch.is_stopping and self._listener is not None:
            self._listener.close()
            self._listener = None

    def _handle(self, number: int) -> None:
        front_end = self._front_end
        if number == signal.SIGCHLD:
            self._reap()
        elif number in STOP_SIGNALS:
            self._is_stopping = True
            if front_end is not None:
                front_end.stop(number)
                self._keep_listener(front_end)
        elif front_end is None:
            pass
        elif number in PASSED_ON:
            front_end.signal(number)
        elif number == signal.SIGTSTP:  # Ctrl-Z in a terminal reaches this process alone
            front_end.signal_group(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            front_end.signal_group(signal.SIGCONT)

    def _reap(self) -> None:
        """Reap all ended children. This process inherits the front end's orphans, as a container's first process
        does."""
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = found
                if self._front_end is not None and pid == self._front_end.pid:
                    self._front_end.status = os.waitstatus_to_exitcode(status)


class FrontEnd:
    """One front-end process. It has its own process group, so that Ctrl-C in a terminal reaches only the parent."""

    def __init__(self, command: Sequence[str], listener: socket.socket | None, num_restarts: int) -> None:
        self.connection, theirs = socket.socketpair()
        self.connection.setblocking(False)
        self.is_connected = True
        self.watch = FrontEndWatch()
        self.listener: socket.socket | None = None
        """The listening socket that it has handed over."""
        self.status: int | None = None
        """Its exit status, as in `subprocess`; None while it runs."""
        self._messages = MessageReader()
        inherited = [theirs.fileno(), -1 if listener is None else listener.fileno()]
        with theirs:
            self._process = subprocess.Popen(
                command,
                pass_fds=[descriptor for descriptor in inherited if descriptor >= 0],
                process_group=0,
                env={**os.environ, FRONT_END_VARIABLE: ",".join(map(str, [os.getpid(), *inherited, num_restarts]))},
            )
        self.pid = self._process.pid

    def read(self) -> None:
        """Read and handle its messages."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self.connection, 4096, 1)
        except BlockingIOError:
            return
        except ConnectionError:
            data, descriptors = b"", []
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
            self.listener = socket.socket(fileno=descriptor)
        if not data:
            self.is_connected = False
        for kind, first, second in self._messages.feed(data):
            if kind == BOUND:
                self.watch.note_bound(hang_timeout_s=first, stop_s=second)
            elif kind == READY:
                self.watch.note_ready()
            elif kind == TICK:
                self.watch.note_tick()
            elif kind == STOPPING:
                self.watch.note_stopping()
            elif kind == OVER:
                self.watch.note_over()

    def stop(self, number: int) -> None:
        """Ask it to stop. A serving front end decides which signals count as separate requests, because systemd sends
        one SIGTERM to both the parent and the front end."""
        self.watch.note_stopping()
        if self.watch.is_ready and number != signal.SIGHUP:
            with contextlib.suppress(OSError):
                self.connection.send(bytes([number]))
        else:
            self.signal(number)

    def signal(self, number: int) -> None:
        """Send it a signal, unless it has ended: its process id may belong to another process by now."""
        if self.status is None:
            os.kill(self.pid, number)

    def signal_group(self, number: int) -> bool:
        """Send a signal to it and to all processes it started. Returns whether there is any such process."""
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):  # macOS refuses if only ended processes are left
            return False
        return True

    def close(self) -> None:
        """Release its resources after it has ended."""
        self.connection.close()
        self._process.returncode = 0  # this module has already reaped it
        if self.listener is not None:
            self.listener.close()


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        print(f"headway: {line}", file=sys.stderr, flush=True)


def adopt_orphans() -> None:
    """Make orphans of a front end children of this process, which then reaps them. Only Linux can do that; elsewhere
    they go to the first process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
