"""Facts are read from what systems tell, and the command runs on this machine."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from headway.cli.every_option import every_option
from headway.cli.main import main
from headway.doctor.read.host import cgroup_memory, chosen, meminfo, num_nodes
from headway.doctor.read.installed import read_kernels, unmet_requirements
from headway.doctor.read.surroundings import read_folders, read_network, read_settings
from headway.native.build import ISA_VARIABLE


def test_meminfo() -> None:
    assert meminfo("MemTotal:       1000 kB\nHugePages_Total:    3\nodd\n")["MemTotal"] == 1_024_000


@pytest.mark.parametrize(
    ("content", "value"), [("always [madvise] never", "madvise"), ("[never]", "never"), ("", ""), ("always", "")]
)
def test_chosen(content: str, value: str) -> None:
    assert chosen(content) == value


@pytest.mark.parametrize(
    ("usable", "lists", "expected"),
    [({0, 1}, ["0-3", "4-7"], 1), ({3, 4}, ["0-3", "4-7"], 2), ({9}, ["0,8-9", "1"], 1), ({0}, [""], 0), ({0}, [], 0)],
)
def test_memory_nodes(usable: set[int], lists: list[str], expected: int) -> None:
    assert num_nodes(usable, lists) == expected


def test_cgroup_memory(tmp_path: Path) -> None:
    """The tightest limit, and the least that is left, may be those of different groups."""
    for name, limit, used, cached in (("own", "max", 0, 0), ("pod", "1000", 900, 300), ("slice", "2000", 1900, 50)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "memory.max").write_text(limit + "\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\n")
    folders = [tmp_path / name for name in ("own", "pod", "slice", "nothing")]
    assert cgroup_memory(folders) == (1000, 150)
    assert cgroup_memory(folders[:1]) == (None, None)


def test_requirements() -> None:
    wanted = [
        "pytest>=1",
        "pytest<1",
        "no-such-package>=2",
        "x>1; extra == 'ray'",
        "numpy; sys_platform == 'none'",
        "?",
    ]
    assert [what for what, _ in unmet_requirements(wanted)] == ["pytest<1", "no-such-package>=2"]


def test_unknown_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, "avx3")
    assert "unknown HEADWAY_NATIVE_ISA 'avx3'" in read_kernels({}).problem


def test_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HEADWAY_CACHE_DIR", str(tmp_path / "file"))
    assert read_folders()[0].problem
    monkeypatch.setenv("HEADWAY_CACHE_DIR", str(tmp_path / "new"))
    assert not read_folders()[0].problem


def test_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        network = read_network({"HTTPS_PROXY": "http://me:secret@proxy:1"}, host="127.0.0.1", port=port)
    assert "in use" in network.port_problem
    assert network.proxies == {"HTTPS_PROXY": "http://proxy:1"}


def test_variables() -> None:
    environment = {"HEADWAY_PROT": "1", "HEADWAY_PORT": "x", "OMP_PROC_BIND": "true", "HOME": "/"}
    settings = read_settings(environment, every_option())
    assert list(settings.unknown) == ["HEADWAY_PROT"]
    assert "HEADWAY_PORT" in settings.problem
    assert settings.variables == {"OMP_PROC_BIND": "true"}
    assert settings.clock_s > settings.built_s


def test_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit status says whether something is broken, and a wrong variable is a finding."""
    main(["doctor", "--port", "0", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["facts"]["processor"]["num_usable"] >= 1
    assert {"software", "CPU kernels", "memory", "network"} <= {one["subject"] for one in document["findings"]}
    monkeypatch.setenv("HEADWAY_PORT", "x")
    assert main(["doctor"]) == 1
    assert "error    settings: An option in the environment cannot be used: $HEADWAY_PORT" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("nobody/nothing", "warning model: no file or folder 'nobody/nothing'"),
        ("qwen3-0.6b", "model: qwen3-0.6b (random weights)"),
        (__file__, "warning model:"),
    ],
)
def test_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, said: str
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    main(["doctor", "--port", "0", "--model", model])
    assert said in " ".join(capsys.readouterr().out.split())
