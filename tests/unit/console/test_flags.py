"""Flags come from the dataclasses, one for each field, and give back exactly what was asked."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headway.cli import main, reference
from headway.cli.every_option import server_flags
from headway.config import EngineConfig, iter_options
from headway.console.commands import Command, CommandGroup
from headway.console.flags import CommandParser, add_flags, chosen, engine_flags, sampling_flags
from headway.sampling_params import SamplingParams

ROOT = Path(__file__).parents[3]


def parse_engine(*arguments: str) -> dict[str, object]:
    parser = CommandParser(prog="test")
    add_flags(parser, engine_flags())
    return chosen(parser.parse(list(arguments)), engine_flags())


def parse_sampling(*arguments: str) -> dict[str, object]:
    parser = CommandParser(prog="test")
    add_flags(parser, sampling_flags())
    return chosen(parser.parse(list(arguments)), sampling_flags())


def commands() -> Iterator[tuple[str, Command]]:
    for name, command in main.commands().items():
        if isinstance(command, CommandGroup):
            yield from ((f"{name} {part}", each) for part, each in command.commands.items())
        else:
            yield name, command


@pytest.mark.parametrize(("name", "command"), list(commands()), ids=lambda one: one if isinstance(one, str) else "")
def test_no_flag_of_a_number_takes_what_is_none(name: str, command: Command) -> None:
    """NaN never; infinity only where the help says what it means."""
    parser = CommandParser(prog=f"headway {name}")
    importlib.import_module(command.module).add_arguments(parser)
    for action in parser._actions:
        convert = action.type
        if not callable(convert) or not isinstance(_converted(convert, "0.5"), float | list):
            continue
        for text in ("nan", "-nan", "NaN", "-inf"):
            assert _converted(convert, text) is None, (action.option_strings, text)
        is_allowed = "inf:" in (action.help or "") or "inf: " in dict(parser._only_in_help_all).get(action, "")
        assert (_converted(convert, "inf") is not None) == is_allowed, action.option_strings


def _converted(convert: Callable[[str], object], text: str) -> object:
    try:
        return convert(text)
    except (argparse.ArgumentTypeError, ValueError):
        return None


def test_there_is_a_flag_for_every_option() -> None:
    assert [spec.name for spec in engine_flags()] == [field.name for _, field in iter_options()]
    fields = [field.name for field in dataclasses.fields(SamplingParams) if field.init]
    assert [spec.name for spec in sampling_flags()] == fields


def test_every_flag_explains_itself() -> None:
    for spec in (*engine_flags(), *sampling_flags()):
        assert len(spec.help) > 10, spec.name


def test_flags_not_given_are_left_to_the_dataclasses() -> None:
    assert parse_engine() == {}
    assert parse_sampling() == {}


def test_engine_values_arrive_with_their_types() -> None:
    options = parse_engine(
        "--model", "m.gguf", "--block-size", "32", "--gpu-memory-utilization", "0.5", "--kv-cache-memory", "2GiB",
        "--max-model-len", "none", "--device", "cpu",
    )  # fmt: skip
    assert options == {
        "model": "m.gguf",
        "block_size": 32,
        "gpu_memory_utilization": 0.5,
        "kv_cache_memory": 2**31,
        "max_model_len": None,
        "device": "cpu",
    }
    assert EngineConfig.from_options(**options).cache.kv_cache_memory == 2**31


def test_switches_are_given_or_negated(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_engine("--enforce-eager", "--no-enable-prefix-caching", "--no-async-scheduling") == {
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "async_scheduling": False,
    }
    text = " ".join(reference.plain_text().split())
    assert all(spec.flag in text for spec in engine_flags())
    assert "--enable-prefix-caching [True]" in text and "--enforce-eager [False]" in text
    parser = CommandParser(prog="test")
    add_flags(parser, engine_flags())
    parser.show_all()
    parser.print_help()
    assert "--async-scheduling, --no-async-scheduling" in capsys.readouterr().out


def test_what_is_no_option_may_be_called_like_a_former_one() -> None:
    parser = CommandParser(prog="test")
    parser.add_argument("prompts", nargs="*")
    add_flags(parser, engine_flags())
    assert parser.parse(["overlap", "--enforce-eager", "prefix_caching"]).prompts == ["overlap", "prefix_caching"]


def test_no_option_is_on_or_off_by_a_word() -> None:
    for spec in (*engine_flags(), *sampling_flags(), *server_flags()):
        words = {"on", "off", "true", "false"} - ({"off"} if spec.name == "speculation" else set())  # one of its modes
        assert not words & set(spec.choices or ()), spec.name


def test_sampling_values_arrive_with_their_types() -> None:
    options = parse_sampling(
        "--temperature", "0.5", "--top-k", "-1", "--presence-penalty", "-0.5", "--stop", "a", "--stop", "b",
        "--stop-token-ids", "1", "--stop-token-ids", "2", "--bad-words", "x", "--logit-bias", "7=-100",
        "--logit-bias", "8=1.5", "--ignore-eos", "--no-skip-special-tokens", "--max-tokens", "none",
    )  # fmt: skip
    assert options == {
        "temperature": 0.5,
        "top_k": -1,
        "presence_penalty": -0.5,
        "stop": ["a", "b"],
        "stop_token_ids": [1, 2],
        "bad_words": ["x"],
        "logit_bias": {7: -100.0, 8: 1.5},
        "ignore_eos": True,
        "skip_special_tokens": False,
        "max_tokens": None,
    }
    assert SamplingParams(**options).logit_bias == {7: -100.0, 8: 1.5}


def test_command_defaults_yield_to_what_is_given_and_are_shown() -> None:
    parser = CommandParser(prog="test")
    add_flags(parser, sampling_flags({"max_tokens": 99}))
    assert chosen(parser.parse([]), sampling_flags(), {"max_tokens": 99}) == {"max_tokens": 99}
    assert chosen(parser.parse(["--max-tokens", "5"]), sampling_flags(), {"max_tokens": 99}) == {"max_tokens": 5}
    assert "(default: 99)" in " ".join(parser.format_help().split())


def test_options_page_is_current() -> None:
    page = (ROOT / "docs" / "options.md").read_text()
    assert page == reference.markdown(), "run 'make docs'"
