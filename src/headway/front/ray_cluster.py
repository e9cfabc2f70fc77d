"""Runs engines on a Ray cluster: Ray places them on nodes and GPUs, watches the nodes and restarts engines elsewhere.

    front end ──► actor "headway-0" on some node ──► engine process        Ray: where, how many GPUs, is the node alive
        └───────────────── TCP ──────────────────────────┘                 ours: requests, tokens, heartbeats, caches

An actor starts the engine process when it is first asked for its address, and again when it is asked after the process
died. When the actor or its node dies, Ray recreates the actor where there is room. Its name is the same for all front
ends of the cluster, so they share the engines. They get the engine's secret from the actor, so anyone who may use the
cluster may use its engines. When an engine ends as requested, its actor ends too. When an engine dies, its actor ends
unless it is asked for another engine within `LINGER_S`.

Every call of Ray blocks, so it is made in a thread. Ray is an optional dependency; without it this file is not used.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from headway.child_process import python_command
from headway.errors import ConfigError, EngineStartError
from headway.front.connection import EngineProcess
from headway.front.placement import EngineSpec
from headway.front.supervision import START_SILENT_S
from headway.installing import install_extra
from headway.wire.frames import FrameReader, pack
from headway.wire.greeting import SECRET_VARIABLE, RefusedError, dial
from headway.wire.messages import EngineReady, Start, StartUpFailed, decode_from_engine
from headway.wire.shared_channel import LINGER_S

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")

NAMESPACE = "headway"
PLACED_S = 60.0
"""How long the cluster may take to place an engine's actor, or to find an existing one."""
SECRET_BYTES = 32


class EngineActor:
    """Starts and holds one engine process. It runs in a Ray process on the engine's node, and several threads may call
    it."""

    def __init__(self, start: dict[str, Any], factory: str | None) -> None:
        self._start = start
        self._factory = factory
        self._secret = secrets.token_hex(SECRET_BYTES)
        self._starting = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._address = ("", 0)

    def address(self) -> tuple[str, int, str, int]:
        """Return host, port, secret and process id of a ready engine, after starting one if there is none. Raises
        `EngineStartError` with the engine's message if that fails."""
        with self._starting:
            if self._process is None or self._process.poll() is not None:
                self._launch()
            assert self._process is not None
            return (*self._address, self._secret, self._process.pid)

    def kill(self, pid: int) -> None:
        """Kill the engine process, if it still has this id."""
        process = self._process
        if process is not None and process.pid == pid:
            process.kill()

    def host(self) -> str:
        """Return the address of its node, also while an engine starts."""
        import ray

        return str(ray.util.get_node_ip_address())

    def _end(self) -> None:
        """End this actor without a restart."""
        import ray

        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    def _launch(self) -> None:
        host = self.host()
        ours, theirs = socket.socketpair()
        with socket.create_server((host, 0)) as listener, theirs:
            self._address = (host, listener.getsockname()[1])
            command = python_command("headway.engine_process.main", "--fd", str(theirs.fileno()))
            command += ["--listen-fd", str(listener.fileno())]
            command += [] if self._factory is None else ["--factory", self._factory]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), listener.fileno()),
                env={**os.environ, SECRET_VARIABLE: self._secret},
            )
        try:
            self._await_ready(ours)
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise
        finally:
            ours.settimeout(None)
            threading.Thread(target=self._follow, args=(ours, self._process), daemon=True).start()

    def _await_ready(self, engine: socket.socket) -> None:
        """Wait until the engine is ready, as long as it gives signs of life. Raises `EngineStartError`."""
        engine.settimeout(START_SILENT_S)
        engine.sendall(pack(Start(**self._start)))
        frames = FrameReader()
        try:
            while data := engine.recv(2**16):
                for payload in frames.feed(data):
                    message = decode_from_engine(payload)
                    if isinstance(message, EngineReady):
                        return
                    if isinstance(message, StartUpFailed):
                        raise EngineStartError(message.message)
        except TimeoutError as error:
            raise EngineStartError(f"The engine gave no sign of life for {START_SILENT_S:g} s.") from error
        raise EngineStartError("The engine process ended while it was starting.")

    def _follow(self, parent: socket.socket, process: subprocess.Popen[bytes]) -> None:
        """Read the engine's heartbeats until it ends, then end the actor. After a failure wait first, because a front
        end may ask for another engine."""
        with contextlib.suppress(OSError), parent:
            while parent.recv(2**16):
                pass
        if process.wait() != 0:
            time.sleep(LINGER_S)
        with self._starting:
            if self._process is process:
                self._end()


class RayCluster:
    """A running Ray cluster, or a local one started here."""

    def __init__(self, address: str | None = None, *, name: str = "headway") -> None:
        """`address`: the address of the head node. None: RAY_ADDRESS, a cluster on this machine, or one started
        here."""
        try:
            import ray
        except ImportError as error:
            raise ConfigError(f"--ray needs Ray ('{error.name}' is missing): run '{install_extra('ray')}'.") from error
        self._name = name
        if not ray.is_initialized():
            try:
                ray.init(address=address, namespace=NAMESPACE, log_to_driver=True, logging_level=logging.WARNING)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise ConfigError(f"There is no Ray cluster at '{address}': {error}") from error

    def specs(self, spec: EngineSpec, num_replicas: int) -> list[EngineSpec]:
        """One spec per replica: with GPUs if the cluster has any, otherwise with a share of its cores. Raises
        `ConfigError` if there are too few GPUs."""
        import ray

        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        num_gpus = 0 if spec.options.get("device") == "cpu" else int(sum(node.get("GPU", 0) for node in nodes))
        if 0 < num_gpus < num_replicas * spec.num_ranks:
            raise ConfigError(f"{num_replicas} replicas of {spec.num_ranks} GPUs: the cluster has {num_gpus}.")
        num_cpus = 1 if num_gpus else cores_each([int(node.get("CPU", 0)) for node in nodes], num_replicas)
        options = dict(spec.options) if num_gpus else {"num_threads": num_cpus, **spec.options}
        needs = {"num_cpus": num_cpus, "num_gpus": spec.num_ranks if num_gpus else 0}
        spec = replace(spec, options=options)
        return [
            replace(spec, home=RayHome(f"{self._name}-{place}", spec, needs=needs)) for place in range(num_replicas)
        ]


async def in_thread(call: Callable[[], _Result]) -> _Result:
    """Like `asyncio.to_thread`, for calls that may take minutes: each call has a separate thread, and the process does
    not wait for it at exit."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[_Result] = loop.create_future()

    def settle(result: Callable[[], _Result]) -> None:
        if outcome.done():  # it was cancelled
            return
        try:
            outcome.set_result(result())
        except Exception as error:
            outcome.set_exception(error)

    def run() -> None:
        done: Future[_Result] = Future()
        try:
            done.set_result(call())
        except Exception as error:
            done.set_exception(error)
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, done.result)

    threading.Thread(target=run, name="ray", daemon=True).start()
    return await outcome


def cores_each(cores_of_nodes: Sequence[int], num_replicas: int) -> int:
    """The most cores that every replica can have, with each replica on one node; 1 if there are too few."""
    for num_cores in range(max(cores_of_nodes, default=1), 1, -1):
        if sum(cores // num_cores for cores in cores_of_nodes) >= num_replicas:
            return num_cores
    return 1


class RayHome:
    """Gets a replica's process from the actor of this name, which is created if there is none."""

    is_shared = True

    def __init__(self, name: str, spec: EngineSpec, *, needs: dict[str, int]) -> None:
        self._name = name
        self._needs = needs
        self._factory = spec.factory

    @property
    def num_gpus(self) -> int:
        """The number of GPUs that the engine has."""
        return self._needs["num_gpus"]

    async def open(self, start: Start) -> tuple[socket.socket, EngineProcess]:
        # Other front ends of the engine may ask for what its cache holds.
        own = {
            "options": start.options,
            "log_level": start.log_level,
            "blocks": start.blocks,
            "reports_cache": True,
            "reports_tokens": start.reports_tokens,
        }
        return await in_thread(functools.partial(self._open, own))

    def _open(self, start: dict[str, Any]) -> tuple[socket.socket, EngineProcess]:
        import ray

        try:
            actor = self._actor(start)
            ray.get(actor.host.remote(), timeout=PLACED_S)  # whether there is room; loading a model may take long
            host, port, secret, pid = ray.get(actor.address.remote())
            return dial(host, port, secret.encode()), RemoteProcess(actor, pid)
        except ray.exceptions.GetTimeoutError as error:
            raise EngineStartError(
                f"The Ray cluster has no room for '{self._name}': it needs {self._needs} on one node."
            ) from error
        except ray.exceptions.RayTaskError as error:
            raise EngineStartError(str(error.cause)) from error
        except ray.exceptions.RayError as error:
            raise EngineStartError(f"The Ray cluster lost '{self._name}': {error}") from error
        except (RefusedError, OSError) as error:
            raise EngineStartError(f"The engine '{self._name}' cannot be reached: {error}") from error

    def _actor(self, start: dict[str, Any]) -> Any:
        import ray

        options = {
            "name": self._name,
            "namespace": NAMESPACE,
            "get_if_exists": True,
            "lifetime": "detached",  # other front ends may use it
            "max_restarts": -1,
            "max_concurrency": 8,
            "scheduling_strategy": "SPREAD",
            **self._needs,
        }
        return ray.remote(EngineActor).options(**options).remote(start, self._factory)


class RemoteProcess:
    """An engine process on another node. Its exit status is not known here."""

    returncode: int | None = None

    def __init__(self, actor: Any, pid: int) -> None:
        self.pid = pid
        self._actor = actor

    def kill(self) -> None:
        """Ask its actor to kill the process. If the actor is gone, so is the process."""
        self._actor.kill.remote(self.pid)

    async def wait(self) -> int:
        raise NotImplementedError
