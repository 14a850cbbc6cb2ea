"""Steps of a plan whose pipeline does not drain between them (2BW): the caller passes the in-flight state from step to step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import jax.core

from unity.base.errors import PlanError
from unity.exec.context import automatic
from unity.exec.two_buffered_weights import Streamed
from unity.pcg.capture.gradient_types import gradients_are_weak, may_be_unlike_arguments
from unity.pcg.jaxprs.weak_types import with_weak_type
from unity.pcg.parallel.stages import TWO_BW
from unity.plan.call_arguments import checked
from unity.plan.device_mesh import graph_on
from unity.plan.effects import run_effects

if TYPE_CHECKING:
    from unity.plan.plan import Plan


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Flight:
    """The in-flight state between two steps: micro-batches of the last batch, and the weights with which that batch began.

    `Stream.step` and `Stream.finish` take it and donate its arrays, so that it can be used only once.
    """

    arrays: tuple[jax.Array, ...]


class Stream:
    """The steps of a plan with a 2BW pipeline, which does not drain between them.

        stream = Stream(plan)
        flight = stream.start(params, batch)
        for batch in batches:
            flight, (loss, gradients) = stream.step(flight, params, batch)  # of the batch before
            params = update(params, gradients)
        loss, gradients = stream.finish(flight)

    The loss and the gradients of a batch are taken at the weights that were passed with it, which are one version older than the
    weights that the gradients are applied to. All three methods may be called inside of `jax.jit`.
    """

    def __init__(self, plan: Plan) -> None:
        captured, pipelining = plan.program.family.captured, plan.program.pipelining
        if pipelining is None or pipelining.schedule.kind != TWO_BW:
            raise PlanError(
                f"{plan.__name__} has no pipeline by 2BW, so its steps are those of `jax.value_and_grad`: ask for one with"
                " pipeline=unity.PipelineShape(stages, micro_batches, '2bw') (docs: pipelines#2bw)"
            )
        if plan.program.packing:
            raise PlanError(
                f"{plan.__name__} has packed weights, which are not known to `stream`: plan without pack=True (docs: pipelines#2bw)"
            )
        self._plan, self._captured = plan, captured

    def start(self, *args: Any) -> Flight:
        """Begin the first batch. The arguments are those of the planned function."""
        return Flight(tuple(self._start(self._leaves(args))))

    def step(self, flight: Flight, *args: Any) -> tuple[Flight, tuple[Any, Any]]:
        """Begin a batch, and finish the previous one. The arguments are those of the planned function.

        Returns:
            the new flight, and the pair (result, gradients) of the previous batch, as from `jax.value_and_grad`.
        """
        arrays, results, gradients = self._step(self._arrays(flight), self._leaves(args))
        return Flight(tuple(arrays)), self._named(results, gradients)

    def finish(self, flight: Flight) -> tuple[Any, Any]:
        """Finish the last batch, and return its result and gradients."""
        return self._named(*self._finish(self._arrays(flight)))

    @cached_property
    def _steps(self) -> Streamed:
        mesh = self._plan.inspect.mesh
        return Streamed(graph_on(self._plan.program, mesh), automatic(mesh), tuple(sorted(self._captured.differentiated)))

    @cached_property
    def _start(self) -> Any:
        return jax.jit(self._steps.start)

    @cached_property
    def _step(self) -> Any:
        return jax.jit(self._with_effects(self._steps.step, 1), donate_argnums=0)

    @cached_property
    def _finish(self) -> Any:
        return jax.jit(self._with_effects(self._steps.finish, 0), donate_argnums=0)

    def _with_effects(self, step: Callable[..., tuple], position: int) -> Callable[..., tuple]:
        """Return a step with the effects of its function, which read the results at a position of what it returns."""

        def run(*args: Any) -> tuple:
            out = step(*args)
            run_effects(out[position], self._captured, self._plan.program.pcg, automatic(self._plan.inspect.mesh))
            return out

        return run

    def _arrays(self, flight: Flight) -> list[jax.Array]:
        """Return a flight's arrays. Raises PlanError if it is of another plan, or was used before."""
        name, expected = self._plan.__name__, [(x.shape, x.dtype) for x in self._steps.flight]
        if not isinstance(flight, Flight) or [(x.shape, x.dtype) for x in flight.arrays] != expected:
            raise PlanError(
                f"expected a Flight of {name}'s own stream, as its `stream.start` and `stream.step` return, got"
                f" {'one of another plan' if isinstance(flight, Flight) else type(flight).__name__} (docs: pipelines#2bw)"
            )
        if any(not isinstance(x, jax.core.Tracer) and x.is_deleted() for x in flight.arrays):
            raise PlanError(
                f"this flight of {name} is used up: a step takes one and gives the next:"
                " flight, (loss, gradients) = stream.step(flight, ...) (docs: pipelines#2bw)"
            )
        return list(flight.arrays)

    def _leaves(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        leaves = checked(self._plan.__name__, self._captured, self._plan.program.packing, args)
        if not any(isinstance(x, jax.core.Tracer) for x in leaves):
            leaves = self._plan.shard.placement_on(None).leaves(leaves, depth=4)
        return (*leaves, *self._plan.shard.constants)

    def _named(self, results: Sequence[Any], gradients: Sequence[Any]) -> tuple[Any, Any]:
        """Return results as the function's pytree, and gradients as its differentiated arguments': one, or a tuple of several."""
        captured, pairs = self._captured, zip(sorted(self._captured.differentiated), gradients, strict=True)
        of = {k: with_weak_type(g, self._weak_gradients[k]) for k, g in pairs}
        results = list(map(with_weak_type, results, captured.weak[1]))
        numbers = jax.tree.unflatten(captured.in_tree, list(range(len(captured.paths))))
        trees = [jax.tree.map(of.__getitem__, arg) for arg in numbers if set(jax.tree.leaves(arg)) & set(of)]
        return jax.tree.unflatten(captured.out_tree, results), trees[0] if len(trees) == 1 else tuple(trees)

    @cached_property
    def _weak_gradients(self) -> tuple[bool, ...]:
        """For every argument leaf, whether the function's own gradient is weakly typed."""
        family = self._plan.program.family
        weak = family.original.weak[0]
        if not may_be_unlike_arguments(family.original, weak):
            return weak
        return gradients_are_weak(family.fn, family.original, weak, (None,) * len(weak))
