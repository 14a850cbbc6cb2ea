"""Names of a strategy's tasks: numbers that say what a task is for, and nothing about other tasks."""

from __future__ import annotations

from unity.baselines.flexflow.strategy.operators import Operators
from unity.search.simulator.tasks import SimulationError

FORWARD, BACKWARD, REDUCTIONS, TRANSFERS = 0, 1, 2, 1 << 13  # what a task of an operator is for; from the last two on, by number
GRADIENT = 0  # of a weight, from here on, by number
WAYS, ENDS = 2, 2  # forward and backward; a barrier and what waits for it
ROW = 1 << 16  # between the names of what one piece (or group) sends and what the next one does
PURPOSE, PURPOSES = ROW * ROW, 1 << 14  # between the names of what is for one purpose and for the next; how many there are
OPERATORS = 1 << 16


def name_of(operator: int, purpose: int, i: int = 0, j: int = 0) -> int:
    """A task's name: it says nothing about other tasks, and orders those of one operator as listed above."""
    return (operator * PURPOSES + purpose) * PURPOSE + i * ROW + j


def said_by(name: int) -> tuple[int, int, int, int]:
    """What a task's name was made of."""
    operator, purpose = divmod(name // PURPOSE, PURPOSES)
    return operator, purpose, name // ROW % ROW, name % ROW


def check_named(o: Operators) -> None:
    """Raises SimulationError unless there are names for all tasks that there may be."""
    operands = (PURPOSES - TRANSFERS) // WAYS
    wide = next((node for node in o.nodes if len(node.operands) > operands), None)
    if wide is not None:
        raise SimulationError(f"{wide.source or wide}: {len(wide.operands)} operands; a strategy has names for {operands}")
    for what, count, most in (("operators", len(o.nodes), OPERATORS), ("devices", o.topology.devices, ROW)):
        if count > most:
            raise SimulationError(f"{count} {what}; a strategy has names for the tasks of {most}")
