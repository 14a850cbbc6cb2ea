"""2BW (PipeDream-2BW): steps of a pipeline that does not drain between them.

A step takes a new batch and the *flight* of the batch before: all of that batch's arrays that are still in flight. In the step's M
ticks the micro-batches of the new batch begin and those of the old one end, so it returns the results and gradients of the old
batch, and the flight of the new one.

    stage 0   f0 b-2  f1 b-1  f2 b0  f3 b1      M = 4, S = 3: ticks 0 to 3 of a step. Micro-batches -2 and -1 are of the batch
                                                before; 2 and 3 go back in the next step, and then are -2 and -1.

Every pass of a micro-batch uses the weights that came with its batch. Gradients are thus those of one batch at one version of the
weights, and two versions are live: w(t+1) = w(t) - lr * gradient(w(t-1), batch t-1), if gradients are applied as they come.

The operators before the pipeline run forward on the new batch, and their residuals are part of its flight; they run backward for
the old batch, after the operators that follow the tail. Each runs once in a step, as without 2BW. JAX cannot differentiate such a
step: its pullbacks are called here.

The gradients of the old batch's weights are complete after S - 1 ticks. The loop is split there (`_CoolDown`), so that their
collectives overlap with the rest of the ticks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from unity.exec.context import own
from unity.exec.lowering import pair_of, run_graph, spec_of
from unity.exec.pipelines.gpipe import Arrays
from unity.exec.pipelines.guarded import Pullback, Zeros, zeros_of
from unity.exec.pipelines.half_ticks import ActiveValues, Batch, BatchSums, HalfTickLoop, LoopState, batch_of
from unity.exec.pipelines.one_forward_one_backward import scaled
from unity.pcg.ir.gradient_flow import gradients
from unity.pcg.ir.graph import PCG, Value
from unity.pcg.parallel.pipeline_cut import Cut, cut
from unity.pcg.parallel.stages import schedule_of
from unity.pcg.types.accumulation import storage_dtype
from unity.pcg.types.varying_axes import vary, varying


class _Flight(NamedTuple):
    """Everything of a batch that is in flight after a step, on one device."""

    batch: Batch  # the operands of the pipeline and its tail
    residuals: Arrays  # residuals of the operators before the pipeline that are not among these operands
    read: Arrays  # inputs of the operators after the tail
    state: LoopState  # the carry of the loop over ticks


class _Begun(NamedTuple):
    """A batch after the operators before the pipeline have run: the operands of the pair, and the rest of its flight."""

    batch: Batch
    residuals: Arrays
    read: Arrays


class _CoolDown(HalfTickLoop):
    """The ticks after the last backward pass of the batch before, of which only the samples' gradients are still in flight.

    With S stages, that pass is over after S - 1 ticks, on stage 0. The gradients of that batch's weights are then complete, so the
    carry of these ticks does not contain them, and their collectives may overlap with these ticks.
    """

    def after(self, state: LoopState, ticks: int) -> LoopState:
        """Run the rest of a step's ticks, of which the first `ticks` are over."""
        new, old = state.sums
        left = BatchSums((), (), old.parts, (), (), old.read)
        state = self.run_ticks(state._replace(sums=(new, left)), range(ticks, self.schedule.loop_ticks))
        new, left = state.sums
        return state._replace(sums=(new, old._replace(parts=left.parts, read=left.read)))

    @cached_property
    def newest(self) -> HalfTickLoop:
        """The loop of the new batch alone."""
        return HalfTickLoop(self.pair, self.batches[:1], self.schedule, self.active, self.pullback, self.results)

    def run_stage(self, s: LoopState, at: Any) -> tuple[Arrays, LoopState]:
        results, after = self.newest.run_stage(s._replace(sums=s.sums[:1]), at)
        return results, after._replace(sums=(*after.sums, *s.sums[1:]))

    def run_tail(self, s: LoopState, at: Any, results: Arrays) -> tuple[LoopState, tuple[Arrays, Arrays]]:
        after, gradients = self.newest.run_tail(s._replace(sums=s.sums[:1]), at, results)
        return after._replace(sums=(*after.sums, *s.sums[1:])), gradients


@dataclass(frozen=True, eq=False)
class Streamed:
    """The steps of a graph with a 2BW pipeline, on whole arrays. `weights` are the differentiated inputs, by number."""

    graph: PCG
    mesh: Mesh | AbstractMesh
    weights: tuple[int, ...]

    def start(self, leaves: Sequence[Any]) -> Any:
        """Return the flight of a first batch."""

        def local(pieces: Arrays) -> Any:
            return self._with_leading_dim(self.local.start(pieces))

        return self._mapped(local, (self._into,), self._specs)(self._placed(leaves))

    def step(self, flight: Any, leaves: Sequence[Any]) -> tuple[Any, Any, Any]:
        """Return the flight of a new batch, and the results and the weights' gradients of the batch before."""

        def local(arrays: Any, pieces: Arrays) -> Any:
            flight, results, gradients = self.local.step(self._without_leading_dim(arrays), pieces)
            return self._with_leading_dim(flight), results, gradients

        into, out = (self._specs, self._into), (self._specs, *self._out)
        return self._mapped(local, into, out)(flight, self._placed(leaves))

    def finish(self, flight: Any) -> tuple[Any, Any]:
        """Return the results and the gradients of the last batch."""

        def local(arrays: Any) -> Any:
            return self.local.finish(self._without_leading_dim(arrays))

        return self._mapped(local, (self._specs,), self._out)(flight)

    @cached_property
    def flight(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes and types of a flight's arrays."""
        sizes = dict(zip(self.mesh.axis_names, self.mesh.axis_sizes, strict=True))
        return [jax.ShapeDtypeStruct((prod(sizes[name] for name in z.names), *z.shape), z.dtype) for z in self._layout[0]]

    @cached_property
    def local(self) -> _Local:
        """The steps on one device's pieces."""
        return _Local(self.graph, cut(self.graph), self.weights)

    def _mapped(self, local: Any, into: Any, out: Any) -> Any:
        mapped = jax.shard_map(local, mesh=self.mesh, in_specs=into, out_specs=out)

        def run(*arrays: Any) -> Any:
            with own(self.mesh):
                return mapped(*arrays)

        return run

    def _placed(self, leaves: Sequence[Any]) -> Arrays:
        each = zip(leaves, self._into, strict=True)
        with own(self.mesh):
            return tuple(lax.with_sharding_constraint(x, NamedSharding(self.mesh, s)) for x, s in each)

    @cached_property
    def _into(self) -> tuple[PartitionSpec, ...]:
        return tuple(spec_of(n.types[0], self.graph.axes, n.tensors[0].ndim) for n in self.graph.inputs)

    @cached_property
    def _out(self) -> tuple[Any, Any]:
        results = tuple(spec_of(v.type, self.graph.axes, v.tensor.ndim) for v in self.graph.outputs)
        return results, tuple(self._into[k] for k in self.weights)

    @cached_property
    def _layout(self) -> tuple[list[Zeros], Any]:
        """A flight on one device: zeros that stand for its leaves, and its structure."""
        layouts: list[tuple[list[Zeros], Any]] = []

        def look(pieces: Arrays) -> tuple[()]:
            leaves, tree = jax.tree.flatten(self.local.start(pieces))
            layouts.append(([zeros_of(x) for x in leaves], tree))
            return ()

        jax.eval_shape(self._mapped(look, (self._into,), ()), tuple(n.tensors[0].struct for n in self.graph.inputs))
        return layouts[-1]

    @cached_property
    def _specs(self) -> list[PartitionSpec]:
        """Specifications of a flight's arrays outside of `shard_map`: varying pieces are concatenated along a new dimension 0."""
        named = [tuple(name for name in self.mesh.axis_names if name in z.names) for z in self._layout[0]]
        return [PartitionSpec(names or None) for names in named]

    def _with_leading_dim(self, flight: _Flight) -> list[Any]:
        return [x[None] for x in jax.tree.leaves(flight)]

    def _without_leading_dim(self, arrays: Sequence[Any]) -> _Flight:
        return jax.tree.unflatten(self._layout[1], [x[0] for x in arrays])


@dataclass(frozen=True, eq=False)
class _Local:
    """The steps on one device's pieces, called inside of `shard_map`."""

    graph: PCG
    cut: Cut
    weights: tuple[int, ...]

    @cached_property
    def pair(self) -> Any:
        return pair_of(self.cut.tail)

    @cached_property
    def active(self) -> ActiveValues:
        """The values of the pair that are active for differentiation."""
        flow = gradients(self.graph, self.weights)
        return self.pair.active(frozenset(k for k, v in enumerate(self.pair.operands) if flow(v)))

    def loop(self, *batches: tuple[int, Batch]) -> HalfTickLoop:
        return HalfTickLoop(self.pair, batches, schedule_of(self.cut.pipeline), self.active)

    def start(self, pieces: Sequence[Any]) -> _Flight:
        """Begin a first batch, and return its flight."""
        begun, _ = self.run_before(pieces)
        loop = self.loop((0, begun.batch))
        return self.flight_of(begun, loop.run(loop.schedule.micro_batches))

    def step(self, flight: _Flight, pieces: Sequence[Any]) -> tuple[_Flight, Arrays, Arrays]:
        """Begin a new batch and end the one in flight. Return the new flight, and the old batch's results and gradients."""
        begun, pullback = self.run_before(pieces)
        loop = self.loop((0, begun.batch), (1, flight.batch))
        done = loop.schedule.backward_ticks
        state = loop.run(done, flight.state)
        rest = _CoolDown(loop.pair, loop.batches, loop.schedule, loop.active, loop.pullback)
        state = rest.after(state, done)
        return self.flight_of(begun, state), *self.run_after(flight, pullback, loop, state)

    def finish(self, flight: _Flight) -> tuple[Arrays, Arrays]:
        """End the batch in flight, and return its results and gradients."""
        loop = self.loop((1, flight.batch))
        state = loop.run(loop.schedule.flushed.loop_ticks - loop.schedule.micro_batches, flight.state)
        pullback = Pullback()

        def begin() -> tuple[()]:
            nonlocal pullback
            pullback = self.run_before([self.zero_input(k) for k in range(len(self.graph.inputs))])[1]
            return ()

        jax.eval_shape(begin)  # traced so that the structure of the pullback is known
        return self.run_after(flight, pullback, loop, state)

    def stored(self, v: Value) -> Any:
        """Return the element type of a value's local piece."""
        return storage_dtype(v.tensor.dtype, v.type, self.graph.axes)

    def zero_input(self, number: int) -> Any:
        """Return zeros that stand for one of the graph's inputs."""
        node, axes = self.graph.inputs[number], self.graph.axes
        shape, names = list(node.tensors[0].shape), set[str]()
        for state, axis in zip(node.types[0], axes, strict=True):
            if state.kind == "P":
                shape[state.dim] //= axis.size
                names.add(axis.name)
        return Zeros(tuple(shape), node.tensors[0].dtype, frozenset(names))()

    def run_before(self, pieces: Sequence[Any]) -> tuple[_Begun, Pullback]:
        """Run the operators before the pipeline forward."""
        active = sorted(self.active.operands)

        def run(chosen: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            leaves = dict(enumerate(pieces)) | dict(zip(self.weights, chosen, strict=True))
            operands = run_graph(self.cut.before, [leaves[k] for k in range(len(pieces))])
            return [operands[k] for k in active], operands

        _, pull, operands = jax.vjp(run, [pieces[k] for k in self.weights], has_aux=True)
        batch, read = batch_of(self.pair, operands), tuple(pieces[k] for k in self.cut.read)
        pullback = Pullback()
        return _Begun(batch, tuple(pullback.split(pull, _shared(batch, read))), read), pullback

    def flight_of(self, begun: _Begun, state: LoopState) -> _Flight:
        """Return the flight of a batch whose micro-batches have all begun."""
        return _Flight(begun.batch._replace(parts=()), begun.residuals, begun.read, state._replace(sums=state.sums[:1]))

    def run_after(self, flight: _Flight, pullback: Pullback, loop: HalfTickLoop, state: LoopState) -> tuple[Arrays, Arrays]:
        """Run the operators after the tail, forward and backward, and those before the pipeline backward."""
        sums = state.sums[-1]
        totals = loop.sums_of_results(sums)
        own = [k for k, number in enumerate(self.cut.read) if number in self.weights]

        def run(chosen: Sequence[Any], loss: Any) -> tuple[Any, Arrays]:
            leaves = dict(enumerate((*flight.read, *totals))) | dict(zip(own, chosen, strict=True))
            leaves[len(flight.read) + self.pair.loss] = loss
            results = tuple(run_graph(self.cut.after, [leaves[k] for k in range(len(leaves))]))
            return results[0], results

        value, pull, results = jax.vjp(run, [flight.read[k] for k in own], totals[self.pair.loss], has_aux=True)
        direct, by = pull(vary(jnp.ones(value.shape, value.dtype), varying(value)))
        gradients = loop.gradients(sums)
        order = sorted(self.active.operands)
        before = pullback.join(flight.residuals, dict(enumerate(_shared(flight.batch, flight.read))))
        each = zip(order, scaled([gradients[k] for k in order], by, self.pair.replicated_axes), strict=True)
        (weights,) = before([g.astype(self.stored(self.pair.operands[k])) for k, g in each])
        more = dict(zip((self.cut.read[k] for k in own), direct, strict=True))
        return results, tuple(g + more[k] if k in more else g for k, g in zip(self.weights, weights, strict=True))


def _shared(batch: Batch, read: Arrays) -> list[Any]:
    """Return the arrays that a flight has anyway, so that no residual repeats one."""
    return [*batch.constants, *batch.weights, *batch.fixed, *batch.read, *read]
