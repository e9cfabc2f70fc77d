"""Flags that say whom a load is put on: a server, by its address, or the engine in this process."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from typing import Any, Literal

from headway.bench.engine_target import EngineTarget
from headway.bench.server_target import ServerOptions, ServerTarget
from headway.bench.targets import Judging
from headway.cli.counts import count
from headway.cli.flags import chosen, engine_flags, shape_defaults
from headway.config import EngineConfig
from headway.errors import ConfigError
from headway.server.config import API_KEY_VARIABLE, ServerConfig

BACKENDS: Mapping[str, tuple[Literal["completions", "chat"], str]] = {
    "openai": ("completions", "/v1/completions"),
    "openai-chat": ("chat", "/v1/chat/completions"),
}
"""By the names that vLLM's command has for them: what is sent, and where to."""
_TIMEOUT_S = 6 * 3600.0


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """How a server is reached and talked to; its model and the seed apart, which other flags may bring."""
    default = ServerConfig()
    group = parser.add_argument_group("server")
    group.add_argument(
        "--backend",
        choices=tuple(BACKENDS),
        default="openai",
        help="openai: prompts as token ids (or text) to /v1/completions; openai-chat: as text to "
        "/v1/chat/completions. (default: %(default)s)",
    )
    group.add_argument("--base-url", metavar="URL", help="Where the server is, instead of --host and --port.")
    group.add_argument("--host", default=default.host, help="(default: %(default)s)")
    group.add_argument("--port", type=count(1), default=default.port, metavar="N", help="(default: %(default)s)")
    group.add_argument("--endpoint", metavar="PATH", help="(default: that of the backend)")
    group.add_argument(
        "--api-key",
        default=os.environ.get(API_KEY_VARIABLE) or os.environ.get("OPENAI_API_KEY"),
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
        "--ignore-eos", action="store_true", help="Ask for exactly as many tokens as the work says, if the server can."
    )
    group.add_argument(
        "--extra-body", type=_json_object, default={}, metavar="JSON", help="Fields added to every request."
    )
    group.add_argument(
        "--plain-requests",
        action="store_true",
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
        "--num-warmups",
        type=count(0),
        default=1,
        metavar="N",
        help="Requests sent before, all at once. (default: %(default)s)",
    )
    group.add_argument(
        "--request-timeout",
        type=float,
        default=_TIMEOUT_S,
        metavar="SECONDS",
        help="A request that takes longer has failed. (default: %(default)g)",
    )
    group.add_argument(
        "--sample-interval",
        type=float,
        default=0.5,
        metavar="SECONDS",
        help="How often the server's /metrics are read for the report; 0: never. (default: %(default)g)",
    )


def server_options(arguments: argparse.Namespace, *, model: str | None, temperature: float) -> ServerOptions:
    """From the flags."""
    if arguments.sample_interval < 0 or arguments.request_timeout <= 0:
        raise ConfigError("--sample-interval and --request-timeout are times: not below 0, and above 0.")
    kind, endpoint = BACKENDS[arguments.backend]
    endpoint = arguments.endpoint or endpoint
    return ServerOptions(
        base_url=arguments.base_url or f"http://{arguments.host}:{arguments.port}",
        kind=kind,
        endpoint=endpoint if endpoint.startswith("/") else f"/{endpoint}",
        model=model,
        api_key=arguments.api_key,
        temperature=temperature,
        ignore_eos=arguments.ignore_eos,
        extra_body=arguments.extra_body,
        is_plain=arguments.plain_requests,
        max_concurrency=arguments.max_concurrency,
        timeout_s=arguments.request_timeout,
        sample_every_s=arguments.sample_interval,
        num_warmups=arguments.num_warmups,
        vocab_size=arguments.vocab_size,
    )


def server_target(arguments: argparse.Namespace, judging: Judging) -> ServerTarget:
    """For commands that can also run an engine: --model names the server's model, and nothing else of the engine can
    be set from here."""
    given = chosen(arguments, engine_flags())
    model, _ = given.pop("model", None), given.pop("seed", None)
    if given:
        flag = "--" + next(iter(given)).replace("_", "-")
        raise ConfigError(f"{flag} is an option of the engine in this process; a server has its own (--base-url).")
    return ServerTarget(server_options(arguments, model=model, temperature=arguments.temperature), judging)


def engine_target(
    arguments: argparse.Namespace, judging: Judging, setting: dict[str, Any] | None = None
) -> EngineTarget:
    """An engine with the options that were given, and those of `setting` over them."""
    if arguments.max_concurrency is not None or arguments.backend != "openai":
        raise ConfigError("--max-concurrency and --backend are for a server: name one with --base-url.")
    config = engine_config({**chosen(arguments, engine_flags()), **(setting or {})})

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


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"'{text}' is not a JSON object")
    return value
