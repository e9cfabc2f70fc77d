"""Workloads are found by path or by the name of one that is shipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.errors import ConfigError
from headway_lab.workload import load_workload, shipped_workloads
from headway_lab.workload.catalogue import find_workload


def test_every_shipped_workload_has_a_name() -> None:
    for name, file in shipped_workloads().items():
        assert find_workload(name).file == file
        assert load_workload(name).name == name


def test_a_file_comes_before_a_shipped_workload_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "orca").write_text("input = 3\noutput = 1\nrequests = 1\n")
    assert load_workload("orca").draw(vocab_size=9)[0].num_prompt_tokens == 3


@pytest.mark.parametrize(
    ("name", "hint"),
    [("chat_lognorma", "Did you mean 'chat_lognormal'?"), ("nothing_like_it", "They are: anyscale, azure, ")],
)
def test_a_name_that_is_not_shipped(name: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_workload(name)
    assert f"neither a file '{name}' nor a workload" in str(caught.value) and hint in str(caught.value)


def test_data_of_a_shipped_workload_is_searched_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody puts data into the folder where packages are installed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_text("input_tokens,output_tokens,arrival_s\n7,2,0\n")
    work = load_workload("azure", trace={"file": "rows.csv"}).draw(vocab_size=9, num_requests=1)
    assert work[0].num_prompt_tokens == 7
    with pytest.raises(ConfigError, match=r"is needed and is not in '\.'"):
        load_workload("sarathi").draw(vocab_size=9)
