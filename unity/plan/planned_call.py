"""Calls of a planned program: arguments checked and placed, and results of the types that the function itself would return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AbstractMesh, NamedSharding

from unity.exec.context import explicit_mesh, typed
from unity.pcg.capture.capture import ResultTypes, result_types
from unity.pcg.capture.gradient_types import gradients_are_weak, may_be_unlike_arguments
from unity.pcg.jaxprs.shardings import sharding_of
from unity.pcg.jaxprs.weak_types import GradientTypes, is_weak, with_weak_type, without_weak_type
from unity.plan.call_arguments import by_position, checked, in_reverse, refuse_weak
from unity.plan.face.sharder import Sharder
from unity.plan.planned_program import PlannedProgram
from unity.plan.unplanned_gradients import without_gradient


class PlannedCall:
    """A planned program of all leaves as a function of the user's arguments."""

    def __init__(self, program: PlannedProgram, sharder: Sharder, lowered: Callable[[], Callable[..., tuple]]) -> None:
        """Wrap a program.

        Args:
            program: the planned program.
            sharder: places arguments as the plan needs them.
            lowered: returns the lowered program. It is called in each call, once the arguments are known to be right.
        """
        self._program, self._sharder, self._lowered = program, sharder, lowered
        self._types: dict[Any, ResultTypes] = {}  # the cache of `_result_types`
        self._gradients: dict[Any, GradientTypes | None] = {}  # the cache of `_gradient_types`
        self._typed: dict[Any, Callable[..., tuple]] = {}  # the program for each mesh and types of results

    def __call__(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Call the program with the function's arguments by position, `args`, and by name."""
        program, family, captured = self._program, self._program.family, self._program.family.captured
        args = by_position(family.fn, args, named)
        leaves = self._sharder.placement_on(None).leaves(checked(family.name, captured, program.packing, args), depth=4)
        mesh = explicit_mesh((*leaves, *captured.consts))
        types = self._result_types(jax.tree.leaves(args), mesh)
        run = self._lowered()
        if mesh is not None:
            if (mesh, types.specs) not in self._typed:
                shardings = self._sharder.placement_on(mesh).shardings
                is_expressible = all(s.mesh.shape == mesh.shape for s in shardings)  # on axes of these sizes
                stored = tuple(s.spec for s in shardings) if is_expressible else ()
                self._typed[mesh, types.specs] = typed(run, mesh, types.specs, stored)
            run = self._typed[mesh, types.specs]
        gradients = self._gradient_types(jax.tree.leaves(args), mesh)
        with in_reverse(family.name):
            leaves = [
                without_gradient(x, f"{family.name}: {path}") if path in family.stopped and isinstance(x, Tracer) else x
                for x, path in zip(leaves, captured.paths, strict=True)
            ]
            results = run(*(_strong(x, gradients, k) for k, x in enumerate(leaves)), *self._sharder.constants)
        return jax.tree.unflatten(captured.out_tree, map(with_weak_type, results, types.weak))

    def _result_types(self, leaves: Sequence[Any], mesh: AbstractMesh | None) -> ResultTypes:
        """Return the types of the results for arguments with these leaves, under a mesh with explicit axes or under none.

        Raises PlanError where the function then computes in other types than were planned.
        """
        family, original = self._program.family, self._program.family.original
        weak = tuple(map(is_weak, leaves))
        if mesh is None and weak == original.weak[0]:
            return ResultTypes(original.weak[1], ())
        shardings = self._shardings(leaves)
        if (key := (weak, mesh, shardings)) not in self._types:
            is_own = mesh is not None and self._program.has_mesh(mesh.shape)
            planned = self._program.boundary.specs[len(family.captured.paths) :] if is_own else ()
            self._types[key] = result_types(family.fn, original, weak, shardings, mesh, planned)
        if not self._types[key].same:
            refuse_weak(family.name, original, weak)
        return self._types[key]

    def _shardings(self, leaves: Sequence[Any]) -> tuple[NamedSharding | None, ...]:
        """Return the shardings of leaves along the explicit axes of a mesh. A packed weight has none that the function knows."""
        shapes = (node.tensors[0].shape for node in self._program.family.original.graph.inputs)
        avals = [jax.typeof(x) for x in leaves]
        return tuple(sharding_of(a) if a.shape == shape else None for a, shape in zip(avals, shapes, strict=False))

    def _gradient_types(self, leaves: Sequence[Any], mesh: AbstractMesh | None) -> GradientTypes | None:
        """Return the weak types of gradients for arguments with these leaves; None if they are those of the arguments."""
        family, weak = self._program.family, tuple(map(is_weak, leaves))
        shardings = self._shardings(leaves) if mesh is not None else (None,) * len(leaves)
        if (key := (weak, mesh, shardings)) not in self._gradients:
            compute = partial(gradients_are_weak, family.fn, family.original, weak, shardings)
            unlike = may_be_unlike_arguments(family.original, weak)
            self._gradients[key] = GradientTypes(compute) if unlike else None
        return self._gradients[key]


def _strong(x: Any, gradients: GradientTypes | None, number: int) -> Any:
    """Return an argument leaf without a weak type, outside of the program, so that its gradient gets the function's own type."""
    is_differentiable = isinstance(x, Tracer) and jnp.issubdtype(x.dtype, jnp.inexact)
    return without_weak_type(x, gradients, number) if gradients is not None and is_differentiable else with_weak_type(x, False)
