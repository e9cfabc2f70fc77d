"""What holds for every test: how kernels run, what a worker takes of the machine, which cases run, and in which order.

Without a GPU, Triton kernels are tested through Triton's interpreter, which must be chosen before Triton loads.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import warm_start
from tests.recorded_durations import RecordedDurations
from tests.run_report import RunReport

settings.register_profile("headway", deadline=None)  # how long an example takes says more about the machine
settings.load_profile("headway")

SHARES_THE_CORES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1
if SHARES_THE_CORES:  # threads of several workers would spin while they wait for each other
    for library in ("OMP", "OPENBLAS", "MKL"):
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")

DURATIONS = RecordedDurations.load()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("headway", "Headway's tests")
    group.addoption("--quick", action="store_true", help="only cases recorded as quick that start no process")
    group.addoption(
        "--record-durations",
        action="store_true",
        help="write tests/durations.json anew; for a run of all tests on a quiet machine",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        # This process hands tests out and runs none: its workers need not wait until it has imported torch.
        if config.get_verbosity() <= 0:
            config.pluginmanager.register(RunReport(config, DURATIONS), RunReport.__name__)
        return
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    warm_start.install()
    sys.addaudithook(_count_processes)


def pytest_sessionfinish(session: pytest.Session) -> None:
    report = session.config.pluginmanager.get_plugin(RunReport.__name__)
    if session.config.getoption("record_durations") and isinstance(report, RunReport):
        report.save()


num_processes = 0


def _count_processes(event: str, arguments: tuple[object, ...]) -> None:
    global num_processes
    if event == "subprocess.Popen":
        num_processes += 1


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Each report says how many processes were started since the one before."""
    global num_processes
    report = yield
    report.user_properties = [*report.user_properties, ("processes", num_processes)]
    num_processes = 0
    return report


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


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file without quick cases is not even imported by a quick run."""
    if not config.getoption("quick") or collection_path.suffix != ".py":
        return None
    return None if DURATIONS.may_be_quick(_name(collection_path)) else True


def _name(path: Path) -> str:
    return path.relative_to(Path(__file__).parent.parent).as_posix()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("quick"):
        slow = [item for item in items if not DURATIONS.is_quick(item.nodeid)]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if DURATIONS.is_quick(item.nodeid)]
    items.sort(key=lambda item: -DURATIONS.file_s(item.nodeid.partition("::")[0]))


def pytest_collection_finish() -> None:
    """What is loaded now stays: the garbage collector need not look at it in every test again."""
    gc.collect()
    gc.freeze()
