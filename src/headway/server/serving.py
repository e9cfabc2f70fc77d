"""Runs a whole server from start to graceful stop: engine process, application and HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from headway.config import EngineConfig, PredictionConfig
from headway.errors import ConfigError
from headway.front.deployment import Deployment
from headway.front.engine_client import EngineClient
from headway.front.kv_event_format import EventBatch
from headway.front.ray_cluster import RayCluster
from headway.front.roles import Roles
from headway.front.scaling import ScalingRule
from headway.front.supervision import Patience
from headway.installing import install_extra
from headway.loader.chosen_model import load_model_tokenizer
from headway.predict import AnswerLengths
from headway.predict.prediction_thread import PredictionThread
from headway.server.admission.service_classes import ServiceClasses, read_service_classes
from headway.server.app import create_app
from headway.server.http.draining import Drain
from headway.server.http.http_server import GRACE_S, bind, create_server, raise_file_limit
from headway.server.live.live_page import LiveHubs, live_routes
from headway.server.loop_guard import LoopGuard
from headway.server.metrics.access_log import AccessLog, AccessRecord
from headway.server.metrics.price_meter import PriceMeter
from headway.server.parent_link import ParentLink
from headway.server.server_config import ServerConfig
from headway.server.services import Services

HELPERS_AFTER_S = 2.0
"""Helper processes for schemas start this long after the server is ready, unless a request needs them earlier."""
STOP_MARGIN_S = 4.0
"""If a front end has not ended this long after its drain timeout and grace period, the parent kills it."""


def run_server(
    config: ServerConfig, options: Mapping[str, Any], say: Callable[[str], None], *, begun_s: float | None = None
) -> None:
    """Serve until SIGTERM or SIGINT, then drain. `options` are the engine's. `say` is called with lines for the
    operator, such as how long the start took since `begun_s` of the monotonic clock (default: since this call)."""
    parts = StartTimes(time.monotonic() if begun_s is None else begun_s)
    parts.end("imports")
    engine_config = EngineConfig.from_options(**options)
    classes = read_service_classes(config.service_classes)
    link = ParentLink.from_environment()
    listener = link.listener or bind(config)
    link.bound(
        listener,
        hang_timeout_s=config.front_end_hang_timeout_s,
        stop_s=config.drain_timeout_s + GRACE_S + STOP_MARGIN_S,
    )
    with contextlib.closing(listener), contextlib.ExitStack() as cleanup:
        config = config.with_port(listener.getsockname()[1])
        listeners = _request_listeners(config, model_name(engine_config.model.model), cleanup)
        lengths = _prediction_thread(engine_config.prediction, cleanup)
        offer = _event_publisher(config, engine_config, cleanup, say)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(
                _serve(
                    config,
                    engine_config,
                    options=options,
                    classes=classes,
                    listener=listener,
                    link=link,
                    request_listeners=listeners,
                    lengths=lengths,
                    offer=offer,
                    parts=parts,
                    say=say,
                )
            )


def _request_listeners(
    config: ServerConfig, model: str, cleanup: contextlib.ExitStack
) -> list[Callable[[AccessRecord], None]]:
    """Return the functions to call with every request that has ended, for access log and traces."""
    listeners: list[Callable[[AccessRecord], None]] = []
    if config.access_log:
        log = AccessLog()
        cleanup.callback(log.close)
        listeners.append(log.write)
    if config.otlp_traces_endpoint is not None:
        try:
            from headway.server.metrics.request_spans import RequestSpans
        except ImportError as error:
            raise ConfigError(
                f"otlp_traces_endpoint needs OpenTelemetry ('{error.name}' is missing): run '{install_extra('otel')}'."
            ) from error
        spans = RequestSpans.to_collector(config.otlp_traces_endpoint, model=(*config.served_model_name, model)[0])
        cleanup.callback(spans.close)
        listeners.append(spans.export)
    return listeners


def _prediction_thread(config: PredictionConfig, cleanup: contextlib.ExitStack) -> PredictionThread | None:
    """Return the thread for length predictions, if configured. Errors in its files are raised here, before the model is
    loaded."""
    lengths = AnswerLengths.from_config(config)
    if lengths is None:
        return None
    thread = PredictionThread(lengths)
    cleanup.callback(thread.close)
    return thread


def _event_publisher(
    config: ServerConfig, engine_config: EngineConfig, cleanup: contextlib.ExitStack, say: Callable[[str], None]
) -> Callable[[EventBatch], bool] | None:
    """Return the function that publishes events of the prefix caches, if they are to be published."""
    events = config.published_events
    if events is None:
        return None
    if not engine_config.cache.enable_prefix_caching:
        raise ConfigError("kv_events_config publishes what the prefix cache holds, and enable_prefix_caching is False.")
    try:
        from headway.front.kv_event_publisher import KVEventPublisher
    except ImportError as error:
        raise ConfigError(
            f"kv_events_config needs ZeroMQ ('{error.name}' is missing): run '{install_extra('gateway')}'."
        ) from error
    name = (*config.served_model_name, model_name(engine_config.model.model))[0]
    topic = f"kv@{socket.gethostname()}@{name}" if events.topic is None else events.topic
    publisher = KVEventPublisher(events, topic=topic)
    cleanup.callback(publisher.close)
    say(f"KV events are published at {' and replayed at '.join(publisher.endpoints)} with the topic {topic}.")
    return publisher.offer


async def _serve(
    config: ServerConfig,
    engine_config: EngineConfig,
    *,
    options: Mapping[str, Any],
    classes: ServiceClasses,
    listener: socket.socket,
    link: ParentLink,
    request_listeners: list[Callable[[AccessRecord], None]],
    lengths: PredictionThread | None,
    offer: Callable[[EventBatch], bool] | None,
    parts: StartTimes,
    say: Callable[[str], None],
) -> None:
    drain = Drain(lame_duck_s=config.lame_duck_s, timeout_s=config.drain_timeout_s)
    stop = _take_signals(drain, link, say)
    name = model_name(engine_config.model.model)
    say(f"Loading {name}.")
    patience = Patience(
        slow_step_s=config.watchdog_s,
        step_timeout_s=config.step_timeout_s,
        hang_timeout_s=config.engine_hang_timeout_s,
    )
    deployment = Deployment(
        options,
        factory=config.engine_factory,
        log_level=config.log_level.upper(),
        num_replicas=config.replicas,
        scaling=None if config.scaling is None else ScalingRule(*config.scaling),
        router=config.router,
        reports_caches=config.kv_events,
        reports_tokens=offer is not None,
        roles=None if config.roles is None else Roles.parse(config.roles),
        cluster=None if not config.ray else await asyncio.to_thread(RayCluster, config.address),
    )
    engine = EngineClient(deployment, patience=patience, resumes=config.resume)
    if offer is not None:
        engine.publish_caches(offer)
    tokenizer = await asyncio.to_thread(load_model_tokenizer, engine_config.model)
    parts.end("tokenizer")
    services = Services.create(
        config,
        engine,
        tokenizer,
        model_name=name,
        classes=classes,
        lengths=lengths,
        engine_options={name: value for each in asdict(engine_config).values() for name, value in each.items()},
        drain=drain,
    )
    services.on_request_end += request_listeners
    metrics = services.metrics
    num_ranks = engine_config.device.tensor_parallel_size
    metrics.num_devices = lambda: num_ranks * sum(not replica.is_idle for replica in engine.replicas)
    prices = None if config.price_per_hour is None else PriceMeter(config.price_per_hour, metrics.num_devices)
    if prices is not None:
        engine.add_step_listener(prices.observe)
    hubs = LiveHubs(
        engine,
        first_tokens=metrics.recent_first_tokens,
        hits=metrics.recent_hits,
        is_draining=lambda: drain.is_asked,
        prices=None if prices is None else prices.numbers,
    )
    app = create_app(services, [*live_routes(engine, hubs=hubs)])

    guard = LoopGuard(asyncio.get_running_loop(), metrics.loop_stalls)
    metrics.num_front_end_restarts = link.num_restarts

    async def start_engine() -> None:
        await asyncio.gather(engine.start(), services.prompts.warm_up())

    async def finish(left_s: float) -> None:
        await engine.shutdown(left_s)
        hubs.close()

    def start_serving() -> None:
        gc.collect()
        gc.freeze()  # objects loaded so far stay for ever, so the garbage collector can skip them
        guard.start()
        link.ready()
        for line in _greeting(config, parts):
            say(line)
        loop.call_later(HELPERS_AFTER_S, lambda: loop.run_in_executor(None, services.shaper.prepare))

    loop = asyncio.get_running_loop()
    restarts: set[asyncio.Task[None]] = set()

    def restart() -> None:
        if not config.resume:
            say("Engines are not replaced: with --no-resume their requests would end.")
        elif not restarts:
            task = asyncio.create_task(engine.restart(config.drain_timeout_s))
            restarts.add(task)
            task.add_done_callback(restarts.discard)

    loop.add_signal_handler(signal.SIGUSR1, restart)
    server = create_server(app, config, drain, finish, on_started=start_serving, num_files=raise_file_limit())
    link.follow(loop, lambda number, is_first: None if is_first and drain.is_asked else stop(number))
    try:
        if await drain.unless_asked(start_engine):
            parts.end("engine")
            await server.serve(sockets=[listener])
        else:
            say("Stopped before it was ready.")
    finally:
        guard.stop()
        for task in restarts:
            task.cancel()
        await engine.shutdown()
        link.over()
        services.prompts.close()
        services.shaper.close()


def _take_signals(drain: Drain, link: ParentLink, say: Callable[[str], None]) -> Callable[[int], None]:
    """From now on, let SIGTERM and SIGINT start the graceful stop, even while the engine is loading. Returns the
    function that does so, given the number of a signal."""

    def stop(number: int) -> None:
        drain.ask(lame_duck=number != signal.SIGINT)
        link.stopping()
        if drain.is_forced:
            say("Stopping at once.")
        else:
            say(f"Stopping: running requests have {drain.left_s:.0f} s to end. A second signal stops at once.")

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    return stop


class StartTimes:
    """Measures the parts of the start."""

    def __init__(self, begun_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._marks: list[tuple[str, float]] = [("", begun_s)]

    def end(self, part: str) -> None:
        """Record the end of `part`, which includes everything since the end of the previous part."""
        self._marks.append((part, self._now()))

    def __str__(self) -> str:
        parts = [f"{part} {at_s - before_s:.1f} s" for (_, before_s), (part, at_s) in pairwise(self._marks)]
        return f"{self._now() - self._marks[0][1]:.1f} s ({', '.join(parts)})"


def _greeting(config: ServerConfig, parts: StartTimes) -> tuple[str, ...]:
    return (
        f"Ready in {parts}.",
        _where(config),
        f"Open {config.url} in a browser to chat and to watch the batch. Ctrl-C stops the server.",
    )


def model_name(model: str | None) -> str:
    """Return the model name for clients: the hub id, or the name of the folder or file, but never a local path."""
    if model is None:
        from headway.loader.embedded import MODEL_NAME

        return MODEL_NAME
    path = Path(model).expanduser()
    return path.resolve().name.removesuffix(".gguf") if path.exists() else model


def _where(config: ServerConfig) -> str:
    where = f"Serving on {config.url} (API: {config.url}/v1, documentation: {config.url}/docs)."
    if config.is_local:
        return f"{where} Only this machine can reach it; --host 0.0.0.0 opens it to others."
    if not config.api_key:
        return f"{where} All clients that reach {config.host} may use it; --api-key asks for a key."
    return where


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's loop factory if uvloop is installed, else None."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
