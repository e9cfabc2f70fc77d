"""The simulator: the real engine loop, scheduler, cache and policies, with a cost model in place of the device."""

from headway.sim.calibration import Calibration
from headway.sim.cost_model import CostModel
from headway.sim.host_time import HostTime
from headway.sim.machine import Machine
from headway.sim.simulate import Simulation, simulate
from headway.sim.step_work import StepWork

__all__ = ["Calibration", "CostModel", "HostTime", "Machine", "Simulation", "StepWork", "simulate"]
