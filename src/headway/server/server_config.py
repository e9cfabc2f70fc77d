"""The options of the HTTP server, declared as in `headway.config`. Flags, help and docs/server.md come from here."""

from __future__ import annotations

import dataclasses
import ipaddress
import math
import re
from dataclasses import dataclass

from headway.errors import ConfigError
from headway.front.kv_events_config import KVEventsConfig
from headway.front.roles import Roles
from headway.front.router import ROUTERS
from headway.option_fields import check_values, option
from headway.price import check_price
from headway.server.admission.queue_shares import TenantLimits
from headway.structured.reasoning_formats import REASONING_FORMATS
from headway.structured.tool_call_formats import TOOL_FORMATS
from headway.text_files import read_small_text

API_KEY_VARIABLE = "HEADWAY_API_KEY"
"""Environment variable with one more API key, which keeps the key out of process lists."""

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")

_HOST = re.compile(r"[^\s:/\[\]]+|\[[0-9A-Fa-f:.]+\]")
_ORIGIN = re.compile(rf"[A-Za-z][A-Za-z0-9+.-]*://({_HOST.pattern})(:\d+)?")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Where the server listens, who may use it, and how much it takes on at once."""

    host: str = option("127.0.0.1", "Address to listen on. 0.0.0.0 makes the server reachable from other machines.")
    port: int = option(8000, "TCP port to listen on. 0 picks a free one.")
    api_key: tuple[str, ...] = option(
        (),
        "Key that clients must send, as 'Authorization: Bearer KEY', on every route but /health, /ready, /ping and "
        f"/v2/health. ${API_KEY_VARIABLE} adds one. Without any, all clients that reach the port may use the server.",
        metavar="KEY",
        is_secret=True,
    )
    api_key_file: str | None = option(
        None,
        "File with further keys, one per line; empty lines and lines that begin with # do not count.",
        metavar="FILE",
    )
    cache_salt_by_key: bool | None = option(
        None,
        "Whether requests with different API keys never share cached prefixes, so that no client can tell from "
        "cached_tokens or the time to a first token what others have asked. Default: on, if there are two keys or "
        "more.",
    )
    served_model_name: tuple[str, ...] = option(
        (),
        "Names of the model in requests, e.g. a b c; the first one is in answers. Default: the name it was loaded by.",
        metavar="NAME",
        takes_several=True,
    )
    tool_format: str = option(
        "auto",
        "How the model writes calls of tools. auto: what its chat template suggests.",
        choices=("auto", *TOOL_FORMATS),
    )
    reasoning_format: str = option(
        "auto",
        "How the model marks its thinking, which answers have as reasoning_content. auto: what its chat template "
        "suggests. none: it is part of the text.",
        choices=("auto", "none", *REASONING_FORMATS),
    )
    max_queue_requests: int = option(
        1024, "Most completions that may wait for their first token; a request beyond gets 429 with Retry-After."
    )
    max_queue_tokens: int = option(2_000_000, "Most prompt tokens that may wait; a request beyond gets 429.")
    max_waiting_per_tenant: int | None = option(
        None,
        "Most completions of one tenant that may wait for their first token, and the same part of --max-queue-tokens; "
        "a request beyond gets 429. A tenant is an API key if there are several, else what requests name as their "
        "user. 0: no limit. Default: with several keys each has an equal part of the queue, else no limit.",
    )
    max_running_per_tenant: int | None = option(
        None,
        "Most completions of one tenant that the engine has at once; those beyond wait in the front end. 0: no limit. "
        "Default: with several keys as many as there are seats (--max-num-seqs of all replicas) and an eighth more, "
        "else no limit.",
    )
    queue_ttl_s: float = option(
        300.0, "Longest time until a request's first token; after it, the request ends with 503. 0: no limit."
    )
    request_timeout_s: float = option(
        3600.0, "Longest time that a request may take as a whole; after it, it ends with 504. 0: no limit."
    )
    service_classes: str | None = option(
        None,
        "A .toml or .json file with kinds of requests: the targets and the priority of those that do not say, how many "
        "may wait, and which are dropped first when the queue is full. --help ends with an example.",
        metavar="FILE",
    )
    refuse_late: bool = option(
        False,
        "Whether a request with a target for its first token gets 429 at once if its class's queue is too long for it.",
    )
    early_headers: bool = option(
        True,
        "Whether a stream's headers, with the expected wait, are sent as soon as the request waits, and not with its "
        "first token. An error after that, such as a full queue's 503, comes as the stream's last event.",
    )
    enable_per_request_metrics: bool = option(
        False,
        "Whether answers have an object 'metrics' with the request's times: waiting, prefill, first token, pace. In a "
        "stream it is in the last chunk.",
    )
    lame_duck_s: float = option(
        5.0,
        "On SIGTERM: how long new requests are still served while /health and /ready are 503, so that no load balancer "
        "has a request refused; at most --drain-timeout-s. SIGINT (Ctrl-C) skips it.",
    )
    drain_timeout_s: float = option(
        15.0,
        "On SIGTERM or SIGINT: how long running requests may go on before they are ended, counted from the signal. The "
        "server is gone at most 10 seconds later, and at once when nothing runs any more.",
    )
    watchdog_s: float = option(60.0, "/health turns 503 when a step of the engine takes longer than this.")
    step_timeout_s: float = option(
        600.0,
        "A step that takes longer than this is taken for stuck: the engine is killed and started again. 0: never.",
    )
    engine_hang_timeout_s: float = option(
        10.0,
        "An engine process that has given no sign of life for this long is killed and started again. /health is 503 "
        "after 3 seconds of silence. 0: never.",
    )
    front_end_hang_timeout_s: float = option(
        30.0,
        "A front end whose event loop stands still for this long writes its stacks to stderr, is killed, and started "
        "again by its parent process. 0: never.",
    )
    replicas: int = option(
        1, "Engine processes on this machine: on a GPU each, or with a share of the cores. Each loads the model."
    )
    min_replicas: int = option(
        0, "Least number of replicas: one is removed while fewer are enough. 0: as many as --replicas."
    )
    max_replicas: int = option(
        0, "Most replicas: one is added when requests have waited for 5 seconds. 0: as many as --replicas."
    )
    roles: str | None = option(
        None,
        "Prefill and decode apart, e.g. prefill=1,decode=2: the number of engine processes of each kind, in place of "
        "--replicas. Those of the first kind compute prompts where that makes others wait less, and send KV blocks to "
        "those that answer.",
    )
    ray: bool = option(
        False,
        "Run the replicas on the nodes and GPUs of a Ray cluster, which front ends share. Starts one here if there is "
        "none. Needs the extra 'ray'.",
    )
    address: str | None = option(None, "The Ray cluster's head node, HOST:PORT. Default: $RAY_ADDRESS, or found here.")
    router: str = option(
        "prefix-aware",
        "Which replica gets a request. " + "; ".join(f"{name}: {text}" for name, text in ROUTERS.items()) + ".",
        choices=tuple(ROUTERS),
    )
    kv_events: bool = option(
        False,
        "Whether /v1/kv_events tells which blocks each replica's prefix cache stores and evicts, for routers outside.",
    )
    kv_events_config: str | None = option(
        None,
        "Publish the blocks that prefix caches store and evict, with their tokens, over ZeroMQ in vLLM's format, for "
        'gateways: a JSON object as vLLM takes it, e.g. {"endpoint": "tcp://*:5557", "replay_endpoint": '
        '"tcp://*:5558", "topic": "kv@POD@MODEL"}. Whoever reaches the addresses can read all prompts. Needs the extra '
        "'gateway'.",
        metavar="JSON",
    )
    enable_admin_routes: bool = option(
        False,
        "Whether /server_info shows the settled options and /reset_prefix_cache empties the prefix caches. All clients "
        "with an API key may then use them.",
    )
    resume: bool = option(
        True,
        "Whether requests go on, token for token, in another replica or after a restart when their engine process "
        "ends. Otherwise they end with 503.",
    )
    max_body_bytes: int = option(8 * 2**20, "Largest request body, e.g. 8MiB; more is 413.", metavar="BYTES")
    max_header_bytes: int = option(32 * 2**10, "Largest request head, e.g. 32KiB; more is 431.", metavar="BYTES")
    receive_timeout_s: float = option(
        60.0,
        "Longest time that a client may take to send a request's head, and again its body, and may leave an answer "
        "unread.",
    )
    cors_origin: tuple[str, ...] = option(
        (),
        "Origin whose web pages may call the server, e.g. https://example.org; * for any. Pages of other origins than "
        "the server's own are refused.",
        metavar="ORIGIN",
    )
    allowed_host: tuple[str, ...] = option(
        (),
        "Name, without a port, by which clients may call the server (their Host header); * for any. Without it, a "
        "server that only this machine can reach answers to localhost, 127.0.0.1, ::1 and --host, others to any name.",
        metavar="NAME",
    )
    ssl_certfile: str | None = option(
        None, "TLS certificate (PEM, with its chain). Needs --ssl-keyfile.", metavar="FILE"
    )
    ssl_keyfile: str | None = option(None, "TLS private key (PEM).", metavar="FILE")
    price_per_hour: float | None = option(
        None,
        "What one device (a GPU; without one, the machine) costs for an hour, in any currency: the page shows what a "
        "million tokens cost. Default: no prices.",
    )
    metrics_prefix: str = option(
        "headway",
        "Names of /metrics. headway: all numbers, as headway:NAME. vllm: those that vLLM has too, with vLLM's names "
        "and labels, for its dashboards and for gateways. headway,vllm: both.",
        choices=("headway", "vllm", "headway,vllm"),
    )
    access_log: bool = option(
        True, "Write one JSON line per request to stdout. Also --request-log.", aliases=("request_log",)
    )
    log_level: str = option(
        "info",
        "Least level of Headway's messages on stderr, of the front end and of the engines. The lines about start and "
        "stop, and the access log, have no level.",
        choices=LOG_LEVELS,
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "Send a span per completion request to this OpenTelemetry collector, e.g. http://localhost:4318/v1/traces. "
        "Needs the extra 'otel'.",
        metavar="URL",
    )
    tokenizer_threads: int = option(2, "Threads that apply chat templates and tokenise prompts.")
    engine_factory: str | None = option(
        None,
        "module:function that builds the engine process's engine in place of the usual one, for tests and benchmarks.",
    )

    def __post_init__(self) -> None:
        check_values(self)
        _check_whole(self, "port", 0, 65535)
        for name in ("max_queue_requests", "max_queue_tokens", "tokenizer_threads", "replicas"):
            _check_whole(self, name, 1, 2**40)
        for name in ("max_waiting_per_tenant", "max_running_per_tenant"):
            if getattr(self, name) is not None:
                _check_whole(self, name, 0, 2**40)
        for name in ("min_replicas", "max_replicas"):
            _check_whole(self, name, 0, 2**16)
        for name in ("max_body_bytes", "max_header_bytes"):
            _check_whole(self, name, 1024, 2**40)
        for name in (
            "queue_ttl_s",
            "request_timeout_s",
            "lame_duck_s",
            "drain_timeout_s",
            "step_timeout_s",
            "engine_hang_timeout_s",
            "front_end_hang_timeout_s",
        ):
            _check_seconds(self, name, zero=True)
        for name in ("receive_timeout_s", "watchdog_s"):
            _check_seconds(self, name, zero=False)
        if self.api_key_file is not None:
            object.__setattr__(self, "api_key", tuple(dict.fromkeys((*self.api_key, *_keys_in(self.api_key_file)))))
        if self.price_per_hour is not None:
            check_price(self.price_per_hour)
        if any(not key.strip() for key in self.api_key):
            raise ConfigError("An empty api_key is no key: give some text or leave it out.")
        if any(not name.strip() for name in self.served_model_name):
            raise ConfigError("served_model_name must not be empty.")
        for origin in self.cors_origin:
            if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
                raise ConfigError(f"cors_origin must be like https://example.org:8443, or *; not {origin!r}.")
        for name in self.allowed_host:
            if name != "*" and not _HOST.fullmatch(name):
                raise ConfigError(f"allowed_host must be a name without a port, like example.org, or *; not {name!r}.")
        if not 1 <= (self.min_replicas or self.replicas) <= self.replicas <= (self.max_replicas or self.replicas):
            raise ConfigError("replicas must be at least min_replicas and at most max_replicas.")
        if self.roles is not None:
            self._check_roles(Roles.parse(self.roles))
        if self.kv_events_config is not None:
            KVEventsConfig.parse(self.kv_events_config)
        if self.address is not None and not self.ray:
            raise ConfigError("address is that of a Ray cluster: give --ray, too.")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("TLS needs both ssl_certfile and ssl_keyfile.")
        if self.otlp_traces_endpoint is not None and not self.otlp_traces_endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"otlp_traces_endpoint must be an http:// or https:// URL, not {self.otlp_traces_endpoint!r}."
            )
        if self.cache_salt_by_key and not self.api_key:
            raise ConfigError("cache_salt_by_key distinguishes requests by their API key; give an api_key.")

    def _check_roles(self, roles: Roles) -> None:
        if self.replicas not in (1, roles.num_replicas):
            raise ConfigError(f"roles={self.roles} are {roles.num_replicas} replicas, and replicas={self.replicas}.")
        if self.min_replicas or self.max_replicas:
            raise ConfigError("roles fix the number of replicas: leave min_replicas and max_replicas out.")

    @property
    def published_events(self) -> KVEventsConfig | None:
        """Where events of the prefix caches are published; None for nowhere."""
        config = None if self.kv_events_config is None else KVEventsConfig.parse(self.kv_events_config)
        return config if config is not None and config.is_on else None

    @property
    def keeps_keys_apart(self) -> bool:
        """Whether requests with different API keys never share cached prefixes."""
        return self.has_several_keys if self.cache_salt_by_key is None else self.cache_salt_by_key

    @property
    def has_several_keys(self) -> bool:
        """Whether each API key is a tenant."""
        return len(set(self.api_key)) > 1

    @property
    def tenant_limits(self) -> TenantLimits | None:
        """How much of the queue a tenant may have; None for all of it."""
        num_keys, most = len(set(self.api_key)), self.max_waiting_per_tenant
        if most is None and num_keys > 1:
            most = max(1, self.max_queue_requests // num_keys)
        if not most:
            return None
        num_tokens = max(1, self.max_queue_tokens * most // self.max_queue_requests)
        return TenantLimits(most, num_tokens, is_guaranteed=1 < num_keys <= self.max_queue_requests // most)

    @property
    def url(self) -> str:
        """Where a browser on this machine finds the server."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        if ":" in host:
            host = f"[{host}]"
        return f"{'http' if self.ssl_certfile is None else 'https'}://{host}:{self.port}"

    @property
    def scaling(self) -> tuple[int, int] | None:
        """Least and largest number of replicas, or None if the number is fixed."""
        limits = self.min_replicas or self.replicas, self.max_replicas or self.replicas
        return limits if limits[0] < limits[1] else None

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def metric_forms(self) -> tuple[str, ...]:
        """The kinds of names that /metrics shows."""
        return tuple(self.metrics_prefix.split(","))

    def with_port(self, port: int) -> ServerConfig:
        """Return the same configuration with the port that was actually bound."""
        return dataclasses.replace(self, port=port)


def _keys_in(path: str) -> list[str]:
    try:
        lines = read_small_text(path).splitlines()
    except ConfigError as error:
        raise ConfigError(f"api_key_file '{path}': {error}") from None
    keys = [key for line in lines if (key := line.strip()) and not key.startswith("#")]
    if not keys:
        raise ConfigError(f"api_key_file '{path}' has no key in it; write one per line.")
    return keys


def _check_whole(config: ServerConfig, name: str, least: int, most: int) -> None:
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"{name} must be a whole number from {least} to {most}, not {value!r}.")


def _check_seconds(config: ServerConfig, name: str, *, zero: bool) -> None:
    value = getattr(config, name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < 0 or (value == 0 and not zero):
        raise ConfigError(f"{name} must be a number of seconds {'from' if zero else 'above'} 0, not {value!r}.")
