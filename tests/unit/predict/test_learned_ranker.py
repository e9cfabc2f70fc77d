"""The learned ranker: it learns what there is to learn, keeps it in its file, and reads no other files."""

from __future__ import annotations

import builtins
import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.predict import (
    LearnedRanker,
    MissingLightGBMError,
    PredictorFileError,
    PromptView,
    RunningStatistics,
    TrafficLogError,
    create_predictor,
)
from headway.predict.ranker_file import RankerModel, load_ranker, save_ranker
from headway_lab.predictor.training import quality, split_records, train_ranker
from tests.unit.predict.traffic import make_traffic

pytest.importorskip("lightgbm")

TEST_PROMPTS = [sample.prompt for sample in make_traffic(50, seed=9)]


@pytest.fixture(scope="module")
def model() -> RankerModel:
    records = [sample.record for sample in make_traffic(600)]
    return train_ranker(records, seed=1, objectives=["regression"]).model


@pytest.fixture
def file(model: RankerModel, tmp_path: Path) -> Path:
    save_ranker(model, tmp_path / "model")
    return tmp_path / "model"


def test_orders_unseen_prompts_better_than_what_is_simpler(model: RankerModel) -> None:
    train, test = make_traffic(600), make_traffic(200, seed=5)
    actual = [sample.num_output_tokens for sample in test]
    prompts = [sample.prompt for sample in test]
    statistics = RunningStatistics()
    for sample in train:
        statistics.observe(sample.prompt, sample.num_output_tokens)
    learned = quality(LearnedRanker(model).predict(prompts), actual)
    simple = quality(statistics.predict(prompts), actual)
    assert learned.kendall_tau > 0.6 > 0.3 > simple.kendall_tau
    assert learned.accuracy > 0.8
    assert learned.bias == pytest.approx(1, abs=0.25)


def test_both_objectives_are_compared_and_learn() -> None:
    records = [sample.record for sample in make_traffic(200)]
    trained = train_ranker(records, seed=0)
    assert trained.tau_by_objective.keys() == {"regression", "lambdarank"}
    assert min(trained.tau_by_objective.values()) > 0.5
    assert trained.model.objective == max(trained.tau_by_objective, key=trained.tau_by_objective.__getitem__)


def test_the_seed_decides_everything_and_either_objective_can_be_saved(tmp_path: Path) -> None:
    records = [sample.record for sample in make_traffic(100)]
    first, again, other = (train_ranker(records, seed=seed, objectives=["lambdarank"]).model for seed in (3, 3, 4))
    assert first == again != other
    save_ranker(first, tmp_path / "model")
    assert load_ranker(tmp_path / "model") == first


def test_small_limits_do_not_make_a_prompt_short() -> None:
    """Half of the log was cut at 10 tokens; lengths without a limit are still foreseen."""
    samples = make_traffic(200) + make_traffic(200, seed=2, max_tokens=10)
    trained = train_ranker([sample.record for sample in samples], objectives=["regression"])
    free = make_traffic(100, seed=8)
    guesses = LearnedRanker(trained.model).predict([sample.prompt for sample in free])
    assert quality(guesses, [sample.num_output_tokens for sample in free]).bias > 0.6
    capped = [PromptView(prompt.prompt_token_ids, max_tokens=10) for prompt in TEST_PROMPTS]
    assert max(LearnedRanker(trained.model).predict(capped)) <= 10


def test_the_file_gives_the_same_predictions(model: RankerModel, file: Path) -> None:
    loaded = create_predictor(str(file))
    assert isinstance(loaded, LearnedRanker) and loaded.model == model
    assert loaded.predict(TEST_PROMPTS) == LearnedRanker(model).predict(TEST_PROMPTS)
    assert [path.name for path in file.parent.iterdir()] == ["model"]
    assert [loaded.predict([prompt])[0] for prompt in TEST_PROMPTS] == loaded.predict(TEST_PROMPTS)
    assert loaded.predict([]) == []
    loaded.observe(TEST_PROMPTS[0], 7)


def test_holds_out_about_the_share_and_keeps_equal_prompts_together() -> None:
    records = [sample.record for sample in make_traffic(300)] * 2
    train, held_out = split_records(records, 0.25, seed=0)
    assert 100 < len(held_out) < 200 and len(train) + len(held_out) == 600
    assert not {record.features.grams for record in train} & {record.features.grams for record in held_out}
    assert split_records(records, 0.25, seed=1) != (train, held_out)


def test_too_little_to_learn_from() -> None:
    records = [sample.record for sample in make_traffic(20)]
    with pytest.raises(TrafficLogError, match="20 usable requests are too few"):
        train_ranker(records)
    with pytest.raises(TrafficLogError, match="equally long"):
        train_ranker(records[:1] * 200)


def test_without_lightgbm_the_error_says_what_to_install(model: RankerModel, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name == "lightgbm":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(MissingLightGBMError, match="pip install 'lightgbm>="):
        LearnedRanker(model)


# ---- files that are not ours -----------------------------------------------------------------------------------------


def rewrite(file: Path, change: Callable[[dict[str, Any]], None] | None = None, body: bytes | None = None) -> None:
    """Change the header or the model, with a checksum that is right again."""
    head, _, old_body = file.read_bytes().partition(b"\n")
    header = json.loads(head)
    body = old_body if body is None else body
    header |= {"model_bytes": len(body), "model_sha256": hashlib.sha256(body).hexdigest()}
    if change is not None:
        change(header)
    file.write_bytes(json.dumps(header).encode() + b"\n" + body)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"{}\ntree\n",
        b"tree\nversion=v4\n",
        b"\x80\x04\x95pickle.\n",
        b'{"format": "else"}\n',
        b"\xff" * 999,
    ],
)
def test_foreign_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model").write_bytes(content)
    with pytest.raises(PredictorFileError, match="headway train-predictor"):
        load_ranker(tmp_path / "model")


def test_damaged_files_are_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut, changed, or too large."""
    content = file.read_bytes()
    changed = bytearray(content)
    changed[-300] ^= 1
    for bad in (*(content[: int(keep * len(content))] for keep in (0.2, 0.5, 0.999)), changed):
        file.write_bytes(bad)
        with pytest.raises(PredictorFileError, match="headway train-predictor|cut off or damaged"):
            load_ranker(file)
    monkeypatch.setattr("headway.predict.ranker_file.MOST_FILE_BYTES", 1000)
    with pytest.raises(PredictorFileError, match="larger than"):
        load_ranker(file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *((name, "") for name in ("version", "features", "objective", "calibration", "training", "model_bytes")),
        ({"version": 2}, "its version is 2, and this program reads version 1"),
        ({"features": 1}, "train it anew"),
        ({"num_features": 3}, "train it anew"),
        ({"objective": "os.system"}, "objective is not known"),
        ({"calibration": {"scores": [0, 1], "log_lengths": [2, 1], "sigma": 1}}, "must rise"),
        ({"calibration": {"scores": [0, math.nan], "log_lengths": [1, 2], "sigma": 1}}, "must rise"),
        ({"calibration": {"scores": [0, 1], "log_lengths": [1, 2], "sigma": -1}}, "at least 0"),
        ({"calibration": {"scores": ["0", 1], "log_lengths": [1, 2], "sigma": 1}}, "not a number"),
        ({"calibration": {"scores": [0], "log_lengths": [1], "sigma": 1}}, "at least two"),
        ({"calibration": {}}, "no 'scores'"),
        ({"calibration": None}, "not a length predictor"),
        ({"training": []}, "training numbers"),
    ],
)
def test_headers_are_checked(file: Path, change: dict[str, Any] | str, message: str) -> None:
    """A part that is left out, or one that says something else."""
    rewrite(file, lambda header: header.pop(change) if isinstance(change, str) else header.update(change))
    with pytest.raises(PredictorFileError, match=message):
        load_ranker(file)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("num_class=1", "num_class=2", "num_class"),
        ("max_feature_idx=", "max_feature_idx=9", "max_feature_idx"),
        ("objective=regression", "objective=custom", "objective"),
        ("num_cat=0", "num_cat=1", "num_cat"),
        ("is_linear=0", "is_linear=1", "is_linear"),
        ("split_feature=", "split_feature=99999 ", "split_feature"),
        ("left_child=", "left_child=0 ", "left_child"),
        ("leaf_value=", "leaf_value=nan ", "leaf_value"),
        ("threshold=", "threshold=x", "tree 0"),
        ("decision_type=2", "decision_type=1", "categorical"),
        ("shrinkage=1", "surprise=1", "unknown field 'surprise'"),
        ("tree_sizes=", "tree_sizes=1", "tree_sizes"),
        ("Tree=1\n", "Tree=7\n", "numbered"),
        ("end of trees\n", "", "cut off"),
    ],
)
def test_models_are_checked_before_lightgbm_sees_them(file: Path, old: str, new: str, message: str) -> None:
    body = file.read_bytes().partition(b"\n")[2].decode()
    assert old in body
    rewrite(file, body=body.replace(old, new, 1).encode())
    with pytest.raises(PredictorFileError, match=message):
        load_ranker(file)


def test_nodes_that_form_a_cycle_are_refused(file: Path) -> None:
    body = file.read_bytes().partition(b"\n")[2].decode()
    line = next(line for line in body.splitlines() if line.startswith("left_child="))
    children = line.removeprefix("left_child=").split(" ")
    children[-1] = "0"
    rewrite(file, body=body.replace(line, "left_child=" + " ".join(children), 1).encode())
    with pytest.raises(PredictorFileError, match="do not form a tree"):
        load_ranker(file)
