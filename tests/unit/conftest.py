"""Tests that are coroutines: they and the clients that they share belong to one event loop, which stands still between
them."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator

import pytest

LIMIT_S = 200


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


def pytest_itemcollected(item: pytest.Item) -> None:
    if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.function):
        item.fixturenames.append("runner")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.function):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    pyfuncitem.funcargs["runner"].run(asyncio.wait_for(pyfuncitem.obj(**arguments), LIMIT_S))
    return True
