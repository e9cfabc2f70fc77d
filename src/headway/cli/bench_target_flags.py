"""Flags that say what a load is put on: a server, or the engine in this process.

A flag that names a server chooses it. A flag that has no effect on what was chosen is refused.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from headway.cli.flags import chosen, count, engine_flags, shape_defaults
from headway.config import EngineConfig
from headway.errors import ConfigError
from headway.lab.bench.engine_target import EngineTarget
from headway.lab.bench.server_target import ServerOptions, ServerTarget
from headway.lab.bench.targets import Judging, Target
from headway.server.server_config import API_KEY_VARIABLE, ServerConfig

BACKENDS: Mapping[str, tuple[Literal["completions", "chat"], str]] = {
    "openai": ("completions", "/v1/completions"),
    "openai-chat": ("chat", "/v1/chat/completions"),
}
"""By the names that vLLM's command has for them: what is sent, and where to."""
_BACKEND = "openai"
_TIMEOUT_S = 6 * 3600.0
_SAMPLE_EVERY_S = 0.5
_NAMES_A_SERVER = ("base_url", "host", "port", "api_key", "backend", "endpoint", "extra_body")
_NEEDS_A_SERVER = ("max_concurrency", "ignore_eos", "plain_requests", "vocab_size", "request_timeout")
_SERVER_TOO = ("model", "seed", "tokenizer")
"""Options of the engine that mean something for a server: its model's name, and what prompts are made with."""


def add_server_flags(parser: argparse.ArgumentParser, *, has_samples: bool = False) -> None:
    """How a server is reached and talked to; its model and the seed apart, which other flags may bring. `has_samples`:
    the command shows what the server says about its batch. What is not given is `None`."""
    default = ServerConfig()
    group = parser.add_argument_group("server")
    group.add_argument(
        "--backend",
        choices=tuple(BACKENDS),
        help="openai: prompts as token ids (or text) to /v1/completions; openai-chat: as text to "
        f"/v1/chat/completions. (default: {_BACKEND})",
    )
    group.add_argument("--base-url", metavar="URL", help="Where the server is, instead of --host and --port.")
    group.add_argument("--host", help=f"(default: {default.host})")
    group.add_argument("--port", type=count(1), metavar="N", help=f"(default: {default.port})")
    group.add_argument("--endpoint", metavar="PATH", help="(default: that of the backend)")
    group.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"The server's key. (default: ${API_KEY_VARIABLE} or $OPENAI_API_KEY)",
    )
    group.add_argument(
        "--max-concurrency",
        type=count(1),
        metavar="N",
        help="Most requests at a time; others wait for their turn, and that wait is not counted. (default: no limit)",
    )
    group.add_argument(
        "--ignore-eos",
        action="store_true",
        default=None,
        help="Ask for exactly as many tokens as the work says, if the server can.",
    )
    group.add_argument("--extra-body", type=_json_object, metavar="JSON", help="Fields added to every request.")
    group.add_argument(
        "--plain-requests",
        action="store_true",
        default=None,
        help="Do not send what a workload's classes say about scheduling (priority, tenant, targets), for a server "
        "that refuses it.",
    )
    group.add_argument(
        "--vocab-size",
        type=count(1),
        metavar="N",
        help="Random ids are drawn below this, and at most to 10,000. (default: what the server says, else 10,001)",
    )
    group.add_argument(
        "--request-timeout",
        type=float,
        metavar="SECONDS",
        help=f"A request that takes longer has failed. (default: {_TIMEOUT_S:g})",
    )
    if has_samples:
        group.add_argument(
            "--sample-interval",
            type=float,
            metavar="SECONDS",
            help=f"How often the server's /metrics are read for the report; 0: never. (default: {_SAMPLE_EVERY_S:g})",
        )


def add_warmup_flag(parser: argparse.ArgumentParser) -> None:
    """For a server and for the engine."""
    parser.add_argument(
        "--num-warmups",
        type=count(0),
        default=1,
        metavar="N",
        help="Requests sent before, all at once. (default: %(default)s)",
    )


def backend_of(arguments: argparse.Namespace) -> str:
    """By its name."""
    return arguments.backend or _BACKEND


def server_options(arguments: argparse.Namespace, *, model: str | None, temperature: float) -> ServerOptions:
    """From the flags, and the key perhaps from the environment."""
    every_s = getattr(arguments, "sample_interval", 0.0)
    every_s = _SAMPLE_EVERY_S if every_s is None else every_s
    timeout_s = _TIMEOUT_S if arguments.request_timeout is None else arguments.request_timeout
    if not every_s >= 0 or not timeout_s > 0:
        raise ConfigError("--sample-interval and --request-timeout are times: not below 0, and above 0.")
    kind, endpoint = BACKENDS[backend_of(arguments)]
    endpoint = arguments.endpoint or endpoint
    key = arguments.api_key or os.environ.get(API_KEY_VARIABLE) or os.environ.get("OPENAI_API_KEY")
    return ServerOptions(
        base_url=_base_url(arguments),
        kind=kind,
        endpoint=endpoint if endpoint.startswith("/") else f"/{endpoint}",
        model=model,
        api_key=key,
        temperature=temperature,
        ignore_eos=bool(arguments.ignore_eos),
        extra_body=arguments.extra_body or {},
        is_plain=bool(arguments.plain_requests),
        max_concurrency=arguments.max_concurrency,
        timeout_s=timeout_s,
        sample_every_s=every_s,
        num_warmups=arguments.num_warmups,
        vocab_size=arguments.vocab_size,
    )


def names_a_server(arguments: argparse.Namespace) -> bool:
    """Whether the load goes to a server."""
    return bool(_given(arguments, _NAMES_A_SERVER))


def targets_of(
    arguments: argparse.Namespace, judging: Judging, settings: Sequence[dict[str, Any]] = ({},)
) -> list[Callable[[], Target]]:
    """The server that the flags name, or else an engine for each of the settings over the options that were given.
    Everything is checked here; a call connects or loads."""
    given = chosen(arguments, engine_flags())
    if names_a_server(arguments):
        by = _given(arguments, _NAMES_A_SERVER)[0]
        for name in given:
            if name not in _SERVER_TOO:
                raise ConfigError(
                    f"{_flag(name)} is an option of the engine in this process, and {by} chooses a server, which has "
                    "its own; give one of the two."
                )
        if any(settings):
            raise ConfigError(f"--knob sets an option of the engine in this process; {by} chooses a server.")
        options = server_options(arguments, model=given.get("model"), temperature=arguments.temperature)
        return [lambda: ServerTarget(options, judging)]
    if without_effect := _given(arguments, _NEEDS_A_SERVER):
        raise ConfigError(
            f"{without_effect[0]} is for a server and has no effect on the engine in this process: name the server "
            "with --port or --base-url."
        )
    configs = [engine_config({**given, **setting}) for setting in settings]
    return [lambda config=config: engine_target(arguments, judging, config) for config in configs]  # type: ignore[misc]


def engine_target(arguments: argparse.Namespace, judging: Judging, config: EngineConfig) -> EngineTarget:
    """Load an engine."""
    from headway.cli.demo import title
    from headway.cli.loading import load_engine, stderr_console

    engine = load_engine(config, stderr_console(), quiet=True, warm=True)
    return EngineTarget(
        engine,
        name=title(config),
        temperature=arguments.temperature,
        judging=judging,
        num_warmups=arguments.num_warmups,
    )


def engine_config(options: dict[str, Any]) -> EngineConfig:
    """A built-in shape has no weights but random ones."""
    return EngineConfig.from_options(**{**shape_defaults(options.get("model")), **options})


def _base_url(arguments: argparse.Namespace) -> str:
    if arguments.base_url is not None:
        if beside := _given(arguments, ("host", "port")):
            raise ConfigError(f"--base-url and {beside[0]} both say where the server is; give one of the two.")
        return str(arguments.base_url)
    default = ServerConfig()
    host = arguments.host or default.host
    return f"http://{f'[{host}]' if ':' in host else host}:{arguments.port or default.port}"


def _given(arguments: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """The flags of these that are on the command line."""
    return [_flag(name) for name in names if getattr(arguments, name) is not None]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"'{text}' is not a JSON object")
    return value
