"""2BW as it runs: steps of a pipeline that does not drain between them (PipeDream-2BW).

A step takes a batch, and what of the batch before is still on its way, its *flight*. In its M ticks the micro-batches of the new
batch begin, and those of the old one end; so it gives the results and the gradients of the old batch, and the flight of the new.

    stage 0   f0 b-2  f1 b-1  f2 b0  f3 b1      M = 4, S = 3: ticks 0 to 3 of a step. Micro-batches -2 and -1 are of the batch
                                                before; 2 and 3 go back in the next step, and then are -2 and -1.

Every pass of a micro-batch finds the weights with which its batch came. So gradients are those of one batch, at one version of the
weights, and two versions are held: w(t+1) = w(t) - lr * gradient(w(t-1), batch t-1), if gradients are applied as they come.

What leads to the pipeline runs on the new batch, and what its backward pass needs is part of the flight; then it runs backward for
the old batch, after what follows the tail. So each runs once in a step, as in any other. A step is no function that JAX could
differentiate: its pullbacks are called here.

The old batch's weights have their gradients after S - 1 ticks: the loop is in two (`unity.exec.pipelines.cool_down`), so that these
are sent while the rest of the ticks goes on."""

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
from unity.exec.pipelines.cool_down import Homeward
from unity.exec.pipelines.gpipe import Arrays
from unity.exec.pipelines.guarded import Pullback, Zeros, zeros_of
from unity.exec.pipelines.half_ticks import Batch, Loop, State, batch_of
from unity.exec.pipelines.one_forward_one_backward import scaled
from unity.pcg.ir.gradient_flow import gradients
from unity.pcg.ir.graph import PCG
from unity.pcg.parallel.pipeline_cut import Cut, cut
from unity.pcg.parallel.stages import schedule_of
from unity.pcg.types.varying_axes import vary, varying


class _Flight(NamedTuple):
    """What is on its way after a step, on one device: what the passes that are left find, what the backward pass of what leads to
    the pipeline needs beside that, the inputs of what follows the tail, and where micro-batches are."""

    batch: Batch
    kept: Arrays
    read: Arrays
    state: State


class _Begun(NamedTuple):
    """What leads to the pipeline has run: the batch as the pipeline finds it, and the rest of its flight."""

    batch: Batch
    kept: Arrays
    read: Arrays


@dataclass(frozen=True, eq=False)
class Streamed:
    """The steps of a graph with a pipeline by 2BW, on whole arrays. `weights`: the inputs that are differentiated, by number."""

    graph: PCG
    mesh: Mesh | AbstractMesh
    weights: tuple[int, ...]

    def start(self, leaves: Sequence[Any]) -> Any:
        """The flight of a first batch."""

        def local(pieces: Arrays) -> Any:
            return self._lifted(self.local.started(pieces))

        return self._mapped(local, (self._into,), self._specs)(self._placed(leaves))

    def step(self, flight: Any, leaves: Sequence[Any]) -> tuple[Any, Any, Any]:
        """The flight of a new batch; of the one before, the results and the gradients of the weights."""

        def local(arrays: Any, pieces: Arrays) -> Any:
            flight, results, found = self.local.stepped(self._landed(arrays), pieces)
            return self._lifted(flight), results, found

        into, out = (self._specs, self._into), (self._specs, *self._out)
        return self._mapped(local, into, out)(flight, self._placed(leaves))

    def finish(self, flight: Any) -> tuple[Any, Any]:
        """The results and the gradients of the last batch."""

        def local(arrays: Any) -> Any:
            return self.local.finished(self._landed(arrays))

        return self._mapped(local, (self._specs,), self._out)(flight)

    def traced(self) -> Any:
        """A step, traced: of a flight and leaves, the gradients, the results, and the new flight."""

        def local(arrays: Any, pieces: Arrays) -> Any:
            flight, results, found = self.local.stepped(self._landed(arrays), pieces)
            return found, results, self._lifted(flight)

        run = self._mapped(local, (self._specs, self._into), (*self._out[::-1], self._specs))
        return jax.make_jaxpr(run)(self.flight, tuple(n.tensors[0].struct for n in self.graph.inputs))

    @cached_property
    def flight(self) -> list[jax.ShapeDtypeStruct]:
        """The arrays of a flight."""
        sizes = dict(zip(self.mesh.axis_names, self.mesh.axis_sizes, strict=True))
        return [jax.ShapeDtypeStruct((prod(sizes[name] for name in z.names), *z.shape), z.dtype) for z in self._layout[0]]

    @cached_property
    def local(self) -> _Local:
        """One device's part of it."""
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
        """What a flight is made of, on one device, and how."""
        found: list[tuple[list[Zeros], Any]] = []

        def look(pieces: Arrays) -> tuple[()]:
            leaves, tree = jax.tree.flatten(self.local.started(pieces))
            found.append(([zeros_of(x) for x in leaves], tree))
            return ()

        jax.eval_shape(self._mapped(look, (self._into,), ()), tuple(n.tensors[0].struct for n in self.graph.inputs))
        return found[-1]

    @cached_property
    def _specs(self) -> list[PartitionSpec]:
        """How a flight lies outside: the pieces of devices side by side along a first dimension, where they differ."""
        named = [tuple(name for name in self.mesh.axis_names if name in z.names) for z in self._layout[0]]
        return [PartitionSpec(names or None) for names in named]

    def _lifted(self, flight: _Flight) -> list[Any]:
        return [x[None] for x in jax.tree.leaves(flight)]

    def _landed(self, arrays: Sequence[Any]) -> _Flight:
        return jax.tree.unflatten(self._layout[1], [x[0] for x in arrays])


@dataclass(frozen=True, eq=False)
class _Local:
    """The same on one device's pieces; called inside `shard_map`."""

    graph: PCG
    cut: Cut
    weights: tuple[int, ...]

    @cached_property
    def pair(self) -> Any:
        return pair_of(self.cut.tail)

    @cached_property
    def flowing(self) -> tuple[frozenset[int], tuple[bool, ...]]:
        """Where gradients flow: to which operands of the pair, and to which of what stages hand on."""
        flow = gradients(self.graph, self.weights)
        return self.pair.moving(frozenset(k for k, v in enumerate(self.pair.operands) if flow(v)))

    def loop(self, *batches: tuple[int, Batch]) -> Loop:
        return Loop(self.pair, batches, schedule_of(self.cut.pipeline), *self.flowing)

    def started(self, pieces: Sequence[Any]) -> _Flight:
        begun, _ = self.begin(pieces)
        loop = self.loop((0, begun.batch))
        return self.flown(begun, loop.run(loop.schedule.micro_batches))

    def stepped(self, flight: _Flight, pieces: Sequence[Any]) -> tuple[_Flight, Arrays, Arrays]:
        begun, pullback = self.begin(pieces)
        loop = self.loop((0, begun.batch), (1, flight.batch))
        done = loop.schedule.done
        state = loop.run(done, flight.state)
        rest = Homeward(loop.pair, loop.batches, loop.schedule, loop.wanted, loop.moving, loop.pullback)
        state = rest.after(state, done)
        return self.flown(begun, state), *self.end(flight, pullback, loop, state)

    def finished(self, flight: _Flight) -> tuple[Arrays, Arrays]:
        loop = self.loop((1, flight.batch))
        state = loop.run(loop.schedule.flushed.turns - loop.schedule.micro_batches, flight.state)
        pullback = Pullback()

        def begin() -> tuple[()]:
            nonlocal pullback
            pullback = self.begin([self.nothing(k) for k in range(len(self.graph.inputs))])[1]
            return ()

        jax.eval_shape(begin)  # traced to know how what is kept is put together
        return self.end(flight, pullback, loop, state)

    def nothing(self, number: int) -> Any:
        """Zeros in the place of one of the graph's inputs."""
        node, axes = self.graph.inputs[number], self.graph.axes
        shape, names = list(node.tensors[0].shape), set[str]()
        for state, axis in zip(node.types[0], axes, strict=True):
            if state.kind == "P":
                shape[state.dim] //= axis.size
                names.add(axis.name)
        return Zeros(tuple(shape), node.tensors[0].dtype, frozenset(names))()

    def begin(self, pieces: Sequence[Any]) -> tuple[_Begun, Pullback]:
        """What leads to the pipeline, forward."""
        wanted = sorted(self.flowing[0])

        def run(chosen: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            given = dict(enumerate(pieces)) | dict(zip(self.weights, chosen, strict=True))
            found = run_graph(self.cut.before, [given[k] for k in range(len(pieces))])
            return [found[k] for k in wanted], found

        _, pull, found = jax.vjp(run, [pieces[k] for k in self.weights], has_aux=True)
        batch, read = batch_of(self.pair, found), tuple(pieces[k] for k in self.cut.read)
        pullback = Pullback()
        return _Begun(batch, tuple(pullback.apart(pull, _held(batch, read))), read), pullback

    def flown(self, begun: _Begun, state: State) -> _Flight:
        """The flight of a batch, all micro-batches of which have begun."""
        return _Flight(begun.batch._replace(parts=()), begun.kept, begun.read, state._replace(sums=state.sums[:1]))

    def end(self, flight: _Flight, pullback: Pullback, loop: Loop, state: State) -> tuple[Arrays, Arrays]:
        """What follows the tail, forward and backward, and what leads to the pipeline, backward."""
        sums = state.sums[-1]
        own = [k for k, number in enumerate(self.cut.read) if number in self.weights]

        def run(chosen: Sequence[Any], loss: Any) -> tuple[Any, Arrays]:
            given = dict(enumerate((*flight.read, *sums.results))) | dict(zip(own, chosen, strict=True))
            given[len(flight.read) + self.pair.loss] = loss
            results = tuple(run_graph(self.cut.after, [given[k] for k in range(len(given))]))
            return results[0], results

        value, pull, results = jax.vjp(run, [flight.read[k] for k in own], sums.results[self.pair.loss], has_aux=True)
        direct, by = pull(vary(jnp.ones(value.shape, value.dtype), varying(value)))
        found = loop.gradients(sums)
        order = sorted(self.flowing[0])
        before = pullback.together(flight.kept, dict(enumerate(_held(flight.batch, flight.read))))
        (weights,) = before(scaled([found[k] for k in order], by, self.pair.repeated))
        more = dict(zip((self.cut.read[k] for k in own), direct, strict=True))
        return results, tuple(g + more[k] if k in more else g for k, g in zip(self.weights, weights, strict=True))


def _held(batch: Batch, read: Arrays) -> list[Any]:
    """What a flight has anyway, so that nothing is kept twice."""
    return [*batch.constants, *batch.weights, *batch.fixed, *batch.read, *read]
