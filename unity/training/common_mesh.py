"""One mesh for the plans of a training step, whose other values have shardings on it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import reduce

from unity.pcg.parallel.axis_names import AxisNames
from unity.plan.plan import Plan


def with_common_mesh(plans: Mapping[Hashable, Plan]) -> dict[Hashable, Plan]:
    """Return plans whose meshes have all axes that one of them needs, so that they are one mesh if the machines are one.

    A level that one plan divides as a whole, and another one in parts, is in parts in both.
    """
    programs = {key: plan.program for key, plan in plans.items()}
    if len({tuple(program.boundary.mesh_shape.items()) for program in programs.values()}) == 1:
        return dict(plans)
    names = reduce(AxisNames.refined, (program.axis_names for program in programs.values()))
    return {key: Plan(p.family, p.candidate, names=p.axis_names.refined(names)) for key, p in programs.items()}
