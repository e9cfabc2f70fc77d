"""Files with service classes: what they say, what is wrong with them, and the example that help and docs show."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from headway.cli import serve
from headway.cli.main import main
from headway.console.flags import CommandParser
from headway.core.request_options import RequestOptions
from headway.errors import ConfigError
from headway.server.admission.service_classes import EXAMPLE, ServiceClass, parse_service_classes, read_service_classes

ROOT = Path(__file__).parents[3]


def write(folder: Path, text: str, name: str = "classes.toml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_a_single_class_is_the_default_and_without_a_file_it_says_nothing() -> None:
    assert parse_service_classes({"classes": {"all": {"max_waiting": 3}}}).default == ServiceClass("all", max_waiting=3)
    classes = read_service_classes(None)
    assert list(classes) == [classes.default] == [ServiceClass("default")]


def test_the_example_in_both_formats(tmp_path: Path) -> None:
    from_toml = read_service_classes(write(tmp_path, EXAMPLE))
    from_json = read_service_classes(write(tmp_path, json.dumps(tomllib.loads(EXAMPLE)), "classes.json"))
    assert (
        list(from_toml)
        == list(from_json)
        == [
            ServiceClass("interactive", RequestOptions(ttft_target_s=0.5, tpot_target_s=0.05, priority=-10)),
            ServiceClass("standard", max_waiting=200, shed=1),
            ServiceClass("batch", RequestOptions(priority=10), max_waiting=1000, shed=2),
        ]
    )
    assert from_toml.default.name == "standard"
    by_shed = sorted(from_toml, key=lambda each: each.shed)
    assert [each.name for each in by_shed] == ["interactive", "standard", "batch"], "docs/server.md says so"


def test_help_and_docs_show_the_example() -> None:
    parser = CommandParser(prog="test")
    serve.add_arguments(parser)
    shown = [line.strip() for line in parser.format_help().splitlines()]
    assert "\n".join(shown).endswith("\n".join(line.strip() for line in EXAMPLE.splitlines()))
    assert f"```toml\n{EXAMPLE}```" in (ROOT / "docs" / "server.md").read_text()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "an object with 'classes'"),
        ({}, "table 'classes'"),
        ({"classes": {}}, "at least one class"),
        ({"classes": {"a": {}, "b": {}}}, "'default' must name the class of requests that name none: a, b"),
        ({"classes": {"batch": {}}, "default": "bach"}, "no such class. Did you mean 'batch'?"),
        ({"classes": {"a": {}}, "default": 5}, "'default' is 5"),
        ({"classes": {"a": {}}, "defualt": "a"}, "no setting 'defualt'. Did you mean 'default'?"),
        ({"classes": {"a": 5}}, "class 'a': a table is expected, not 5"),
        ({"classes": {"a b": {}}}, "'a b' is none"),
        ({"classes": {"": {}}}, "1 to 64 letters"),
        ({"classes": {"a": {"ttft_ms": 5}}}, "class 'a': there is no setting 'ttft_ms'."),
        ({"classes": {"a": {"name": "b"}}}, "there is no setting 'name'"),
        ({"classes": {"a": {"ttft_target_ms": 0}}}, "class 'a': ttft_target_ms must be a number of milliseconds"),
        ({"classes": {"a": {"ttft_target_ms": float("inf")}}}, "ttft_target_ms"),
        ({"classes": {"a": {"tpot_target_ms": "5"}}}, "a number of milliseconds above 0, not '5'"),
        ({"classes": {"a": {"tpot_target_ms": True}}}, "tpot_target_ms"),
        ({"classes": {"a": {"priority": 1.5}}}, "priority must be a whole number"),
        ({"classes": {"a": {"priority": 2**31}}}, "priority must be a whole number"),
        ({"classes": {"a": {"max_waiting": 0}}}, "max_waiting must be a whole number from 1"),
        ({"classes": {"a": {"max_waiting": True}}}, "max_waiting must be a whole number from 1"),
        ({"classes": {"a": {"shed": -1}}}, "shed must be a whole number from 0"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(data: Any, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_service_classes(data)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("classes.yaml", b"", "must end in .toml or .json"),
        ("classes.toml", b"default = ", "is not valid TOML"),
        ("classes.toml", b"\xff", "is not UTF-8 text"),
        ("classes.json", b"{", "is not valid JSON"),
        ("classes.json", b"[" * 100_000, "nested too deeply"),
        ("classes.toml", b"[classes.a]\nshed = 'x'", "class 'a': shed must be"),
        ("none.toml", None, "No such file"),
    ],
)
def test_files_that_are_none(tmp_path: Path, name: str, text: bytes | None, words: str) -> None:
    if text is not None:
        (tmp_path / name).write_bytes(text)
    with pytest.raises(ConfigError, match=words) as raised:
        read_service_classes(str(tmp_path / name))
    assert name in str(raised.value)


def test_a_server_does_not_start_with_a_wrong_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--service-classes", write(tmp_path, "default = 1")]) == 2
    assert "must have a table 'classes'" in capsys.readouterr().err
