"""The execution simulator: when every task of a training step runs, on devices and on the links between them.

It follows FlexFlow (Jia et al., MLSys 2019), section 5 and appendices A and B.
"""

from unity.search.simulator.simulation import Simulation, simulate
from unity.search.simulator.tasks import Resource, SimulationError, Task, TaskGraph
from unity.search.simulator.timeline import Timeline, full
from unity.search.simulator.topology import Link, Topology

__all__ = [
    "Link",
    "Resource",
    "Simulation",
    "SimulationError",
    "Task",
    "TaskGraph",
    "Timeline",
    "Topology",
    "full",
    "simulate",
]
