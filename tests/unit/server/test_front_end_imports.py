"""The front end is a small process: a server, or a program with an `AsyncLLM`, does without torch."""

from __future__ import annotations

import subprocess
import sys

FRONT_END = """
import sys
import headway.cli.serve
from headway import AsyncLLM
from headway.config import ModelConfig
from headway.server.serving import model_name
from headway.loader.model_tokenizer import load_model_tokenizer

assert model_name(None) and AsyncLLM()
assert load_model_tokenizer(ModelConfig()) is not None
print(*sorted({"torch", "triton", "transformers"} & set(sys.modules)))
"""


def test_no_tensors_in_the_front_end() -> None:
    done = subprocess.run([sys.executable, "-c", FRONT_END], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
