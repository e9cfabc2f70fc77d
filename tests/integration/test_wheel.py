"""The wheel, built from the source distribution and installed outside the repository, has all that a clone has.

The environment is new, but sees the packages that this one has installed, so that nothing is downloaded.
`release/try_wheel.py` does the same in an empty environment, and asks the embedded model.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from headway import __version__

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("src", "pyproject.toml", "README.md", "LICENSE")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


@dataclass(frozen=True)
class Installed:
    wheel: Path
    venv: Path
    folder: Path
    """Where commands run: outside the repository."""

    def run(self, *arguments: str) -> str:
        return run(self.folder, str(self.venv / "bin" / arguments[0]), *arguments[1:])


def run(folder: Path, *command: str) -> str:
    """What a command prints; nothing of this tree is on its path."""
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    tree.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tree / name, **({"ignore": LEFT_OUT} if copy is shutil.copytree else {}))
    sdist = tree / run(tree, sys.executable, "-c", BUILD, "build_sdist", str(tree)).splitlines()[-1]
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    unpacked = folder / sdist.name.removesuffix(".tar.gz")
    wheel = folder / run(unpacked, sys.executable, "-c", BUILD, "build_wheel", str(folder)).splitlines()[-1]
    venv = folder / "venv"
    run(folder, sys.executable, "-m", "venv", "--without-pip", str(venv))
    site = Path(
        run(folder, str(venv / "bin" / "python"), "-c", "import site; print(site.getsitepackages()[0])").strip()
    )
    (site / "what_the_other_one_has.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    pip = (sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python"), "install")
    run(folder, *pip, "--quiet", "--no-deps", "--no-index", "--ignore-installed", str(wheel))
    return Installed(wheel, venv, folder)


def test_it_has_every_file_of_the_packages(installed: Installed) -> None:
    """So a new kind of file is found that pyproject.toml does not list."""
    sources = ROOT / "src"
    wanted = {
        path.relative_to(sources).as_posix()
        for path in sources.rglob("*")
        if path.is_file() and not {"__pycache__", "compiled"} & set(path.parts) and ".egg-info" not in str(path)
    }
    with zipfile.ZipFile(installed.wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert found == wanted
    assert {"headway/py.typed", "headway_lab/py.typed"} <= found


def test_it_is_what_runs(installed: Installed) -> None:
    shown = installed.run("python", "-c", "import headway, headway_lab; print(headway.__file__, headway_lab.__file__)")
    assert all(str(installed.venv) in path for path in shown.split())
    assert installed.run("headway", "--version") == f"headway {__version__}\n"


def test_workloads_and_calibrations_are_found_by_name(installed: Installed) -> None:
    told = json.loads(installed.run("headway", "workload", "shared_prefix", "--requests", "20", "--json"))
    assert told["name"] == "shared_prefix" and told["num_requests"] == 20
    flags = ("--calibration", "h200-llama31-8b", "--workload", "chat_lognormal", "--requests", "20", "--rate", "20")
    assert "chat_lognormal" in installed.run("headway", "sim", *flags)


def test_commands_of_the_lab_are_completed(installed: Installed) -> None:
    assert "bench" in installed.run("headway", "completion", "fish")


@pytest.mark.parametrize(
    ("extra", "requirement"),
    [("otel", "opentelemetry-sdk>="), ("predict", "lightgbm>="), ("ray", "ray>="), ("nvml", "nvidia-ml-py>=")],
)
def test_the_command_for_an_extra_names_its_requirements(installed: Installed, extra: str, requirement: str) -> None:
    code = f"from headway.installing import install_extra; print(install_extra({extra!r}))"
    assert f"install '{requirement}" in installed.run("python", "-c", code)
