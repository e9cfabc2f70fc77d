"""`headway generate`: answers on stdout in the order of the prompts, everything else on stderr."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.cli.main import main
from tests.unit.cli.fake_engine import FakeEngine

Install = Callable[..., list[FakeEngine]]


def test_one_prompt_prints_just_the_answer(fake_engine: Install, capsys: pytest.CaptureFixture[str]) -> None:
    engines = fake_engine(lambda prompt: prompt.upper())
    assert main(["generate", "hello"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "HELLO\n"
    assert "1 prompt: 5 tokens in, 5 out" in captured.err
    assert engines[0].prompts == ["hello"]


def test_many_prompts_keep_their_order_whoever_finishes_first(
    fake_engine: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_engine(lambda prompt: prompt * 9 if prompt == "slow" else prompt)
    assert main(["generate", "slow", "--temperature", "0", "a", "b", "--quiet"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "=== prompt-0\n" + "slow" * 9 + "\n=== prompt-1\na\n=== prompt-2\nb\n"
    assert captured.err == ""


def test_json_has_one_object_per_prompt(fake_engine: Install, capsys: pytest.CaptureFixture[str]) -> None:
    fake_engine(lambda prompt: "ok")
    assert main(["generate", "a", "b", "--json", "--max-tokens", "1"]) == 0
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [result["prompt_token_ids"] for result in results] == [[97], [98]]
    assert [result["outputs"][0]["text"] for result in results] == ["o", "o"]
    assert results[0]["outputs"][0]["finish_reason"] == "length"


def test_stdin_is_one_prompt(
    fake_engine: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = fake_engine(lambda prompt: "ok")
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines"))
    assert main(["generate"]) == 0
    assert engines[0].prompts == ["two\nlines"]


def test_prompt_file_has_one_prompt_per_line(
    fake_engine: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = fake_engine(lambda prompt: "ok")
    (tmp_path / "prompts.txt").write_text("first\n\nsecond\n")
    assert main(["generate", "zeroth", "--prompt-file", str(tmp_path / "prompts.txt")]) == 0
    assert engines[0].prompts == ["zeroth", "first", "second"]


def test_file_that_is_not_text_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts.bin").write_bytes(b"\xff\xfe\x00")
    assert main(["generate", "--prompt-file", str(tmp_path / "prompts.bin")]) == 2
    assert "it is not UTF-8 text" in capsys.readouterr().err


def test_chat_flag_applies_the_template(fake_engine: Install, capsys: pytest.CaptureFixture[str]) -> None:
    engines = fake_engine(lambda prompt: "ok")
    assert main(["generate", "--chat", "hi"]) == 0
    assert engines[0].prompts == ["<user>hi<assistant>"]


def test_token_ids_instead_of_text(fake_engine: Install, capsys: pytest.CaptureFixture[str]) -> None:
    fake_engine(lambda prompt: "AB")
    assert main(["generate", "hi", "--no-detokenize"]) == 0
    assert capsys.readouterr().out == "65 66\n"


def test_options_reach_the_engine(fake_engine: Install) -> None:
    engines = fake_engine(lambda prompt: "ok")
    assert main(["generate", "hi", "--block-size", "4", "--max-num-seqs", "2"]) == 0
    assert engines[0].config.cache.block_size == 4
    assert engines[0].config.scheduler.max_num_seqs == 2
