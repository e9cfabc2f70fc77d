"""The systemd unit and the files beside it: what they start, and that a stop leaves time to drain."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from headway.cli import serve
from headway.console.config_file import read_config_file
from headway.console.flags import CommandParser
from headway.console.option_variables import unknown_variables
from headway.server.http.http_server import GRACE_S
from headway.server.server_config import ServerConfig
from headway.server.serving import STOP_MARGIN_S
from tests.unit.console.settling import SPECS

FOLDER = Path(__file__).parents[2] / "deploy" / "systemd"
UNIT = FOLDER / "headway.service"


def service() -> configparser.SectionProxy:
    parser = configparser.RawConfigParser(strict=False)  # some keys stand several times
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(UNIT)
    return parser["Service"]


def test_it_starts_the_server_with_options_that_exist() -> None:
    program, command, *rest = shlex.split(service()["ExecStart"])
    assert Path(program).name == "headway" and command == "serve"
    parser = CommandParser(prog="test")
    serve.add_arguments(parser)
    assert parser.parse(rest).config == "/etc/headway/headway.toml"


def test_a_stop_leaves_time_to_drain() -> None:
    found = service()
    assert (found["KillMode"], found["KillSignal"]) == ("mixed", "SIGTERM")
    drain_s = tomllib.loads((FOLDER / "headway.toml").read_text())["drain_timeout_s"]
    assert float(found["TimeoutStopSec"]) > max(drain_s, ServerConfig().drain_timeout_s) + GRACE_S + STOP_MARGIN_S


def test_options_and_variables_exist_also_those_in_comments(tmp_path: Path) -> None:
    text = (FOLDER / "headway.toml").read_text()
    for number, content in enumerate((text, re.sub(r"^# (?=\w+ = )", "", text, flags=re.M))):
        file = tmp_path / f"{number}.toml"
        file.write_text(content)
        assert read_config_file(str(file), SPECS)["port"] == 8000
    variables = re.findall(r"^(?:# |Environment=)?(HEADWAY_\w+)=", (FOLDER / "headway.env").read_text(), re.M)
    variables += re.findall(r"^Environment=(HEADWAY_\w+)=", UNIT.read_text(), re.M)
    assert len(variables) >= 3 and not unknown_variables(SPECS, dict.fromkeys(variables, "x"))


def test_the_folders_that_it_writes_to_are_its_own() -> None:
    found, text = service(), UNIT.read_text()
    assert found["ProtectSystem"] == "strict" and found["DynamicUser"] == "yes"
    written = re.findall(r"=(/var/\S+)", text)
    own = {f"/var/lib/{found['StateDirectory']}", f"/var/cache/{found['CacheDirectory']}"}
    assert written and all(any(path.startswith(folder) for folder in own) for path in written)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_understands_it(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/headway/bin/headway", shutil.which("true") or "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--generators=no", str(unit)], capture_output=True, text=True
    )
    assert done.returncode == 0 and UNIT.name not in done.stderr, done.stderr
