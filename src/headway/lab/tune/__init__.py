"""The tuner: which options of the engine serve a workload best, searched in simulation and checked in the engine."""

from headway.lab.tune.objective import Goal
from headway.lab.tune.search import SearchLimits, search
from headway.lab.tune.space import Space
from headway.lab.tune.trial import Trial, Tuned

__all__ = ["Goal", "SearchLimits", "Space", "Trial", "Tuned", "search"]
