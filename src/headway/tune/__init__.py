"""The tuner: which options of the engine serve a workload best, searched in simulation and checked in the engine."""

from headway.tune.objective import Goal
from headway.tune.search import SearchLimits, search
from headway.tune.space import Space
from headway.tune.trial import Trial, Tuned

__all__ = ["Goal", "SearchLimits", "Space", "Trial", "Tuned", "search"]
