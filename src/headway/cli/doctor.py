"""`headway doctor`: what this machine has, which kernels run, what will be slow, what is wrong, and how to mend it."""

from __future__ import annotations

import argparse
import dataclasses
import os
from typing import Any

from headway.cli.every_option import every_option, server_flags
from headway.config import EngineConfig
from headway.console.flags import FlagSpec, chosen, engine_flags, with_shape_defaults
from headway.console.option_variables import unknown_variables
from headway.console.settled_options import add_settled_flags, settle
from headway.doctor.facts import Facts
from headway.doctor.findings import Finding, error, warning
from headway.errors import ConfigError, HeadwayError, ModelNotFoundError
from headway.worker.memory_needs import MODEL_OPTIONS

_SERVER_OPTIONS = ("host", "port")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="Print one JSON object: findings and facts.")
    add_settled_flags(parser, _flags())
    parser.epilog = (
        "With --model, it is also checked whether that model fits; it has to be on this machine ('headway pull'). "
        "The exit status is 1 if something is broken, else 0."
    )


def _flags() -> list[FlagSpec]:
    specs = [spec for spec in engine_flags() if spec.name in MODEL_OPTIONS and spec.name != "offline"]
    specs += [spec for spec in server_flags() if spec.name in _SERVER_OPTIONS]
    return [dataclasses.replace(spec, is_engines=False) for spec in specs]


def run(arguments: argparse.Namespace) -> int:
    from headway.doctor.checks import find
    from headway.doctor.read import read_facts
    from headway.doctor.report import as_json, as_text, is_broken
    from headway.server.server_config import ServerConfig

    if arguments.print_config:
        print(settle(arguments, _flags(), every_option()).toml(), end="")
        return 0
    options, problem = _options(arguments)
    server = ServerConfig(**{name: options.pop(name) for name in _SERVER_OPTIONS if name in options})
    facts = read_facts(os.environ, every_option(), host=server.host, port=server.port)
    if problem is not None and not facts.settings.problem:
        raise problem
    findings = find(facts)
    if options:
        findings += _of_model(facts, options)
    print(as_json(facts, findings) if arguments.json else as_text(findings))
    return 1 if is_broken(findings) else 0


def _options(arguments: argparse.Namespace) -> tuple[dict[str, Any], ConfigError | None]:
    """The options that were given. If some cannot be used, those of the command line, and the error: if it is one of
    environment variables, it is a finding."""
    meaningless = unknown_variables(every_option(), os.environ)
    environment = {name: value for name, value in os.environ.items() if name not in meaningless}
    try:
        return settle(arguments, _flags(), every_option(), environment=environment).given(), None
    except ConfigError as problem:
        return chosen(arguments, _flags()), problem


def _of_model(facts: Facts, options: dict[str, Any]) -> list[Finding]:
    """Whether the model fits. Nothing is fetched for that."""
    from headway.doctor.checks.model import check_model
    from headway.worker.memory_needs import planned_model

    config = EngineConfig.from_options(**with_shape_defaults(options), offline=True)
    try:
        planned = planned_model(config)
    except ModelNotFoundError as absent:
        return [
            warning(
                "model", f"{absent}.", "Whether it fits is not known.", "Fetch it with 'headway pull', or correct it."
            )
        ]
    except HeadwayError as wrong:
        return [error("model", f"{wrong}.", "The engine does not start with it.", "Choose what the message says.")]
    return list(check_model(facts, config, planned.title, planned.needs))
