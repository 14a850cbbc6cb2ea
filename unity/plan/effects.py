"""Side effects of a planned function, such as `jax.debug.print`, which run once on results of its program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from unity.exec.context import own
from unity.pcg.capture.capture import Captured
from unity.pcg.capture.observations import Observation, not_replicated
from unity.pcg.ir.graph import PCG
from unity.pcg.jaxprs.effects import INSPECT, Notice
from unity.pcg.types.parallel_type import UNUSED


def with_effects(program: Callable[..., tuple], captured: Captured, graph: PCG, mesh: Mesh) -> Callable[..., tuple]:
    """Return a plan's program with the effects of its function, and without the results that only these read."""
    count = captured.out_tree.num_leaves

    def call(*leaves: Any) -> tuple:
        results = program(*leaves)
        run_effects(results, captured, graph, mesh)
        return tuple(results[:count])

    return call if captured.observations else program


def run_effects(results: Sequence[Any], captured: Captured, graph: PCG, mesh: Mesh) -> None:
    """Run the effects of a function on the results of its program. No gradient flows through them."""
    with own(mesh):
        for observation in captured.observations:
            if runs(observation, graph):
                values = [lax.stop_gradient(results[k]) for k in observation.results]
                observation.run(values if observation.name == INSPECT else [_replicated(x, mesh) for x in values])


def _replicated(x: Any, mesh: Mesh) -> Any:
    """Return a small value on all devices, since XLA moves none from several to the one that runs an effect."""
    return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec()))


def runs(observation: Observation, graph: PCG) -> bool:
    """Return whether a plan runs an effect: unless it would have to gather large values for it."""
    replicated = all(s == UNUSED for k in observation.results for s in graph.outputs[k].type)
    return replicated or not observation.large or observation.name == INSPECT


def dropped_effects(captured: Captured, graph: PCG) -> list[Notice]:
    """Return the notices about effects that a plan does not run, since it divides what they read."""
    return [not_replicated(o) for o in captured.observations if not runs(o, graph)]
