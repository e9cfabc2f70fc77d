"""A tiny model for the engines of each file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.unit.runner.tiny_llm import TinyLLM


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyLLM:
    from tests.unit.runner.tiny_llm import TinyLLM

    return TinyLLM(tmp_path_factory.mktemp("tiny"))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Lines of padding may hold anything."""
    if "tiny" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"))
