"""Scheduling policies, by name. To add one, write a class in a file of this folder and add its name in
`headway.config`."""

from __future__ import annotations

import difflib
import importlib
import pkgutil

from headway.config import SCHEDULING_POLICIES
from headway.core.policy.base import PolicyView, SchedulingPolicy
from headway.errors import ConfigError


def _find_policies() -> dict[str, type[SchedulingPolicy]]:
    """Return all policies in the files of this folder, in the order of their names in the config."""
    modules = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    classes = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    policies = {one.name: one for one in classes if issubclass(one, SchedulingPolicy) and hasattr(one, "name")}
    return {name: policies[name] for name in SCHEDULING_POLICIES}


POLICIES = _find_policies()


def create_policy(name: str, view: PolicyView) -> SchedulingPolicy:
    """Create the policy of that name. Raises `ConfigError`, with the nearest valid name, if there is none."""
    if name not in POLICIES:
        near = difflib.get_close_matches(name, POLICIES, n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise ConfigError(f"Unknown scheduling policy '{name}'. Known: {', '.join(POLICIES)}.{hint}")
    return POLICIES[name](view)


__all__ = ["POLICIES", "PolicyView", "SchedulingPolicy", "create_policy"]
