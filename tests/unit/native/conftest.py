"""The libraries under test: the machine's own instruction set and the portable build."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from headway import native
from headway.errors import NativeBuildError
from headway.native.build import build
from headway.native.lib import NativeLibrary


@pytest.fixture(scope="session")
def fast() -> NativeLibrary:
    """The library that users get on this machine."""
    try:
        return native.load()
    except NativeBuildError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def generic(fast: NativeLibrary) -> NativeLibrary:
    """The same sources without any instruction set extension."""
    return NativeLibrary(build("generic").path)


@pytest.fixture(params=["fast", "generic"])
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    """Each build in turn."""
    return request.getfixturevalue(request.param)


@pytest.fixture(autouse=True)
def seeded_and_two_threads(fast: NativeLibrary, generic: NativeLibrary) -> Iterator[None]:
    """Random inputs repeat; every test starts with two threads, whatever the machine has."""
    torch.manual_seed(0)
    before = [(library, library.get_num_threads()) for library in (fast, generic)]
    for library, _ in before:
        library.set_num_threads(2)
    yield
    for library, num_threads in before:
        library.set_num_threads(num_threads)
