"""Processes that do without torch: a server's front end, a program with an `AsyncLLM`, an engine without a model."""

from __future__ import annotations

import subprocess
import sys

import pytest

FRONT_END = """
import headway.cli.serve
from headway import AsyncLLM
from headway.config import ModelConfig
from headway.server.serving import model_name
from headway.loader.chosen_model import load_model_tokenizer

assert model_name(None) and AsyncLLM()
assert load_model_tokenizer(ModelConfig()) is not None
"""
ENGINE_WITHOUT_MODEL = """
import headway.engine_process.main
from headway.engine_process.engine_without_model import create_engine

assert create_engine({}).core is not None
"""
SHOW = """
import sys

print(*sorted({"torch", "triton", "transformers"} & set(sys.modules)))
"""


@pytest.mark.parametrize("program", [FRONT_END, ENGINE_WITHOUT_MODEL], ids=["front end", "engine without a model"])
def test_no_tensors(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program + SHOW], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
