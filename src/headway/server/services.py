"""The objects that every route needs, made once at the start: engine, prompt maker, limits and counters."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from headway.core.kv.manager import CacheReset
from headway.front.engine_client import Health
from headway.front.streams import RequestStream
from headway.front.watch_streams import CacheStream, SnapshotStream
from headway.predict.prediction_thread import PredictionThread
from headway.server.admission.queue_limits import BYTES_PER_TOKEN, QueueLimits, Reservation
from headway.server.admission.service_classes import ONE_CLASS, Scheduling, ServiceClass, ServiceClasses
from headway.server.admission.tenant_gate import TenantGate, default_most
from headway.server.api.api_errors import ApiError, unavailable
from headway.server.api.prompts import PromptMaker
from headway.server.api.requested_output import ModelFormats
from headway.server.api.shaper import Helpers, Shaper
from headway.server.http.access_control import ApiKeys
from headway.server.http.asgi_io import BodyReader
from headway.server.http.draining import SHUTTING_DOWN, Drain
from headway.server.metrics import prometheus
from headway.server.metrics.access_log import AccessRecord
from headway.server.metrics.families import EngineNumbers
from headway.server.metrics.server_metrics import ServerMetrics
from headway.server.server_config import ServerConfig
from headway.structured.compiling import trie_parts
from headway.structured.helper_processes import HelperProcesses
from headway.tokenizer import Tokenizer
from headway.wire.engine_stats import EngineStats
from headway.wire.messages import AddRequest, EngineReady


class Engine(EngineNumbers, Protocol):
    """The part of `EngineClient` that the server uses. Tests have their own implementation."""

    @property
    def health(self) -> Health: ...
    def submit(self, request: AddRequest, stream: RequestStream | None = None) -> RequestStream: ...
    def watch(self, place: int = 0) -> SnapshotStream: ...
    def follow_caches(self) -> CacheStream: ...
    async def reset_caches(self, *, with_disk: bool = False) -> CacheReset: ...
    def add_step_listener(self, listener: Callable[[EngineStats], None]) -> None: ...


@dataclass
class Services:
    """The shared objects of all routes. Belongs to one event loop."""

    config: ServerConfig
    engine: Engine
    bodies: BodyReader
    prompts: PromptMaker
    formats: ModelFormats
    shaper: Shaper
    limits: QueueLimits
    gate: TenantGate
    metrics: ServerMetrics
    keys: ApiKeys
    model_names: tuple[str, ...]
    drain: Drain
    classes: ServiceClasses = ONE_CLASS
    lengths: PredictionThread | None = None
    """Predicts lengths of answers and logs them; None if neither is configured."""
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    """The engine's options, flat, with their defaults."""
    on_request_end: list[Callable[[AccessRecord], None]] = field(default_factory=list)
    """Called with every request that has ended, for the access log and traces."""
    started_s: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def create(
        cls,
        config: ServerConfig,
        engine: Engine,
        tokenizer: Tokenizer | None,
        *,
        model_name: str,
        classes: ServiceClasses = ONE_CLASS,
        lengths: PredictionThread | None = None,
        engine_options: Mapping[str, Any] | None = None,
        create_helpers: Callable[[], Helpers] | None = None,
        drain: Drain | None = None,
    ) -> Services:
        """Make and connect all objects. The engine may not be ready yet. `create_helpers`: see `Shaper`."""
        names = config.served_model_name or (model_name,)
        metrics = ServerMetrics(names[0])
        engine.add_step_listener(metrics.observe_step)
        formats = ModelFormats.of_model(
            tokenizer, tool_format=config.tool_format, reasoning_format=config.reasoning_format
        )
        return cls(
            config=config,
            engine=engine,
            bodies=BodyReader(max_bytes=config.max_body_bytes, timeout_s=config.receive_timeout_s),
            prompts=PromptMaker(tokenizer, num_threads=config.tokenizer_threads, tool_format=formats.tool_format),
            formats=formats,
            shaper=Shaper(create_helpers or partial(_create_helpers, tokenizer, engine)),
            limits=QueueLimits(
                max_requests=config.max_queue_requests,
                max_tokens=config.max_queue_tokens,
                classes=classes,
                tenants=config.tenant_limits,
                token_s=lambda: engine.stats.step.prompt_token_s,
            ),
            gate=TenantGate(engine, lambda: _most_running(config, engine)),
            metrics=metrics,
            keys=ApiKeys(config.api_key),
            model_names=names,
            drain=drain or Drain(lame_duck_s=config.lame_duck_s, timeout_s=config.drain_timeout_s),
            classes=classes,
            lengths=lengths,
            engine_options=engine_options or {},
        )

    @property
    def model_name(self) -> str:
        """The model name in answers."""
        return self.model_names[0]

    @property
    def problem(self) -> str | None:
        """Why requests are not being served, or None."""
        if self.drain.is_asked:
            return SHUTTING_DOWN
        health = self.engine.health
        return None if health.ok else health.reason

    @property
    def info(self) -> EngineReady:
        """The engine's properties. Raises 503 before the engine has been ready for the first time."""
        if self.engine.info is None:
            raise unavailable("The engine is starting; please retry.", code="engine_unavailable")
        return self.engine.info

    def metrics_page(self) -> bytes:
        """Return the text of /metrics."""
        return prometheus.render(self.metrics, self.engine, self.limits, self.config.metric_forms)

    def reserve(self, scheduling: Scheduling, *, body_bytes: int, num_prompts: int, key: str | None) -> Reservation:
        """Reserve a place in the queue, or raise 429. Lateness of the first token is only checked if the operator wants
        it and requests are waiting in the engine. If none are, the engine admits newcomers in its next step."""
        stats = self.engine.stats
        may_be_late = self.config.refuse_late and stats.batch.num_waiting > 0
        return self.limits.reserve(
            body_bytes=self._countable(body_bytes, num_prompts),
            service_class=scheduling.service_class,
            tenant=self.tenant(scheduling.options.tenant, key=key),
            in_time_s=scheduling.options.ttft_target_s if may_be_late else None,
        )

    def reserve_tokenizer(self, *, body_bytes: int, key: str | None) -> Reservation:
        """Reserve a place in the queue for a text that is only tokenised, because it uses the same threads as
        completions. Raises 429 if there is none."""
        return self.limits.reserve(body_bytes=self._countable(body_bytes, 1), tenant=self.tenant("", key=key))

    def _countable(self, body_bytes: int, num_prompts: int) -> int:
        """Return how many bytes of the body count in the queue: at most those that fit into the context. A larger body
        is refused elsewhere because of its size, and not with 429, since waiting would not help it."""
        return min(body_bytes, num_prompts * self.info.max_model_len * BYTES_PER_TOKEN)

    def max_waiting(self, service_class: ServiceClass) -> int:
        """Return how many completions of a class may wait. A single request cannot ask for more."""
        most = self.limits.whole.max_requests
        return most if service_class.max_waiting is None else min(most, service_class.max_waiting)

    def tenant(self, wanted: str, *, key: str | None) -> str:
        """Return the request's tenant: its API key if there are several keys, else the tenant that the client names."""
        return key or "" if self.config.has_several_keys else wanted

    def cache_salt(self, wanted: str | None, *, key: str | None) -> str | None:
        """Return the salt that separates a request's cached prefixes: its own, combined with its API key if prefixes
        are kept apart by key."""
        return f"{key}:{wanted or ''}" if self.config.keeps_keys_apart else wanted

    def check_model(self, name: str | None) -> None:
        """Raise 404 for a model that is not served here."""
        if name is not None and name not in self.model_names:
            served = ", ".join(f"'{known}'" for known in self.model_names)
            raise ApiError(
                404,
                f"The model '{name[:200]}' is not served here; there is {served}.",
                param="model",
                code="model_not_found",
            )


def _create_helpers(tokenizer: Tokenizer | None, engine: Engine) -> HelperProcesses:
    """Return helper processes, with the model's vocabulary if grammars can be compiled for it."""
    if tokenizer is None or not tokenizer.eos_token_ids:
        return HelperProcesses(None)
    return HelperProcesses(trie_parts(tokenizer, 0 if engine.info is None else engine.info.vocab_size))


def _most_running(config: ServerConfig, engine: Engine) -> int | None:
    """Return how many sequences of a tenant the engine may have; None for no limit."""
    if config.max_running_per_tenant is not None:
        return config.max_running_per_tenant or None
    if not config.has_several_keys or engine.info is None:
        return None
    return default_most(engine.info.max_num_seqs * max(1, sum(each.role != "prefill" for each in engine.replicas)))
