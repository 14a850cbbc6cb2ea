"""The execution simulator: when every task of a training step runs, on devices and on the links between them.

From FlexFlow (Jia et al., MLSys 2019), section 5 and appendices A and B.
"""

from unity.search.simulator.configs import ParallelConfig, data_parallel, drawn, every_config, on_one
from unity.search.simulator.delta import Delta
from unity.search.simulator.full import full, makespan
from unity.search.simulator.operators import Operators, operators
from unity.search.simulator.schedule import Change
from unity.search.simulator.simulation import Simulation, simulate
from unity.search.simulator.strategy import Strategy
from unity.search.simulator.tasks import Resource, SimulationError, Task, TaskGraph
from unity.search.simulator.timeline import Timeline
from unity.search.simulator.topology import Link, Topology

__all__ = [
    "Change",
    "Delta",
    "Link",
    "Operators",
    "ParallelConfig",
    "Resource",
    "Simulation",
    "SimulationError",
    "Strategy",
    "Task",
    "TaskGraph",
    "Timeline",
    "Topology",
    "data_parallel",
    "drawn",
    "every_config",
    "full",
    "makespan",
    "on_one",
    "operators",
    "simulate",
]
