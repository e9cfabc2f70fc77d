"""The `headway` command as a person runs it: a process of its own, the embedded model, real text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headway.cli.main import main


def headway(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "HEADWAY_DEBUG"}
    command = [sys.executable, "-m", "headway", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, env=environment, timeout=240)


def test_generate_knows_the_capital_of_france() -> None:
    done = headway("generate", "The capital of France is", "--max-tokens", "8", "--dtype", "float32", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert "Paris" in result["outputs"][0]["text"]
    assert len(result["outputs"][0]["token_ids"]) == 8
    assert result["outputs"][0]["finish_reason"] == "length"
    assert "weights" in done.stderr
    assert "KV cache" in done.stderr
    assert "5 tokens in, 8 out" in done.stderr


def test_chat_remembers_what_was_said() -> None:
    done = headway("chat", "--temperature", "0", "-q", stdin="My name is Anna.\nWhat is my name?\n")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "Anna" in done.stdout.splitlines()[-1]


def assert_is_one_clean_line(text: str) -> None:
    assert text.startswith("headway: error: ")
    assert text.count("\n") == 1
    assert "model.gguf" in text


@pytest.mark.parametrize(
    "content",
    [None, b"", b"GGUF" + bytes(64), b"no model at all"],
    ids=["missing", "empty", "damaged", "something else"],
)
def test_bad_model_file_is_one_clean_line(
    tmp_path: Path, content: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model.gguf"
    if content is not None:
        model.write_bytes(content)
    assert main(["generate", "hi", "--model", str(model)]) == 1
    assert_is_one_clean_line(capsys.readouterr().err)


def test_an_error_is_one_clean_line_of_the_process_too(tmp_path: Path) -> None:
    done = headway("generate", "hi", "--model", str(tmp_path / "model.gguf"))
    assert done.returncode == 1
    lines = done.stderr.splitlines(keepends=True)
    # A machine that takes seconds for anything is told how far it is.
    assert_is_one_clean_line("".join(line for line in lines if not line.startswith("Loading weights: ")))
