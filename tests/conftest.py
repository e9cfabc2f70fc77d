"""What holds for every test: how kernels run, what a worker takes of the machine, and which files start first.

Without a GPU, Triton kernels are tested through Triton's interpreter, which must be chosen before Triton loads.
"""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("headway", deadline=None)  # how long an example takes says more about the machine
settings.load_profile("headway")

SHARES_THE_CORES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1
if SHARES_THE_CORES:  # threads of several workers would spin while they wait for each other
    for library in ("OMP", "OPENBLAS", "MKL"):
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")

LONGEST = (
    "integration/test_tensor_parallel.py",
    "test_gpu_drafts.py",
    "integration/test_roles.py",
    "test_kernels_compile.py",
    "test_same_tokens_as_transformers.py",
    "integration/test_resumption.py",
    "integration/test_speculation.py",
    "rpc/test_resumption.py",
    "test_shared_channel.py",
    "integration/test_disk_cache.py",
    "integration/test_structured_output.py",
    "test_batching_property.py",
    "test_scaling.py",
    "test_quantized_weights.py",
    "test_scheduler_property.py",
    "test_engine_client.py",
    "test_server_attacks.py",
    "test_engine_attacks.py",
    "test_server_lifecycle.py",
    "test_llm.py",
    "test_cli.py",
    "test_triton_paged.py",
    "test_policies.py",
    "integration/test_prefix_cache.py",
    "test_prefix_cache_property.py",
    "test_quantised_kv.py",
    "integration/test_beam_search.py",
    "test_server_prefix_cache.py",
    "test_page.py",
    "test_page_with_model.py",
    "test_gpu_prefix.py",
    "test_engine_process.py",
    "tune/test_tune_search.py",
    "test_sim_accuracy.py",
    "native/test_attention.py",
)
"""Files that take the most time start first, so that no worker is left alone with one of them at the end."""


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        return  # this process hands tests out and runs none: its workers need not wait until it has imported torch
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session", autouse=True)
def _one_thread_for_the_kernels() -> None:
    from headway import native

    if SHARES_THE_CORES and native.is_available():
        native.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _certificates_are_read_once() -> Iterator[None]:
    """A client of httpx reads all of them when it is made, 30 ms each time, also for servers that need none."""
    from httpx._transports import default

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(default, "create_ssl_context", functools.cache(default.create_ssl_context))
        yield


def _place(file: str) -> int:
    return next((place for place, name in enumerate(LONGEST) if file.endswith(f"/{name}")), len(LONGEST))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _place(item.nodeid.split("::")[0]))


def pytest_collection_finish() -> None:
    """What is loaded now stays: the garbage collector need not look at it in every test again."""
    gc.collect()
    gc.freeze()
