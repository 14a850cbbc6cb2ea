"""Execution of branches: every device runs the branches of its group, by its index along the groups' axes.

Every device returns all results, with zeros for other groups' branches. All operands are made to vary along these axes before the
switch, so that their gradients are summed after it, where all devices take part. Gradients that are zero on all devices, such as
those of operands behind a `stop_gradient`, are symbolic zeros to JAX, which are not summed.

The gradient is a switch, too. That of `lax.switch` would return, from every branch, the residuals of all branches. Here the groups
share buffers for their residuals (`_Buffers`), and operands are not stored as residuals. Neither are a group's slices of packed
weights (`_Slices`), which the backward pass takes out again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from unity.exec.pipelines.guarded import Pullback, Zeros, zeros_of
from unity.pcg.capture.group_slots import is_part
from unity.pcg.ir.gradient_flow import gradients
from unity.pcg.ir.graph import PCG, Node, Value, reserved_axes
from unity.pcg.local import varying_loops as loops
from unity.pcg.parallel.branches import Group, groups_of, packed_of
from unity.pcg.types.accumulation import storage_dtype
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import UNUSED, local_shape
from unity.pcg.types.varying_axes import vary, varying

Run = Callable[[PCG, Sequence[Any]], Sequence[Any]]  # runs a graph on one device's pieces
Arrays = list[Any]


def branched(node: Node, operands: Sequence[Any], run: Run, axes: tuple[Axis, ...]) -> Arrays:
    """Run branches on one device's pieces, inside of `shard_map`."""
    assert node.inside is not None
    packed, names = packed_of(node), reserved_axes(node)
    pieces = [x[0] if p in packed else x for p, x in enumerate(operands)]
    results = []
    for v in node.inside.outputs:
        along = frozenset(a.name for a, s in zip(axes, v.type, strict=True) if s != UNUSED) | set(names)
        own = storage_dtype(v.tensor.dtype, v.type, axes)
        results.append(Zeros(local_shape(v.tensor.shape, v.type, axes), own, frozenset(along)))
    real = {k: zeros_of(x) for k, x in enumerate(pieces) if jnp.issubdtype(x.dtype, jnp.inexact)}
    cases = tuple(_Case(group, _Slices.of(group, run), real, results, run) for group in groups_of(node))
    return _Switch(cases, names)(pieces)


@dataclass(frozen=True, eq=False)
class _Case:
    """One group's branches, and their gradient.

    Methods take the differentiated operands as `values`, in order, and the others as `rest`, by position.

    Attributes:
        group: the group's graph.
        slices: the group's slices of packed weights.
        real: zeros that stand for the floating-point operands, by position, which are differentiated.
        results: zeros that stand for the results of all groups.
        run: runs a graph on one device's pieces.
        pullback: the structure of the group's pullback.
    """

    group: Group
    slices: _Slices
    real: Mapping[int, Zeros]
    results: Sequence[Zeros]
    run: Run
    pullback: Pullback = field(default_factory=Pullback)

    @property
    def slots(self) -> list[int]:
        """The packed weights that the group has slices of, by their index among `values`."""
        places = {k: n for n, k in enumerate(self.real)}
        return [places[k] for k in self.slices.slots]

    @property
    def floating_results(self) -> list[int]:
        """The group's floating-point results, which are differentiated."""
        return [k for k in self.group.results if jnp.issubdtype(self.results[k].dtype, jnp.inexact)]

    def outputs(self, values: Sequence[Any], rest: Mapping[int, Any], slices: Sequence[Any] | None = None) -> Arrays:
        """Return all results, with zeros for other groups. `slices` are those of packed weights, if they are already taken."""
        slices = self.take_slices(values) if slices is None else slices
        whole = {**rest, **dict(zip(self.real, values, strict=True))}
        operands = [*(whole[k] for k in range(len(whole))), *slices]
        own = dict(zip(self.group.results, self.run(self.slices.rest(self.group.graph), operands), strict=True))
        return [vary(own[k], piece.names) if k in own else piece() for k, piece in enumerate(self.results)]

    def take_slices(self, values: Sequence[Any]) -> Arrays:
        """Take the group's slices out of the packed weights."""
        return self.slices.take(*(values[k] for k in self.slots))

    def with_residuals(self, values: Arrays, rest: dict[int, Any]) -> tuple[Arrays, Arrays]:
        """Return all results, and the residuals other than operands."""

        def differentiable(values: Arrays, slices: Arrays) -> tuple[Arrays, Arrays]:
            outputs = self.outputs(values, rest, slices)
            return [outputs[k] for k in self.floating_results], outputs

        slices = self.take_slices(values)
        _, pull, outputs = jax.vjp(differentiable, values, slices, has_aux=True)
        return outputs, self.pullback.split(pull, [*values, *rest.values(), *slices])

    def active(self, results: Collection[int]) -> frozenset[int]:
        """Return the operands, by position, that have a gradient if these results of the operator have a cotangent."""
        graph = self.group.graph
        flow = gradients(graph, self.real, [n for n, k in enumerate(self.group.results) if k in results])
        return frozenset(k for k in self.real if flow(Value(graph.inputs[k])))

    def gradients(
        self, residuals: Arrays, operands: Mapping[int, Any], cotangents: Mapping[int, Any], active: Collection[int]
    ) -> Arrays:
        """Return the gradients of the active operands.

        Args:
            residuals: the residuals other than operands.
            operands: the operands that the pullback reads, by index in `values` and `rest`.
            cotangents: the cotangents of all groups' floating-point results, without those that are zero.
            active: the positions of operands that have a gradient in some group.
        """
        if cotangents.keys().isdisjoint(self.group.results):
            return [self.real[k]() for k in sorted(active)]
        slices, back = jax.vjp(self.slices.take, *(operands[k] for k in self.slots))
        own = dict(enumerate(slices, start=len(self.group.graph.inputs)))
        of_values, of_slices = self.pullback.join(residuals, {**operands, **own})(
            [cotangents[k] if k in cotangents else self.results[k]() for k in self.floating_results]
        )
        for k, x in zip(self.slots, back(of_slices), strict=True):
            of_values[k] += x
        return [vary(x, piece.names) for x, (k, piece) in zip(of_values, self.real.items(), strict=True) if k in active]


@dataclass(frozen=True, eq=False)
class _Switch:
    """A switch between the groups' branches, with its gradient. `names` are the mesh axes of the groups."""

    cases: tuple[_Case, ...]
    names: tuple[str, ...]

    def __call__(self, operands: Sequence[Any]) -> Arrays:
        real = self.cases[0].real
        others = {k: x for k, x in enumerate(operands) if k not in real}
        call = jax.custom_vjp(self.plain)
        call.defvjp(self.forward, self.backward, symbolic_zeros=True)
        return list(call([operands[k] for k in real], others))

    def plain(self, values: Arrays, rest: dict[int, Any]) -> Arrays:
        return self.pick([case.outputs for case in self.cases], values, rest)

    def forward(self, perturbed_values: Arrays, perturbed_rest: dict[int, Any]) -> tuple[Arrays, Any]:
        values, rest = jax.tree.map(lambda x: x.value, (perturbed_values, perturbed_rest))
        for case in self.cases:  # fills their pullbacks
            jax.eval_shape(case.with_residuals, values, rest)
        buffers = _Buffers.shared([case.pullback.residuals for case in self.cases])

        def filling(case: _Case, values: Arrays, rest: dict[int, Any]) -> tuple[Arrays, Arrays]:
            outputs, residuals = case.with_residuals(values, rest)
            return outputs, buffers.filled(residuals)

        outputs, buffered = self.pick([partial(filling, case) for case in self.cases], values, rest)
        operands = [*values, *rest.values()]
        reread = {k for case in self.cases for k in [*case.pullback.operand_numbers, *case.slots] if 0 <= k < len(operands)}
        return outputs, (buffers, buffered, {k: operands[k] for k in sorted(reread)})

    def backward(self, residuals: Any, cotangents: Arrays) -> Any:
        buffers, buffered, operands = residuals
        floating_results = {k for case in self.cases for k in case.floating_results}
        own = {k: cotangents[k] for k in sorted(floating_results) if not isinstance(cotangents[k], SymbolicZero)}
        active = frozenset[int]().union(*(case.active(own) for case in self.cases))
        if not active:
            return None, None

        def pulling(case: _Case, buffered: Arrays, operands: dict[int, Any], cotangents: dict[int, Any]) -> Arrays:
            return case.gradients(buffers.read(buffered, case.pullback.residuals), operands, cotangents, active)

        summed = self.pick([partial(pulling, case) for case in self.cases], buffered, operands, own)
        by_position = dict(zip(sorted(active), summed, strict=True))
        return [by_position.get(k) for k in self.cases[0].real], None

    def pick(self, cases: Sequence[Callable[..., Any]], *operands: Any) -> Any:
        """Run the case of this device's group."""
        return loops.switch(lax.axis_index(self.names), cases, *operands)


@dataclass(frozen=True, eq=False)
class _Slices:
    """A group's slices of packed weights: the nodes that take them, and the operands, by position, that `take` reads."""

    nodes: tuple[Node, ...]
    slots: tuple[int, ...]
    take: Callable[..., Arrays]

    @classmethod
    def of(cls, group: Group, run: Run) -> _Slices:
        graph = group.graph
        nodes = tuple(n for n in graph.nodes if n.kind != "input" and is_part(n))
        read = {id(n.operands[0].node) for n in nodes}
        slots = tuple(k for k, n in enumerate(graph.inputs) if id(n) in read)
        slices = PCG(tuple(graph.inputs[k] for k in slots), tuple(map(Value, nodes)), graph.axes)
        return cls(nodes, slots, lambda *slots: list(run(slices, slots)))

    def rest(self, graph: PCG) -> PCG:
        """Return the group's graph with the slices as inputs."""
        return PCG((*graph.inputs, *self.nodes), graph.outputs, graph.axes)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Buffers:
    """Buffers that the groups share for their residuals.

    Attributes:
        alike: residuals that every group has, which are returned as they are.
        flat: one flat buffer for each element type and set of varying axes, as long as the largest group needs. A group's other
            residuals lie in it end to end.
    """

    alike: tuple[Zeros, ...]
    flat: tuple[Zeros, ...]

    @classmethod
    def shared(cls, groups: Sequence[Sequence[Zeros]]) -> _Buffers:
        counts = [Counter(pieces) for pieces in groups]
        common = counts[0]
        for count in counts[1:]:
            common = common & count
        lengths: dict[tuple[Any, frozenset[str]], int] = {}
        for count in counts:
            own: Counter[tuple[Any, frozenset[str]]] = Counter()
            for piece, n in (count - common).items():
                own[piece.dtype, piece.names] += n * prod(piece.shape)
            lengths.update({key: max(n, lengths.get(key, 0)) for key, n in own.items()})
        flat = tuple(Zeros((n,), dtype, names) for (dtype, names), n in lengths.items())
        return cls(tuple(common.elements()), flat)

    def filled(self, residuals: Sequence[Any]) -> Arrays:
        """Return the buffers, filled with one group's residuals."""
        rest, buffers = list(residuals), []
        for piece in self.alike:
            buffers.append(rest.pop(next(k for k, x in enumerate(rest) if zeros_of(x) == piece)))
        for piece in self.flat:
            parts = [x.reshape(-1) for x in rest if (x.dtype, varying(x)) == (piece.dtype, piece.names)]
            free = piece.shape[0] - sum(x.size for x in parts)
            buffers.append(jnp.concatenate([*parts, Zeros((free,), piece.dtype, piece.names)()]))
        return buffers

    def read(self, buffered: Sequence[Any], pieces: Sequence[Zeros]) -> Arrays:
        """Return the residuals of one group from its buffers, in the group's order. `pieces` are zeros that stand for them."""
        direct: dict[Zeros, Arrays] = {}
        for piece, x in zip(self.alike, buffered, strict=False):
            direct.setdefault(piece, []).append(x)
        flat = {(p.dtype, p.names): x for p, x in zip(self.flat, buffered[len(self.alike) :], strict=True)}
        done: Counter[tuple[Any, frozenset[str]]] = Counter()
        residuals = []
        for piece in pieces:
            if direct.get(piece):
                residuals.append(direct[piece].pop(0))
                continue
            key, n = (piece.dtype, piece.names), prod(piece.shape)
            residuals.append(flat[key][done[key] : done[key] + n].reshape(piece.shape))
            done[key] += n
        return residuals
