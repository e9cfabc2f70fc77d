"""What holds for every test: how kernels run, how many threads a worker takes, and which files start first.

Without a GPU, Triton kernels are tested through Triton's interpreter, which must be chosen before Triton loads.
"""

from __future__ import annotations

import gc
import os

import pytest

if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
    # Workers share the cores: threads of several of them would spin while they wait for each other.
    for library in ("OMP", "OPENBLAS", "MKL"):
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

LONGEST = (
    "test_same_tokens_as_transformers.py",
    "test_engine_client.py",
    "native/test_attention.py",
    "test_triton_paged.py",
    "test_prefix_cache_property.py",
    "test_scheduler_property.py",
    "test_server_lifecycle.py",
    "test_engine_attacks.py",
    "test_llm.py",
    "test_quantised_kv.py",
    "test_gpu_prefix.py",
    "test_server_prefix_cache.py",
    "test_beam_search.py",
    "test_cli.py",
    "test_server_attacks.py",
    "test_page.py",
    "tune/test_tune_search.py",
    "test_sim_accuracy.py",
)
"""Files that take the most time start first, so that no worker is left alone with one of them at the end."""


def _place(file: str) -> int:
    return next((place for place, name in enumerate(LONGEST) if file.endswith(f"/{name}")), len(LONGEST))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _place(item.nodeid.split("::")[0]))


def pytest_collection_finish() -> None:
    """What is loaded now stays: the garbage collector need not look at it in every test again."""
    gc.collect()
    gc.freeze()
