"""Scheduling policies, by name. A new one is a file in this folder and its name in `headway.config`."""

from __future__ import annotations

import difflib
import importlib

from headway.config import SCHEDULING_POLICIES
from headway.core.policy.base import SchedulingPolicy
from headway.core.policy.view import PolicyView
from headway.errors import ConfigError


def _load(name: str) -> type[SchedulingPolicy]:
    """The policy of this name in the file of this name."""
    module = importlib.import_module(f"headway.core.policy.{name}")
    return next(
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, SchedulingPolicy) and getattr(value, "name", None) == name
    )


POLICIES: dict[str, type[SchedulingPolicy]] = {name: _load(name) for name in SCHEDULING_POLICIES}


def create_policy(name: str, view: PolicyView) -> SchedulingPolicy:
    """The policy of that name; `ConfigError` with the nearest valid name if there is none."""
    if name not in POLICIES:
        near = difflib.get_close_matches(name, POLICIES, n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise ConfigError(f"Unknown scheduling policy '{name}'. Known: {', '.join(POLICIES)}.{hint}")
    return POLICIES[name](view)


__all__ = ["POLICIES", "PolicyView", "SchedulingPolicy", "create_policy"]
