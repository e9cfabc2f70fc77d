"""What the scripts of this folder share: one line per check, and an exit status that counts the failed ones."""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
import urllib.request
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

WEATHER = "Sunny, 21 degrees."


class Person(BaseModel):
    """A person. Bounded, so that the smallest model comes to an end."""

    name: Literal["Ada", "Grace"]
    age: int = Field(ge=0, le=120)


class AnyObject(BaseModel):
    """What json_object promises: an object, and nothing about its members."""

    model_config = ConfigDict(extra="allow")


class Checks:
    """Runs the checks of one client against one server."""

    def __init__(self, *packages: str) -> None:
        self.url = sys.argv[1].rstrip("/") if len(sys.argv) > 1 else "http://127.0.0.1:8000"
        self.base_url = f"{self.url}/v1"
        with urllib.request.urlopen(f"{self.base_url}/models") as answer:
            self.model: str = json.load(answer)["data"][0]["id"]
        self._number = 0
        self._failed = 0
        print("versions:", ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages))

    def check(self, name: str, body: Callable[[], Any]) -> None:
        """Run one check. It fails when it raises; what it returns is shown."""
        self._number += 1
        began = time.monotonic()
        try:
            shown = repr(body())
        except Exception as error:
            self._failed += 1
            print(f"FAILED {name}: {type(error).__name__}: {error}")
        else:
            print(f"ok     {name} ({time.monotonic() - began:.1f} s): {shown[:140]}", flush=True)

    def finish(self) -> None:
        """Print the sum, and leave with 1 if a check failed."""
        print(f"{self._number - self._failed} of {self._number} checks passed")
        sys.exit(1 if self._failed else 0)
