"""Scheduling policies, by name. A new one is a file in this folder and a line in `POLICIES`."""

from __future__ import annotations

import difflib

from headway.core.policy.base import SchedulingPolicy
from headway.core.policy.fcfs import FcfsPolicy
from headway.core.policy.priority import PriorityPolicy
from headway.errors import ConfigError

POLICIES: dict[str, type[SchedulingPolicy]] = {policy.name: policy for policy in (FcfsPolicy, PriorityPolicy)}


def create_policy(name: str) -> SchedulingPolicy:
    """The policy of that name; `ConfigError` with the nearest valid name if there is none."""
    if name not in POLICIES:
        near = difflib.get_close_matches(name, POLICIES, n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise ConfigError(f"Unknown scheduling policy '{name}'. Known: {', '.join(POLICIES)}.{hint}")
    return POLICIES[name]()


__all__ = ["POLICIES", "FcfsPolicy", "PriorityPolicy", "SchedulingPolicy", "create_policy"]
