"""What the brute-force model leaves out."""

from __future__ import annotations

import pytest

from headway.core import POLICIES
from headway.core.policy import SchedulingPolicy


@pytest.fixture
def no_displacement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every policy have its order and its victims, but no request displace another."""
    for policy in POLICIES.values():
        monkeypatch.setattr(policy, "choose_displaced", SchedulingPolicy.choose_displaced)
