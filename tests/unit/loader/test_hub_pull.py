"""Models come from a hub whole and intact, whatever happens on the way, and are found again without it."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from headway.child_process import python_command
from headway.cli.main import main
from headway.config import ModelConfig
from headway.errors import ConfigError, CorruptModelError, ModelNotFoundError
from headway.loader import find_path, open_checkpoint
from headway.loader.chosen_model import open_model
from headway.loader.hub import HubModel, download, find_model, pull_model
from headway.loader.hub.cache import CachedModel
from tests.unit.loader.stub_hub import COMMIT, Changed, Cut, Refused, Stalled, StubHub, Whole, git_digest
from tests.unit.models.tiny import hf_model, save_folder

WEIGHTS = bytes(range(256)) * 40
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"a": 1}',
    "README.md": b"not read",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": WEIGHTS,
}
MODEL = HubModel("some/model")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder; what the machine's own settings say of hubs does not count."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(download, "PERSISTENCE", download.Persistence(pause_s=0.0))
    return tmp_path / "hub"


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubHub]:
    with StubHub() as stub:
        stub.publish("some/model", FILES)
        monkeypatch.setattr(constants, "ENDPOINT", stub.url)
        template = stub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield stub


def content(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_only_what_is_read_is_fetched(hub: StubHub, cache: Path) -> None:
    pulled = pull_model(MODEL)
    assert content(pulled.path) == {
        name: FILES[name] for name in ("config.json", "tokenizer.json", "model.safetensors")
    }
    assert (pulled.commit, pulled.num_files, pulled.damaged) == (COMMIT, 3, ())
    assert pulled.fetched_bytes == pulled.num_bytes == len(WEIGHTS) + 10
    assert {one.name for one in hub.asked} == set(content(pulled.path))
    again = pull_model(MODEL)
    assert (again.path, again.fetched_bytes) == (pulled.path, 0)


def test_layout_is_that_of_hugging_face(hub: StubHub, cache: Path) -> None:
    """So that their tools find the files."""
    import huggingface_hub

    pulled = pull_model(MODEL)
    found = huggingface_hub.try_to_load_from_cache("some/model", "model.safetensors", cache_dir=cache)
    assert found == str(pulled.path / "model.safetensors")
    assert Path(found).resolve().name == hashlib.sha256(WEIGHTS).hexdigest()
    assert (pulled.path / "config.json").resolve().name == git_digest(b"{}")
    [repo] = huggingface_hub.scan_cache_dir(cache).repos
    assert (repo.repo_id, repo.nb_files, list(repo.refs)) == ("some/model", 3, ["main"])


def test_token_goes_to_the_hub_alone(hub: StubHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    pull_model(MODEL)
    assert set(hub.listings) == {"Bearer hf_secret"}
    assert {one.authorization for one in hub.asked if not one.at_storage} == {"Bearer hf_secret"}
    assert [one.authorization for one in hub.asked if one.at_storage] == [None]


def test_lost_connections_are_continued(hub: StubHub) -> None:
    hub.faults["model.safetensors"] += [Cut(3000), Cut(0), Cut(2000)]
    assert content(pull_model(MODEL).path)["model.safetensors"] == WEIGHTS
    assert hub.ranges("model.safetensors") == [None, "bytes=3000-", "bytes=3000-", "bytes=5000-"]


def test_next_run_continues(hub: StubHub) -> None:
    hub.faults["model.safetensors"] += [Cut(3000), *[Cut(0)] * download.PERSISTENCE.attempts_without_bytes]
    with pytest.raises(ModelNotFoundError, match="cannot be reached.*headway pull some/model"):
        pull_model(MODEL)
    asked = len(hub.ranges("model.safetensors"))
    assert content(pull_model(MODEL).path)["model.safetensors"] == WEIGHTS
    assert hub.ranges("model.safetensors")[asked:] == ["bytes=3000-"]


def test_hub_that_does_not_continue(hub: StubHub) -> None:
    """It sends all again, and what has arrived before does not count."""
    hub.faults["model.safetensors"] += [Cut(3000), Whole()]
    assert content(pull_model(MODEL).path)["model.safetensors"] == WEIGHTS


def test_beginning_of_another_content(hub: StubHub, cache: Path) -> None:
    """A file that was begun by another run, and is not what it should be, is fetched from its start."""
    blobs = cache / "models--some--model" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hashlib.sha256(WEIGHTS).hexdigest()}.headway.incomplete").write_bytes(b"x" * 5000)
    assert content(pull_model(MODEL).path)["model.safetensors"] == WEIGHTS
    assert hub.ranges("model.safetensors") == ["bytes=5000-", None]
    assert not list(blobs.glob("*.incomplete"))


def test_content_that_arrives_damaged(hub: StubHub, cache: Path) -> None:
    hub.faults["model.safetensors"] += [Changed()]
    assert content(pull_model(MODEL).path)["model.safetensors"] == WEIGHTS
    shutil.rmtree(cache)
    hub.faults["model.safetensors"] += [Changed(), Changed()]
    with pytest.raises(CorruptModelError, match="arrives damaged: twice.*Nothing of it was kept"):
        pull_model(MODEL)
    assert hashlib.sha256(WEIGHTS).hexdigest() not in [path.name for path in cache.rglob("*")]
    with pytest.raises(ModelNotFoundError):
        find_model(MODEL, offline=True)


@pytest.mark.parametrize("damage", [b"x" + WEIGHTS[1:], WEIGHTS[:-1], b""])
def test_damaged_file_is_fetched_again(hub: StubHub, damage: bytes) -> None:
    path = pull_model(MODEL).path
    (path / "model.safetensors").write_bytes(damage)
    pulled = pull_model(MODEL)
    assert content(pulled.path)["model.safetensors"] == WEIGHTS
    assert pulled.fetched_bytes == len(WEIGHTS)
    assert pulled.damaged == (("model.safetensors",) if len(damage) == len(WEIGHTS) else ())
    assert len(hub.ranges("model.safetensors")) == 2


def test_offline_check_finds_damage(hub: StubHub) -> None:
    path = pull_model(MODEL).path
    hub.listings.clear()
    assert pull_model(MODEL, offline=True).path == path
    (path / "model.safetensors").write_bytes(b"x" + WEIGHTS[1:])
    with pytest.raises(
        CorruptModelError, match=r"model\.safetensors of some/model is damaged.*headway pull some/model"
    ):
        pull_model(MODEL, offline=True)
    assert hub.listings == []


def test_what_is_here_is_used_without_asking(hub: StubHub) -> None:
    """Also if the model has changed on the hub, until it is pulled."""
    first = find_model(MODEL)
    assert (len(hub.listings), content(first)["model.safetensors"]) == (1, WEIGHTS)
    newer = {**FILES, "model.safetensors": WEIGHTS[::-1]}
    hub.publish("some/model", newer, commit="d" * 40)
    assert find_model(MODEL) == first
    assert len(hub.listings) == 1
    pulled = pull_model(MODEL)
    assert find_model(MODEL) == pulled.path != first
    assert content(pulled.path)["model.safetensors"] == WEIGHTS[::-1]
    assert len(hub.ranges("config.json")) == 0
    assert [one.name for one in hub.asked].count("config.json") == 1  # its content is the same at both commits


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", None])
def test_offline(hub: StubHub, monkeypatch: pytest.MonkeyPatch, variable: str | None) -> None:
    if variable is not None:
        monkeypatch.setenv(variable, "1")
    with pytest.raises(ModelNotFoundError, match="nothing may be fetched.*'headway pull some/model'"):
        find_model(MODEL, offline=variable is None)
    assert hub.listings == []
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    path = pull_model(MODEL).path
    if variable is not None:
        monkeypatch.setenv(variable, "true")
    assert find_model(MODEL, offline=variable is None) == path


def test_half_a_model_is_not_used(hub: StubHub) -> None:
    path = pull_model(MODEL).path
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError):
        find_model(MODEL, offline=True)
    assert find_model(MODEL) == path


def test_model_without_a_tokenizer(hub: StubHub) -> None:
    """Only the hub can tell that it has none; if it cannot be asked, the model is used as it is."""
    hub.publish("some/model", {"config.json": b"{}", "model.safetensors": WEIGHTS})
    path = find_model(MODEL)
    assert find_model(MODEL) == find_model(MODEL, offline=True) == path
    assert len(hub.listings) == 2
    hub.refusal = Refused(503)
    assert find_model(MODEL) == path


def test_revisions(hub: StubHub) -> None:
    older = {**FILES, "model.safetensors": WEIGHTS * 2}
    hub.publish("some/model", older, revision="refs/pr/1", commit="e" * 40)
    model = HubModel("some/model", revision="refs/pr/1")
    assert content(find_model(model))["model.safetensors"] == WEIGHTS * 2
    assert content(find_model(MODEL))["model.safetensors"] == WEIGHTS
    assert find_model(HubModel("some/model", revision="e" * 40)) == find_model(model)
    with pytest.raises(ModelNotFoundError, match=r"some/model has no revision 'v9'"):
        find_model(HubModel("some/model", revision="v9"))


def test_shards_of_an_index(hub: StubHub) -> None:
    index = json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}).encode()
    shards = {"one.safetensors": WEIGHTS, "two.safetensors": WEIGHTS + b"2", "other.safetensors": WEIGHTS + b"3"}
    small = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors.index.json": index}
    hub.publish("some/model", {**small, **shards})
    pulled = pull_model(MODEL)
    assert content(pulled.path).keys() == {*small, "one.safetensors", "two.safetensors"}
    assert find_model(MODEL, offline=True) == pulled.path
    (pulled.path / "model.safetensors.index.json").write_bytes(b"x" * len(index))
    assert pull_model(MODEL).damaged == ("model.safetensors.index.json",)
    (pulled.path / "two.safetensors").unlink()
    with pytest.raises(ModelNotFoundError):
        find_model(MODEL, offline=True)
    hub.publish("some/model", {**small, "one.safetensors": WEIGHTS}, commit="d" * 40)
    with pytest.raises(CorruptModelError, match=r"lists two\.safetensors, which is not there"):
        pull_model(MODEL)


def test_gguf_by_its_quantisation(hub: StubHub) -> None:
    files = {"M-Q4_K_M.gguf": WEIGHTS, "M-Q8_0.gguf": WEIGHTS * 2, "config.json": b"{}"}
    hub.publish("some/ggufs", files)
    with pytest.raises(ModelNotFoundError, match="name one of these: some/ggufs:Q4_K_M .*some/ggufs:Q8_0"):
        find_model(HubModel("some/ggufs"))
    path = find_model(HubModel("some/ggufs", "Q8_0"))
    assert (path.name, path.read_bytes()) == ("M-Q8_0.gguf", WEIGHTS * 2)
    assert find_model(HubModel("some/ggufs", "q8_0"), offline=True) == path
    with pytest.raises(ModelNotFoundError, match="nothing may be fetched"):
        find_model(HubModel("some/ggufs", "Q4_K_M"), offline=True)


GATED = Refused(403, "GatedRepo")


@pytest.mark.parametrize(
    ("refusal", "token", "parts"),
    [
        (Refused(401, "RepoNotFound"), None, ["has no such model", "check the name", "HF_TOKEN", "no file or folder"]),
        (Refused(404, "RepoNotFound"), "hf_x", ["has no such model", "whether the token that is used may read it"]),
        (Refused(401, "GatedRepo"), None, ["is a gated model", "accept its terms at http://", "HF_TOKEN"]),
        (GATED, "hf_x", ["is a gated model", "the token that is used has no access"]),
        (Refused(404, "RevisionNotFound"), None, ["has no revision 'main'"]),
        (Refused(403), "hf_x", ["refuses access (403)", "is not valid, or may not do this"]),
        (Refused(429, headers={"Retry-After": "17"}), None, ["too many requests", "in 17 s", "with a token"]),
        (Refused(429), "hf_x", ["too many requests", "in some minutes"]),
        (Refused(503), None, ["has a fault (503)", "later"]),
        (Refused(418), None, ["answers 418"]),
    ],
)
def test_refusals(
    hub: StubHub, monkeypatch: pytest.MonkeyPatch, refusal: Refused, token: str | None, parts: list[str]
) -> None:
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    hub.refusal = refusal
    with pytest.raises(ModelNotFoundError) as caught:
        pull_model(MODEL)
    for part in parts:
        assert part in str(caught.value)


def test_gated_content(hub: StubHub) -> None:
    """The listing of a gated model is open."""
    hub.faults["config.json"] += [GATED]
    with pytest.raises(ModelNotFoundError, match="is a gated model"):
        pull_model(MODEL)


def test_hub_with_too_much_to_do(hub: StubHub, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    hub.faults["model.safetensors"] += [Refused(429), Refused(503)]
    assert content(pull_model(MODEL).path)["model.safetensors"] == WEIGHTS
    assert len(waits) == 2


def test_no_network(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with StubHub() as stub:
        monkeypatch.setattr(constants, "ENDPOINT", stub.url)
    with pytest.raises(ModelNotFoundError, match="hub cannot be reached at http.*Check the network and its proxy"):
        pull_model(MODEL)


def test_address_that_is_no_hub(hub: StubHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", hub.storage_url)
    hub.files["api/models", "some"] = {"model/revision/main": b'{"id": "some/model"}'}
    with pytest.raises(ModelNotFoundError, match="does not answer as a Hugging Face hub does"):
        pull_model(MODEL)


def test_full_disk(hub: StubHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def usage(_: object) -> SimpleNamespace:
        return SimpleNamespace(free=5000)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    with pytest.raises(ModelNotFoundError, match=r"does not fit on the disk: 0\.0 GB .*HF_HOME"):
        pull_model(MODEL)
    assert hub.asked == []


def test_what_has_arrived_needs_no_room(hub: StubHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.faults["model.safetensors"] += [Cut(len(WEIGHTS) - 10), *[Cut(0)] * 5]
    with pytest.raises(ModelNotFoundError):
        pull_model(MODEL)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    pull_model(MODEL)


def test_disk_that_cannot_be_written(hub: StubHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(download.ArrivingFile, "write", full)
    with pytest.raises(
        ModelNotFoundError, match=f"cannot be kept in {cache}: No space left on device; free some space"
    ):
        pull_model(MODEL)


def test_cache_folder_that_cannot_be_made(hub: StubHub, cache: Path) -> None:
    cache.write_text("a file")
    with pytest.raises(ModelNotFoundError, match="where nothing can be written.*HF_HOME"):
        pull_model(MODEL)


def test_two_processes_at_once(cache: Path) -> None:
    """The second one waits, and says so."""
    cached, others = CachedModel(cache, "some/model"), CachedModel(cache, "some/model")
    waits = threading.Event()
    order: list[str] = []

    def second() -> None:
        with others.held(waits.set):
            order.append("second")

    thread = threading.Thread(target=second)
    with cached.held(lambda: pytest.fail("nothing to wait for")):
        thread.start()
        assert waits.wait(60)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_opened_by_its_name(hub: StubHub, tmp_path: Path) -> None:
    folder = save_folder(hf_model("qwen3"), tmp_path / "tiny")
    hub.publish("some/tiny", {path.name: path.read_bytes() for path in folder.iterdir()})
    checkpoint = open_checkpoint("some/tiny", revision="main")
    assert (checkpoint.name, checkpoint.config.architecture) == ("some/tiny", "qwen3")
    assert open_checkpoint("some/tiny", offline=True).path == checkpoint.path
    again = open_model(ModelConfig(model="some/tiny", revision=COMMIT, offline=True))
    assert again.path == checkpoint.path
    with pytest.raises(ConfigError, match="revision is for models of the Hugging Face hub"):
        find_path(folder, revision="main")


def test_command(hub: StubHub, capsys: pytest.CaptureFixture[str]) -> None:
    """The path is on stdout, all else on stderr."""
    assert main(["pull", "some/model"]) == 0
    path, said = capsys.readouterr()
    assert Path(path.strip()) == find_model(MODEL)
    assert f"some/model is here whole: 3 files, 0.0 MB, commit {COMMIT[:12]}; 0.0 MB fetched" in said
    (Path(path.strip()) / "model.safetensors").write_bytes(WEIGHTS[::-1])
    assert main(["pull", "some/model"]) == 0
    assert "Damaged, and fetched again: model.safetensors." in capsys.readouterr().err
    assert main(["pull", "some/model", "--offline"]) == 0
    assert "nothing had to be fetched" in capsys.readouterr().err


def test_killed_process(hub: StubHub, cache: Path) -> None:
    """What had arrived when it was killed is not fetched again."""
    content_of = bytes(range(256)) * 8000
    hub.publish("some/model", {**FILES, "model.safetensors": content_of})
    stalled = Stalled(len(content_of) // 2)
    hub.faults["model.safetensors"] += [stalled]
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(cache)}
    command = python_command("headway", "pull", "some/model")
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as pulling:
        assert stalled.is_stalled.wait(120)
        wait_for(lambda: any(path.stat().st_size == stalled.after for path in cache.rglob("*.incomplete")))
        pulling.kill()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (Path(done.stdout.strip()) / "model.safetensors").read_bytes() == content_of
    assert hub.ranges("model.safetensors") == [None, f"bytes={stalled.after}-"]


def wait_for(is_so: Callable[[], bool]) -> None:
    while not is_so():
        threading.Event().wait(0.01)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a/b/c"], "is not a name of the Hugging Face hub"),
        ([os.path.dirname(__file__)], "is on this machine already"),
        (["some/model", "--load-format", "dummy"], "makes weights up"),
        (["some/model", "--revision", "../x"], "is not the name of a branch"),
        (["--revision", "main"], "name one"),
    ],
)
def test_wrong_commands(hub: StubHub, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert main(["pull", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert hub.listings == []
