"""The engine's own process: `python -m headway.engine_process.main --fd N`, started by the front end.

It inherits one end of a socket pair. The first message says which engine to build. `EngineLoop` then runs it until the
front end asks it to stop or is gone. Exit status: 0 after a normal end, 1 if the engine failed, 2 if the front end sent
something that is not a message.

With `--listen-fd M`, a listening socket, front ends on other machines share the engine (`SharedChannel`) if they know
the secret in the environment variable HEADWAY_SECRET. The process that started this one then only sends the first
message.

`--factory module:function` names another engine factory, a function from the options to an `LLMEngine`.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import importlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headway.child_process import show_logs, show_stacks_on_signal
from headway.errors import ConfigError, EngineDeadError, HeadwayError
from headway.wire.channel import ChannelClosedError, EngineChannel
from headway.wire.frames import BrokenFrameError
from headway.wire.greeting import SECRET_VARIABLE
from headway.wire.messages import BlockExchange, EngineReady, Heartbeat, Start, StartUpFailed

if TYPE_CHECKING:
    from headway.engine.llm_engine import LLMEngine
    from headway.engine_process.engine_loop import EngineLoop
    from headway.transfer.block_messages import Carrier
    from headway.transfer.block_server import BlockServer
    from headway.wire.shared_channel import SharedChannel

logger = logging.getLogger(__name__)

DEFAULT_FACTORY = "headway.engine_process.main:create_engine"
FLUSH_S = 5.0
START_MESSAGE_S = 60.0
SIGTERM_DRAIN_S = 15.0
"""The drain time after a SIGTERM from outside. The front end sends a message with a limit instead."""
ORPHAN_S = 10.0
"""How long a step, or the loading of a model, may continue after the front end is gone."""

YOUNG_OBJECTS = 50_000
"""The number of new container objects that triggers a garbage collection. A step makes some thousands, nearly all of
which are freed by reference counting."""

EXIT_FAILED = 1
EXIT_BROKEN_FRAME = 2


class Pulse:
    """A thread that sends heartbeats to the front end, which say how long the loop has been in its present turn.

    A process that hangs as a whole (stopped, swapped out, in the kernel) sends none. One with a long step reports it.
    """

    def __init__(self, channel: EngineChannel, *, interval_s: float) -> None:
        self._channel: EngineChannel | SharedChannel = channel
        self._loop: EngineLoop | None = None
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def follow(self, loop: EngineLoop) -> None:
        """Report the turns of this loop from now on. Without a loop, heartbeats report 0."""
        self._loop = loop

    def tell(self, channel: SharedChannel) -> None:
        """Send heartbeats to the front ends of this channel from now on."""
        self._channel = channel

    def hurry(self, interval_s: float) -> None:
        """Send heartbeats at least this often, as a front end wants it."""
        self._interval_s = min(self._interval_s, interval_s)

    def start(self) -> None:
        """Start to send heartbeats."""
        self._thread.start()

    def stop(self) -> None:
        """Stop sending. Must be called before the channel is closed."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(FLUSH_S)

    def _run(self) -> None:
        try:
            while not self._stopped.wait(self._interval_s):
                self._channel.send(Heartbeat(0.0 if self._loop is None else self._loop.turn_s))
        except ChannelClosedError:  # the loop learns it too, after its turn; but that may never end
            if not self._stopped.wait(ORPHAN_S):
                logger.error("the front end is gone and the engine does not end by itself; it is ended")
                os._exit(EXIT_FAILED)


def main(argv: list[str] | None = None) -> int:
    """Build the engine and serve. Returns the exit status."""
    show_stacks_on_signal()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the front end too, which knows what is to be done
    arguments = _parser().parse_args(argv)
    os.set_inheritable(arguments.fd, False)  # no child of this process may keep the connection open
    wakeup, signalled = socket.socketpair()
    signalled.setblocking(False)
    signal.set_wakeup_fd(signalled.fileno(), warn_on_full_buffer=False)
    channel = EngineChannel(socket.socket(fileno=arguments.fd), wakeup=wakeup, waker=signalled)
    listener = None if arguments.listen_fd is None else socket.socket(fileno=arguments.listen_fd)
    try:
        return _serve(channel, arguments.factory, listener)
    except ChannelClosedError:
        return 0
    except (BrokenFrameError, msgspec.DecodeError) as error:
        logger.error("the front end sent something that is no message: %s", error)
        return EXIT_BROKEN_FRAME
    finally:
        signal.set_wakeup_fd(-1)
        channel.close()


def create_engine(options: dict[str, Any]) -> LLMEngine:
    """The default factory: build the engine that the options describe. The front end predicts answer lengths."""
    from headway.config import EngineConfig

    config = EngineConfig.from_options(**options)
    begun_s = time.monotonic()
    from headway.engine.llm_engine import LLMEngine
    from headway.executor.local import LocalExecutor  # noqa: F401  (imports torch: its time is measured alone)

    imported_s = time.monotonic()
    logger.info("libraries imported in %.1f s", imported_s - begun_s)
    engine = LLMEngine.from_config(config, predicts=False)
    logger.info("weights loaded and memory laid out in %.1f s", time.monotonic() - imported_s)
    return engine


def spare_the_collector() -> None:
    """Keep the garbage collector from scanning the engine's objects during steps: present objects are never scanned
    again, and new ones rarely. The settings affect the whole process, so this is only for processes that do nothing but
    run an engine (this one, benchmarks), never for a program that uses `LLM`."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
    atexit.register(gc.unfreeze)  # extension modules that count what is left at the end would call it leaked


def _serve(channel: EngineChannel, factory: str, listener: socket.socket | None) -> int:
    start = _receive_start(channel)
    if start.cores:
        os.sched_setaffinity(0, start.cores)
    show_logs(start.log_level, "%(asctime)s %(levelname)s %(name)s: %(message)s")
    pulse = Pulse(channel, interval_s=start.heartbeat_s)
    pulse.start()
    try:
        return _build_and_run(channel, factory, start, pulse, listener)
    finally:
        pulse.stop()


def _build_and_run(
    channel: EngineChannel, factory: str, start: Start, pulse: Pulse, listener: socket.socket | None
) -> int:
    served: EngineChannel | SharedChannel = channel
    blocks: BlockServer | None = None
    try:
        engine = _load_factory(factory)(dict(start.options))
        if start.blocks is not None:
            host = LOCAL_HOST if listener is None else str(listener.getsockname()[0])
            blocks = _exchange_blocks(engine, start.blocks, host, lambda: served.wake())
        _warm_up(engine)
        spare_the_collector()
    except HeadwayError as error:
        return _fail_to_start(channel, str(error))
    except Exception as error:
        logger.exception("the engine could not be built")
        return _fail_to_start(channel, f"{type(error).__name__}: {error}")
    try:
        ready = _ready(engine, "" if blocks is None else blocks.address)
        if listener is None:
            channel.send(ready)
        else:
            served = _shared(channel, listener, start, ready, pulse)
        return _run(engine, served, start, pulse, blocks)
    finally:
        if blocks is not None:
            blocks.close()
        engine.shutdown()


LOCAL_HOST = "127.0.0.1"


def _exchange_blocks(
    engine: LLMEngine, exchange: BlockExchange, host: str, wake: Callable[[], None]
) -> BlockServer | None:
    """Let an engine fetch KV blocks from others, or serve its blocks to them over the network at `host`, as its role
    says. Returns the server, if there is one."""
    from headway.engine_process.engine_blocks import EngineBlocks
    from headway.transfer.block_client import PeerBlocks
    from headway.transfer.block_server import BlockServer
    from headway.transfer.host_blocks import HostBlocks

    transfers, device = engine.core.executor.transfers, engine.plan.device
    block_format = engine.plan.block_format
    if transfers is None or block_format is None or not isinstance(transfers.slots, HostBlocks):
        raise ConfigError("An engine with a role needs room for KV blocks (host_cache_memory, arrival_memory).")
    if exchange.role == "decode":
        cuda_device = int(device.partition(":")[2] or 0) if device.startswith("cuda") else None
        transfers.peers = PeerBlocks(fingerprint=block_format.fingerprint, cuda_device=cuda_device)
        return None
    own: Carrier = "cuda" if device.startswith("cuda") else "shm"
    return BlockServer(
        EngineBlocks(engine.core.scheduler.kv_cache, transfers.slots),
        carrier=own if exchange.carrier == "auto" else exchange.carrier,
        fingerprint=block_format.fingerprint,
        folder=Path(exchange.folder),
        host=host,
        device=device if device.startswith("cuda") else "cpu",
        wake=wake,
    )


def _shared(
    parent: EngineChannel, listener: socket.socket, start: Start, ready: EngineReady, pulse: Pulse
) -> SharedChannel:
    """Accept front ends that connect, from now on. Returns the channel to all of them."""
    from headway.wire.shared_channel import SharedChannel, identity

    secret = os.environ.pop(SECRET_VARIABLE, "").encode()
    if not secret:
        raise BrokenFrameError(f"an engine that listens needs a secret in {SECRET_VARIABLE}")
    shared = SharedChannel(
        parent,
        listener,
        secret=secret,
        options=identity(start),
        ready=ready,
        on_heartbeat_s=pulse.hurry,
    )
    pulse.tell(shared)
    parent.send(ready)
    return shared


def _warm_up(engine: LLMEngine) -> None:
    started_s = time.monotonic()
    if num_kinds := engine.warm_up():
        logger.info("captured %d CUDA graphs in %.1f s", num_kinds, time.monotonic() - started_s)


def _fail_to_start(channel: EngineChannel, message: str) -> int:
    channel.send(StartUpFailed(message))
    channel.flush(timeout_s=FLUSH_S)
    return EXIT_FAILED


def _receive_start(channel: EngineChannel) -> Start:
    messages = channel.receive(timeout_s=START_MESSAGE_S)
    if len(messages) != 1 or not isinstance(messages[0], Start):
        raise BrokenFrameError("the first message must say which engine to build")
    return messages[0]


def _run(
    engine: LLMEngine,
    channel: EngineChannel | SharedChannel,
    start: Start,
    pulse: Pulse,
    blocks: BlockServer | None = None,
) -> int:
    from headway.engine_process.engine_loop import EngineLoop  # brings torch, which a wrong option need not wait for
    from headway.worker.nvml import NvmlPolling

    loop = EngineLoop(
        engine,
        channel,
        counted=start.counted,
        reports_cache=start.reports_cache,
        reports_tokens=start.reports_tokens,
        blocks=blocks,
    )
    pulse.follow(loop)
    signal.signal(signal.SIGTERM, lambda *_: loop.drain(SIGTERM_DRAIN_S))
    nvml = NvmlPolling.of_device(engine.plan.device, engine.utilisation.stats)
    try:
        loop.run()
    except (ChannelClosedError, BrokenFrameError, msgspec.DecodeError):
        raise
    except EngineDeadError as error:
        logger.error("the engine cannot go on: %s", error)
        return EXIT_FAILED
    except Exception:
        logger.exception("the engine cannot go on")
        return EXIT_FAILED
    finally:
        if nvml is not None:
            nvml.stop()
    channel.flush(timeout_s=FLUSH_S)
    return 0


def _ready(engine: LLMEngine, blocks_at: str = "") -> EngineReady:
    from headway.engine.block_pump import STORE_REST_S
    from headway.loader.embedded import MODEL_NAME

    plan, limits, kv_cache = engine.plan, engine.config.scheduler, engine.core.scheduler.kv_cache
    return EngineReady(
        model=engine.config.model.model or MODEL_NAME,
        max_model_len=plan.max_model_len,
        vocab_size=engine.model_config.vocab_size,
        hidden_size=engine.model_config.hidden_size,
        num_blocks=plan.num_blocks,
        block_size=plan.block_size,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        device=plan.device,
        dtype=plan.dtype,
        scheduling_policy=engine.config.scheduler.scheduling_policy,
        prefix_caching=kv_cache.prefix_cache is not None,
        num_host_slots=0 if kv_cache.tiers is None else kv_cache.tiers.host.num_slots,
        exit_s=STORE_REST_S if engine.config.cache.disk_cache else 0.0,
        blocks_at=blocks_at,
        block_format="" if plan.block_format is None else plan.block_format.fingerprint,
    )


def _load_factory(path: str) -> Callable[[dict[str, Any]], LLMEngine]:
    """Import the factory. A custom one may be in the working directory, which is searched last."""
    if path != DEFAULT_FACTORY:
        sys.path.append(os.getcwd())
    module, _, name = path.partition(":")
    factory: Callable[[dict[str, Any]], LLMEngine] = getattr(importlib.import_module(module), name)
    return factory


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="headway engine process", description="Started by the server, not by hand.")
    parser.add_argument("--fd", type=int, required=True, help="the inherited socket")
    parser.add_argument("--listen-fd", type=int, help="an inherited listening socket, for front ends of other machines")
    parser.add_argument("--factory", default=DEFAULT_FACTORY, metavar="MODULE:FUNCTION", help="builds the engine")
    return parser


if __name__ == "__main__":
    sys.exit(main())
