"""A plan's step as plain data, for the modules of `unity.exec` that compile, check and time it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unity.exec.compiled.entangled import is_runnable
from unity.exec.context import automatic
from unity.exec.planned_step import PlannedStep
from unity.plan.device_mesh import graph_on
from unity.search.cost.cost import Training

if TYPE_CHECKING:
    from unity.plan.plan import Plan


def step_of(plan: Plan, training: Training) -> PlannedStep:
    """Return one step of a plan: the function, and with `training.backward` its weights' gradients."""
    differentiated = frozenset(plan.program.family.captured.differentiated if training.backward else ())
    mesh = plan.inspect.mesh
    return PlannedStep(graph_on(plan.program, mesh), automatic(mesh), differentiated, training, ties=plan.program.ties_gradients)


def can_run(plan: Plan) -> bool:
    """Return whether the runtime of a plan's devices can run it."""
    return is_runnable(plan.program.pcg, automatic(plan.inspect.mesh))
