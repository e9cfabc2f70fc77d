"""The simulator: the real engine loop, scheduler, cache and policies, with a cost model in place of the device."""

from headway.lab.sim.calibration import Calibration
from headway.lab.sim.cost_model import CostModel
from headway.lab.sim.host_time import HostTime
from headway.lab.sim.machine import Machine
from headway.lab.sim.simulate import Simulation, simulate
from headway.lab.sim.step_work import StepWork

__all__ = ["Calibration", "CostModel", "HostTime", "Machine", "Simulation", "StepWork", "simulate"]
