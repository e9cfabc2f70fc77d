"""The tuner: which options of the engine serve a workload best, searched in simulation and checked in the engine."""

from headway_lab.tune.tune_goal import Goal
from headway_lab.tune.tune_search import SearchLimits, Space, Trial, Tuned, search

__all__ = ["Goal", "SearchLimits", "Space", "Trial", "Tuned", "search"]
