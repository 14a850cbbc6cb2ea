"""One step of a parallel graph on a mesh, as plain data, from which a plan is compiled, checked and timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding

from unity.base.errors import OptionError
from unity.exec.lowering import partitioned_program, platform_of, program, spec_of
from unity.exec.two_buffered_weights import Streamed
from unity.pcg.ir.gradient_flow import losses
from unity.pcg.ir.graph import PCG
from unity.pcg.jaxprs.trace_contexts import precision_of, without_mesh
from unity.pcg.parallel.pipeline_cut import undrained
from unity.search.cost.cost import Training
from unity.search.cost.state_sizes import StateMemory
from unity.search.memory.backend import CPU, GPU, Backend

# The first pass joins all-reduces, so that all gradients are live at once. The second drops the barriers of `jax.checkpoint`, so
# that values are kept that should be recomputed. The third gives small loops to an emitter that lacks barriers, and crashes.
DISABLED_PASSES = ("cpu-all-reduce-combiner", "cse_barrier_expander", "small-while-loop-hoisting")


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """A step of a plan: the function and, with `training.backward`, the gradients of its loss.

    Attributes:
        graph: the parallel graph.
        mesh: the devices, as a mesh of the graph's axes.
        differentiated: the inputs that gradients are taken for, by number; none without a backward pass.
        training: whether there is a backward pass, and the optimizer's slots.
        partitioned: whether XLA partitions it by sharding constraints (`unity.exec.sharding_constraints`).
        ties: whether it computes the gradients of a product together on GPUs (`unity.exec.tied_gradients`).
    """

    graph: PCG
    mesh: Mesh
    differentiated: frozenset[int]
    training: Training
    partitioned: bool = False
    ties: bool = False

    @property
    def backend(self) -> Backend:
        """The properties of the compiler for the mesh's devices."""
        return CPU if platform_of(self.mesh) == CPU.name else GPU

    @property
    def without_update(self) -> Training:
        """The training with all of the optimizer's state on the device, since a gradient step has no update that fetches any."""
        return replace(self.training, state=replace(self.training.state, memory=StateMemory.DEVICE))

    @property
    def weights(self) -> list[int]:
        """The differentiated inputs that have gradients, ascending."""
        return [k for k in sorted(self.differentiated) if self.graph.inputs[k].tensors[0].floating]

    @cached_property
    def shardings(self) -> tuple[NamedSharding, ...]:
        """The sharding of every input."""
        axes = self.graph.axes
        return tuple(NamedSharding(self.mesh, spec_of(n.types[0], axes, n.tensors[0].ndim)) for n in self.graph.inputs)

    @property
    def structs(self) -> list[jax.ShapeDtypeStruct]:
        """Shape, element type and sharding of every input."""
        tensors = [n.tensors[0] for n in self.graph.inputs]
        return [jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=s) for t, s in zip(tensors, self.shardings, strict=True)]

    def grouped(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the inputs as the compiled program takes them: with a backward pass, the weights and the others as two lists."""
        if not self.training.backward:
            return list(leaves)
        weights = self.weights
        return [[leaves[k] for k in weights], [x for k, x in enumerate(leaves) if k not in weights]]

    def compile(self, options: Mapping[str, str | bool] | None = None) -> Any:
        """Compile the step, with `options` of XLA beside those of `compiler_options`. Nothing is allocated.

        The program takes `grouped` inputs, or for a 2BW pipeline a flight and all inputs.
        """
        options = {**compiler_options(platform_of(self.mesh)), **(options or {})}
        with without_mesh(), precision_of(self.structs):
            if self.training.backward and undrained(self.graph) and not self.partitioned:
                streamed = Streamed(self.graph, self.mesh, tuple(sorted(self.differentiated)))
                step = jax.jit(streamed.step, donate_argnums=0)
                return step.lower(streamed.flight, tuple(self.structs)).compile(compiler_options=options)
            lower = partitioned_program if self.partitioned else partial(program, ties=self.ties)
            run = jax.jit(lower(self.graph, self.mesh))
            if self.training.backward:
                step = gradient_step(run, len(self.structs), self.weights, losses(self.graph))
                return self._differentiated(step).compile(compiler_options=options)
            return jax.jit(run).lower(*self.structs).compile(compiler_options=options)

    def _differentiated(self, step: Callable[..., Any]) -> Any:
        """Return the lowered step. Raises OptionError if the function has no derivative in JAX."""
        try:
            return jax.jit(step).lower(*self.grouped(self.structs))
        except (ValueError, NotImplementedError) as error:
            if isinstance(error, ValueError) and not str(error).startswith("Reverse-mode differentiation does not work"):
                raise
            raise OptionError(
                f"the step of this plan has a backward pass, but JAX cannot differentiate the function: {error}\n    Plan with"
                " training=False what is never differentiated. (docs: plan#options)"
            ) from error


def gradient_step(
    run: Callable[..., Any], count: int, weights: Sequence[int], losses: Sequence[int]
) -> Callable[[list, list], Any]:
    """Return a function of the weights and the other leaves that gives the weights' gradients and all results of `run`.

    Args:
        run: the function of all leaves.
        count: the number of leaves.
        weights: the leaves that gradients are taken for, by number.
        losses: the results, by number, whose sum is differentiated.
    """
    position = {k: i for i, k in enumerate(weights)}

    def step(chosen: list, others: list) -> Any:
        def scalar(chosen: list) -> Any:
            rest = iter(others)
            leaves = [chosen[position[k]] if k in position else next(rest) for k in range(count)]
            results = run(*leaves)
            sums = [jnp.sum(jnp.real(_with_opaque_cotangent(results[k]))) for k in losses]
            widest = max((s.dtype for s in sums), key=lambda dtype: dtype.itemsize)  # JAX promotes no float of 8 bits
            return sum(s.astype(widest) for s in sums), results

        return jax.grad(scalar, has_aux=True)(chosen)

    return step


@jax.custom_vjp
def _with_opaque_cotangent(result: jax.Array) -> jax.Array:
    """Return a result unchanged, with its cotangent hidden from the compiler.

    The step differentiates a sum of the results, so that their cotangents are ones. A compiler that sees constants drops the
    collectives that move them, but cotangents are data in the steps that this one stands for. The cotangent of a scalar, a loss, is
    one in every step, and is not hidden.
    """
    return result


_with_opaque_cotangent.defvjp(
    lambda result: (result, None), lambda _, cotangent: (lax.optimization_barrier(cotangent) if cotangent.ndim else cotangent,)
)


def compiler_options(platform: str | None = None) -> dict[str, str | bool]:
    """Return the options with which programs are compiled for a comparison: on CPUs without the `DISABLED_PASSES`.

    `platform` is by default that of this process's devices.
    """
    platform = platform or jax.devices()[0].platform
    return {"xla_disable_hlo_passes": ",".join(DISABLED_PASSES)} if platform == CPU.name else {}
