"""The execution simulator: when every task of a training step runs, on devices and on the links between them.

From FlexFlow (Jia et al., MLSys 2019), section 5 and appendices A and B.
"""

from unity.search.simulator.full import full, makespan
from unity.search.simulator.schedule import Change
from unity.search.simulator.simulation import Simulation, simulate
from unity.search.simulator.tasks import Resource, SimulationError, Task, TaskGraph
from unity.search.simulator.timeline import Timeline
from unity.search.simulator.topology import Link, Topology

__all__ = [
    "Change",
    "Link",
    "Resource",
    "Simulation",
    "SimulationError",
    "Task",
    "TaskGraph",
    "Timeline",
    "Topology",
    "full",
    "makespan",
    "simulate",
]
