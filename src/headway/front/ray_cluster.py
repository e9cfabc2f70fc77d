"""Engines on a Ray cluster: Ray places them on nodes and GPUs, watches those, and starts engines again elsewhere.

    front end ──► actor "headway-0" on some node ──► engine process        Ray: where, how many GPUs, is the node alive
        └───────────────── TCP ──────────────────────────┘                 ours: requests, tokens, heartbeats, caches

An actor starts the engine process when it is first asked for its address, and again when it is asked after the process
died. When the actor or its node dies, Ray makes the actor anew where there is room. Its name is the same for all front
ends of the cluster, so they share the engines; the secret that they need comes from the actor: who may use the cluster
may use its engines. An engine that ended because it was asked to takes its actor along. So does one that died, unless
the actor is asked for another within `LINGER_S`.

Every call of Ray's blocks, so it is made in a thread. Ray is an extra; without it nothing of this file is used.
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
"""How long the cluster may take to find room for an engine, or to say where one is."""
SECRET_BYTES = 32


class EngineActor:
    """Lives in a process of Ray's on the node of its engine. Several threads may call it."""

    def __init__(self, start: dict[str, Any], factory: str | None) -> None:
        self._start = start
        self._factory = factory
        self._secret = secrets.token_hex(SECRET_BYTES)
        self._starting = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._address = ("", 0)

    def address(self) -> tuple[str, int, str, int]:
        """Host, port, secret and process id of an engine that is ready. Starts one if there is none; raises with the
        engine's own words if it cannot be."""
        with self._starting:
            if self._process is None or self._process.poll() is not None:
                self._launch()
            assert self._process is not None
            return (*self._address, self._secret, self._process.pid)

    def kill(self, pid: int) -> None:
        """End this engine process, if it is still the one."""
        process = self._process
        if process is not None and process.pid == pid:
            process.kill()

    def host(self) -> str:
        """The address of its node; answers while an engine starts."""
        import ray

        return str(ray.util.get_node_ip_address())

    def _end(self) -> None:
        """Leave the cluster."""
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
        """As long as it gives signs of life."""
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
        """Read its heartbeats until it ends. If it ended because it was asked to, no engine is wanted here; if not,
        front ends that want one ask for another."""
        with contextlib.suppress(OSError), parent:
            while parent.recv(2**16):
                pass
        if process.wait() != 0:
            time.sleep(LINGER_S)
        with self._starting:
            if self._process is process:
                self._end()


class RayCluster:
    """A running cluster, or a local one that is started."""

    def __init__(self, address: str | None = None, *, name: str = "headway") -> None:
        """`address`: of the head node; None: RAY_ADDRESS, a cluster of this machine, or one that is started here."""
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
        """One for each replica: a GPU each where the cluster has any, otherwise a share of its cores."""
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
    """As `asyncio.to_thread`, for calls that may take minutes: each has a thread of its own, and the process does not
    wait for it when it ends."""
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
    """The most cores that each of the replicas can have, each on one node; 1 where there are too few."""
    for num_cores in range(max(cores_of_nodes, default=1), 1, -1):
        if sum(cores // num_cores for cores in cores_of_nodes) >= num_replicas:
            return num_cores
    return 1


class RayHome:
    """Where a replica's process comes from: the actor of this name, made if there is none."""

    is_shared = True

    def __init__(self, name: str, spec: EngineSpec, *, needs: dict[str, int]) -> None:
        self._name = name
        self._needs = needs
        self._factory = spec.factory

    @property
    def num_gpus(self) -> int:
        """That the engine has."""
        return self._needs["num_gpus"]

    async def open(self, start: Start) -> tuple[socket.socket, EngineProcess]:
        # Other front ends of the engine may ask for what its cache holds.
        own = {"options": start.options, "log_level": start.log_level, "blocks": start.blocks, "reports_cache": True}
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
    """An engine process on some node. How it ended is known there."""

    returncode: int | None = None

    def __init__(self, actor: Any, pid: int) -> None:
        self.pid = pid
        self._actor = actor

    def kill(self) -> None:
        """Ask its actor to; if that is gone, so is the process."""
        self._actor.kill.remote(self.pid)

    async def wait(self) -> int:
        raise NotImplementedError
