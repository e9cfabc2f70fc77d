"""`headway sim-check` on engines without a model: several variants in one command, their table and their files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.cli.main import main
from headway.config import EngineConfig
from headway.console import loading
from headway.engine.llm_engine import LLMEngine
from headway.executor.fake import FakeExecutor
from headway_lab.sim import Calibration
from tests.unit.no_model import nominal_config, nominal_plan

WORK = """
requests = 6
arrivals = { kind = "poisson", rate = 50.0 }
input = 8
output = 4
"""
LOADED = list[EngineConfig]


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> LOADED:
    """The configurations of the engines that the command loads."""
    found: LOADED = []

    def load(config: EngineConfig, *_: object, **__: object) -> LLMEngine:
        found.append(config)
        return LLMEngine(
            config.resolve("cpu"),
            executor=FakeExecutor(),
            tokenizer=None,
            model_config=nominal_config(vocab_size=100, max_model_len=256),
            plan=nominal_plan(num_blocks=64, block_size=8, max_model_len=256),
        )

    monkeypatch.setattr(loading, "load_engine", load)
    return found


@pytest.fixture
def run(tmp_path: Path, loaded: LOADED) -> Callable[..., int]:
    (tmp_path / "work.toml").write_text(WORK)
    flags = ["--workload", str(tmp_path / "work.toml"), "--seconds", "0.3", "--rate", "50", "--max-num-seqs", "8"]
    return lambda *more: main(["sim-check", *flags, *more])


def test_variants_are_loaded_calibrated_and_checked_one_after_the_other(
    run: Callable[..., int], loaded: LOADED, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, found = tmp_path / "page.md", tmp_path / "found.json"
    saved = str(tmp_path / "machine-{variant}.json")
    variants = ("--variant", "plain", "--variant", "small max_num_seqs=4")
    assert run(*variants, "--markdown", str(page), "--output-json", str(found), "--save-calibration", saved) == 0
    assert [config.scheduler.max_num_seqs for config in loaded] == [8, 4]
    printed = capsys.readouterr().out
    assert "variant, requests, load" in printed and "plain, work, 6, 50/s" in printed and "small, work, 6" in printed
    assert page.read_text().count("# Simulated against measured") == 3, "the table of all, and a part of each"
    document = json.loads(found.read_text())
    assert [one["variant"] for one in document["variants"]] == ["plain", "small"]
    machine = Calibration.load(tmp_path / "machine-small.json")
    assert machine.scheduler["max_num_seqs"] == 4 and machine.verified is not None


def test_without_variants_files_are_as_they_were(run: Callable[..., int], tmp_path: Path) -> None:
    page, found = tmp_path / "page.md", tmp_path / "found.json"
    assert run("--markdown", str(page), "--output-json", str(found), "--temperature", "0") == 0
    assert page.read_text().startswith("# Simulated against measured\n")
    assert set(json.loads(found.read_text())) == {"calibration", "checks"}


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--variant", "a", "--variant", "b", "--save-calibration", "one.json"), "{variant}"),
        (("--variant", "a", "--variant", "b", "--calibration", "h200-llama31-8b"), "that of one engine"),
        (("--variant", "a nothing=1"), "nothing"),
    ],
)
def test_what_does_not_go_together_is_refused_before_an_engine_is_loaded(
    flags: tuple[str, ...], told: str, run: Callable[..., int], loaded: LOADED, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*flags) == 2
    assert told in capsys.readouterr().err
    assert not loaded
