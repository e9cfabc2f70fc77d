"""Flags of every benchmark under load: the server or engine, the targets of the outcome, and runs at rates.

A flag that names a server chooses it. A flag that has no effect on what was chosen is refused.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from headway.config import EngineConfig
from headway.console.flags import (
    add_flags,
    chosen,
    count,
    engine_flags,
    number,
    parse_number,
    positive,
    with_shape_defaults,
)
from headway.errors import ConfigError
from headway.progress import progress_bar
from headway.server.server_config import API_KEY_VARIABLE, ServerConfig
from headway_lab.bench.datasets import (
    Dataset,
    Draw,
    add_dataset_flags,
    at_once,
    burstiness_of,
    dataset_of,
    new_seed,
    tokenizer_of,
)
from headway_lab.bench.load_target import EngineTarget, Judging, Outcome, Target
from headway_lab.bench.online_metrics import SHOWN_PERCENTILES
from headway_lab.bench.pricing import add_price_flag
from headway_lab.bench.server_target import ServerOptions, ServerTarget
from headway_lab.bench.slo_targets import Targets

if TYPE_CHECKING:
    from headway.tokenizer import Tokenizer


BACKENDS: Mapping[str, tuple[Literal["completions", "chat"], str]] = {
    "openai": ("completions", "/v1/completions"),
    "openai-chat": ("chat", "/v1/chat/completions"),
}
"""What is sent, and the path, by the names that vLLM's command has for backends."""
_BACKEND = "openai"
_TIMEOUT_S = 6 * 3600.0
_SAMPLE_EVERY_S = 0.5
_NAMES_A_SERVER = ("base_url", "host", "port", "api_key", "backend", "endpoint", "extra_body")
_NEEDS_A_SERVER = ("max_concurrency", "ignore_eos", "plain_requests", "vocab_size", "request_timeout", "devices")
_SERVER_TOO = ("model", "seed", "tokenizer")
"""Options of the engine that also apply to a server: its model's name, and the seed and tokenizer of prompts."""
_TARGETS = ("ttft", "tpot", "e2el")


def add_server_flags(parser: argparse.ArgumentParser, *, has_samples: bool = False) -> None:
    """Add the flags for the server: its address and how requests are sent to it, without its model and the seed, which
    other flags may bring. `has_samples`: the command shows the server's metrics of its batch. A flag that is not given
    is `None`."""
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
        "--devices",
        type=count(1, 10**6),
        metavar="N",
        help="With --price-per-hour: how many devices the server has. (default: what the server says, else 1)",
    )
    group.add_argument(
        "--request-timeout",
        type=positive,
        metavar="SECONDS",
        help=f"A request that takes longer has failed. (default: {_TIMEOUT_S:g})",
    )
    if has_samples:
        group.add_argument(
            "--sample-interval",
            type=number(0.0),
            metavar="SECONDS",
            help=f"How often the server's /metrics are read for the report; 0: never. (default: {_SAMPLE_EVERY_S:g})",
        )


def add_warmup_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag of the warm-up, for a server and for the engine."""
    parser.add_argument(
        "--num-warmups",
        type=count(0),
        default=1,
        metavar="N",
        help="Requests sent before, all at once. (default: %(default)s)",
    )


def backend_of(arguments: argparse.Namespace) -> str:
    return arguments.backend or _BACKEND


def server_options(arguments: argparse.Namespace, *, model: str | None, temperature: float) -> ServerOptions:
    """Read the options from the flags, and the key from the environment if there is no flag."""
    if arguments.devices is not None and arguments.price_per_hour is None:
        raise ConfigError("--devices is for prices: add --price-per-hour.")
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
        num_devices=arguments.devices,
    )


def names_a_server(arguments: argparse.Namespace) -> bool:
    """Whether the flags choose a server."""
    return bool(_given(arguments, _NAMES_A_SERVER))


def targets_of(
    arguments: argparse.Namespace, judging: Judging, settings: Sequence[dict[str, Any]] = ({},)
) -> list[Callable[[], Target]]:
    """The server that the flags name, or else an engine for each of the settings over the given options. Everything is
    checked here; calling a result connects to the server or loads the engine."""
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
    configs = [EngineConfig.from_options(**with_shape_defaults({**given, **setting})) for setting in settings]
    return [lambda config=config: engine_target(arguments, judging, config) for config in configs]  # type: ignore[misc]


def engine_target(arguments: argparse.Namespace, judging: Judging, config: EngineConfig) -> EngineTarget:
    from headway.console.loading import load_engine, model_title, stderr_console

    engine = load_engine(config, stderr_console(), quiet=True, warm=True)
    return EngineTarget(
        engine,
        name=model_title(config),
        temperature=arguments.temperature,
        judging=judging,
        num_warmups=arguments.num_warmups,
    )


def _base_url(arguments: argparse.Namespace) -> str:
    if arguments.base_url is not None:
        if beside := _given(arguments, ("host", "port")):
            raise ConfigError(f"--base-url and {beside[0]} both say where the server is; give one of the two.")
        return str(arguments.base_url)
    default = ServerConfig()
    host = arguments.host or default.host
    return f"http://{f'[{host}]' if ':' in host else host}:{arguments.port or default.port}"


def _given(arguments: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """Those of the named flags that are on the command line."""
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


def add_probe_flags(parser: argparse.ArgumentParser, *, probe_seconds: float, min_requests: int) -> None:
    """Add the flags of a run at a rate, except the rate."""
    parser.add_argument(
        "--probe-seconds",
        type=positive,
        metavar="S",
        help="At a rate, as many requests are sent as come in this time, unless --num-prompts says how many. "
        f"(default: {probe_seconds:g})",
    )
    parser.add_argument(
        "--min-requests", type=count(1), metavar="N", help=f"But at least so many. (default: {min_requests})"
    )
    parser.add_argument("--temperature", type=number(), default=0.0, metavar="X", help="(default: 0, greedy)")
    add_warmup_flag(parser)
    parser.add_argument("--output-json", metavar="FILE", help="Write the result here.")
    parser.add_argument("--html", metavar="FILE", help="Write a report with plots.")
    parser.add_argument("--disable-tqdm", action="store_true", help="Do not show how far it is.")
    add_judging_flags(parser)
    add_price_flag(parser)
    add_dataset_flags(parser)
    add_server_flags(parser)
    add_flags(parser, engine_flags())
    parser.set_defaults(default_probe_seconds=probe_seconds, default_min_requests=min_requests)


@dataclass(frozen=True)
class Probing:
    """The work of runs at rates, and how much of it each run has."""

    dataset: Dataset
    tokenizer: Tokenizer | None
    """The tokenizer for a server; an engine has its own."""
    seed: int
    burstiness: float
    num_requests: int | None
    min_requests: int
    seconds: float
    is_server: bool
    is_shown: bool

    @classmethod
    def of(cls, arguments: argparse.Namespace, rates: Sequence[float] = (1.0,)) -> Probing:
        """Read the flags and check everything. The seed of a load on a server is a new one each time, unless it is
        given."""
        is_server = names_a_server(arguments)
        dataset = dataset_of(arguments)
        if arguments.num_prompts is not None and (arguments.probe_seconds or arguments.min_requests):
            raise ConfigError(
                "--num-prompts says how many requests a run has; --probe-seconds and --min-requests do too."
            )
        return cls(
            dataset=dataset,
            tokenizer=tokenizer_of(arguments, dataset) if is_server else None,
            seed=getattr(arguments, "seed", new_seed() if is_server else 0),
            burstiness=burstiness_of(arguments, rates),
            num_requests=arguments.num_prompts,
            min_requests=arguments.min_requests or arguments.default_min_requests,
            seconds=arguments.probe_seconds or arguments.default_probe_seconds,
            is_server=is_server,
            is_shown=not arguments.disable_tqdm,
        )

    def num_requests_at(self, rate: float) -> int:
        """The number of requests that was asked for, or that fills the time."""
        if self.num_requests is not None:
            return self.num_requests
        return self.min_requests if math.isinf(rate) else max(self.min_requests, math.ceil(rate * self.seconds))

    def run(self, target: Target, rate: float, title: str) -> Outcome:
        """Run the work at a rate. Requests to a server have different contents at each rate, because of its prefix
        cache. An engine in this process keeps the runs apart, and gets the same requests."""
        seed = random.Random(f"{self.seed} {rate:g}").getrandbits(32) if self.is_server else self.seed
        wanted = Draw(self.num_requests_at(rate), rate, self.burstiness, seed, tokenizer=self.tokenizer)
        work = target.draw(self.dataset, wanted)
        with progress_bar(len(work), title, is_shown=self.is_shown) as progress:
            return target.run(work, progress)

    def served_rate(self, target: Target) -> float:
        """Requests served each second, if all are there at once."""
        wanted = Draw(self.num_requests_at(math.inf), math.inf, 1.0, self.seed, tokenizer=self.tokenizer)
        work = at_once(target.draw(self.dataset, wanted))
        with progress_bar(len(work), "all at once", is_shown=self.is_shown) as progress:
            rate = target.run(work, progress).metrics.requests_s
        if not rate:
            raise ConfigError("No request was answered, so there is no rate to start from; give one.")
        return rate


def add_judging_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the targets that decide the goodput."""
    parser.add_argument(
        "--goodput",
        nargs="+",
        default=(),
        metavar="NAME:MS",
        help="What a request is promised: ttft:500 tpot:50 e2el:10000. The goodput is the rate of requests that got "
        "all of it. (default: what the workload's classes promise)",
    )


def judging_of(arguments: argparse.Namespace, percents: Sequence[float] = SHOWN_PERCENTILES) -> Judging:
    return Judging(parse_goodput(arguments.goodput), percents, arguments.price_per_hour)


def parse_goodput(texts: Sequence[str]) -> Targets | None:
    """Read the targets; `None` if there are none."""
    if not texts:
        return None
    found: dict[str, float] = {}
    for text in texts:
        name, _, number = text.partition(":")
        try:
            value = parse_number(number)
        except ValueError:
            value = 0.0
        if name not in _TARGETS or not value > 0:
            names = ", ".join(_TARGETS)
            raise ConfigError(f"--goodput takes NAME:MILLISECONDS with one of {names}, not '{text}'.")
        found[name] = value / 1000
    return Targets(found.get("ttft"), found.get("tpot"), found.get("e2el"))
