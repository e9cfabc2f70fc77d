"""The simulator: the real engine loop, scheduler, cache and policies, with a cost model in place of the device."""

from headway.sim.cost_model import CostModel, StepWork
from headway.sim.simulate import Machine, Simulation, simulate

__all__ = ["CostModel", "Machine", "Simulation", "StepWork", "simulate"]
