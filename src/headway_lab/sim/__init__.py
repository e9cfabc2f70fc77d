"""The simulator: the real engine loop, scheduler, cache and policies, with a cost model in place of the device."""

from headway_lab.sim.calibration import Calibration, HostTime, Machine
from headway_lab.sim.cost_model import CostModel
from headway_lab.sim.simulate import Simulation, simulate

__all__ = ["Calibration", "CostModel", "HostTime", "Machine", "Simulation", "simulate"]
