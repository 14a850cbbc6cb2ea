"""The execution simulator: when every task of a training step runs, on devices and on the links between them.

It follows FlexFlow (Jia et al., MLSys 2019), section 5 and appendices A and B.
"""

from unity.search.simulator.simulation import Simulation, simulate
from unity.search.simulator.tasks import Resource, SimulationError, TaskGraph, TimedTask
from unity.search.simulator.timeline import Timeline, full
from unity.search.simulator.topology import DirectedLink, Topology

__all__ = [
    "DirectedLink",
    "Resource",
    "Simulation",
    "SimulationError",
    "TaskGraph",
    "TimedTask",
    "Timeline",
    "Topology",
    "full",
    "simulate",
]
