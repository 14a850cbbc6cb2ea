"""Branches as they run: every device picks those of its group by its place along the axes of the groups.

All devices give all results: zeros where the branch is another group's. Everything that is read differs, for JAX, along these axes
before the switch, so gradients are summed up after it, where all devices take part (design section 7).

The gradient is a switch, too. JAX's own would hand out, from every branch, what any of them keeps. Here what a group keeps lies in
buffers that all groups share (`_Buffers`), and what was given is not kept at all. Nor is what a group has of a packed weight
(`_Parts`), which backward is taken out of it once more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from unity.exec.pipelines.guarded import Pullback, Zeros, zeros_of
from unity.pcg.capture.group_slots import is_part
from unity.pcg.ir.graph import PCG, Node, Value
from unity.pcg.local import varying_loops as loops
from unity.pcg.parallel.branches import Group, groups_of, names_of, packed_of
from unity.pcg.types.accumulation import held
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import UNUSED, local_shape
from unity.pcg.types.varying_axes import vary, varying

Run = Callable[[PCG, Sequence[Any]], Sequence[Any]]  # a graph on one device's pieces
Arrays = list[Any]


def branched(node: Node, operands: Sequence[Any], run: Run, axes: tuple[Axis, ...]) -> Arrays:
    """The results of branches on one device's pieces; called inside `shard_map`."""
    assert node.inside is not None
    packed, names = packed_of(node), names_of(node)
    given = [x[0] if p in packed else x for p, x in enumerate(operands)]
    results = []
    for v in node.inside.outputs:
        along = frozenset(a.name for a, s in zip(axes, v.type, strict=True) if s != UNUSED) | set(names)
        own = held(v.tensor.dtype, v.type, axes)
        results.append(Zeros(local_shape(v.tensor.shape, v.type, axes), own, frozenset(along)))
    real = {k: zeros_of(x) for k, x in enumerate(given) if jnp.issubdtype(x.dtype, jnp.inexact)}
    cases = tuple(_Case(group, _Parts.of(group, run), real, results, run) for group in groups_of(node))
    return _Switch(cases, names)(given)


@dataclass(frozen=True, eq=False)
class _Case:
    """One group's graph as it runs, and its gradient.

    Of all operands `values` are those that are differentiated (`real`, by position), `rest` the others, by position.
    """

    group: Group
    parts: _Parts
    real: Mapping[int, Zeros]
    results: Sequence[Zeros]  # of all groups
    run: Run
    pullback: Pullback = field(default_factory=Pullback)

    @property
    def slots(self) -> list[int]:
        """Which of `values` its parts of packed weights are taken out of."""
        places = {k: n for n, k in enumerate(self.real)}
        return [places[k] for k in self.parts.slots]

    @property
    def ends(self) -> list[int]:
        """Its own results that are differentiated."""
        return [k for k in self.group.results if jnp.issubdtype(self.results[k].dtype, jnp.inexact)]

    def found(self, values: Sequence[Any], rest: Mapping[int, Any], more: Sequence[Any] | None = None) -> Arrays:
        """All results, zeros for those of other groups. `more`: its parts of packed weights, if they are taken already."""
        more = self.taken(values) if more is None else more
        whole = {**rest, **dict(zip(self.real, values, strict=True))}
        given = [*(whole[k] for k in range(len(whole))), *more]
        made = dict(zip(self.group.results, self.run(self.parts.rest(self.group.graph), given), strict=True))
        return [vary(made[k], piece.names) if k in made else piece() for k, piece in enumerate(self.results)]

    def taken(self, values: Sequence[Any]) -> Arrays:
        """Its parts of packed weights."""
        return self.parts.take(*(values[k] for k in self.slots))

    def kept(self, values: Arrays, rest: dict[int, Any]) -> tuple[Arrays, Arrays]:
        """All results, and what is kept for the gradient; what was given is not."""

        def differentiable(values: Arrays, more: Arrays) -> tuple[Arrays, Arrays]:
            found = self.found(values, rest, more)
            return [found[k] for k in self.ends], found

        more = self.taken(values)
        _, pull, found = jax.vjp(differentiable, values, more, has_aux=True)
        return found, self.pullback.apart(pull, [*values, *rest.values(), *more])

    def pulled(self, kept: Arrays, given: Mapping[int, Any], cotangents: Mapping[int, Any]) -> Arrays:
        """The gradients of `values`. `given`: operands that are read once more, by their places among `values` and `rest`."""
        more, back = jax.vjp(self.parts.take, *(given[k] for k in self.slots))
        own = dict(enumerate(more, start=len(self.group.graph.inputs)))
        found, ends_of_parts = self.pullback.together(kept, {**given, **own})([cotangents[k] for k in self.ends])
        for k, x in zip(self.slots, back(ends_of_parts), strict=True):
            found[k] += x
        return [vary(x, piece.names) for x, piece in zip(found, self.real.values(), strict=True)]


@dataclass(frozen=True, eq=False)
class _Switch:
    """Runs one of several groups' graphs, and its gradient."""

    cases: tuple[_Case, ...]
    names: tuple[str, ...]

    def __call__(self, operands: Sequence[Any]) -> Arrays:
        real = self.cases[0].real
        others = {k: x for k, x in enumerate(operands) if k not in real}
        call = jax.custom_vjp(self.plain)
        call.defvjp(self.forward, self.backward)
        return list(call([operands[k] for k in real], others))

    def plain(self, values: Arrays, rest: dict[int, Any]) -> Arrays:
        return self.pick([case.found for case in self.cases], values, rest)

    def forward(self, values: Arrays, rest: dict[int, Any]) -> tuple[Arrays, Any]:
        for case in self.cases:  # so that it is known what is kept
            jax.eval_shape(case.kept, values, rest)
        buffers = _Buffers.shared([case.pullback.kept for case in self.cases])

        def filling(case: _Case, values: Arrays, rest: dict[int, Any]) -> tuple[Arrays, Arrays]:
            found, kept = case.kept(values, rest)
            return found, buffers.filled(kept)

        found, full = self.pick([partial(filling, case) for case in self.cases], values, rest)
        given = [*values, *rest.values()]
        again = {k for case in self.cases for k in [*case.pullback.given, *case.slots] if 0 <= k < len(given)}
        return found, (buffers, full, {k: given[k] for k in sorted(again)})

    def backward(self, residuals: Any, cotangents: Arrays) -> Any:
        buffers, full, given = residuals
        ends = {k for case in self.cases for k in case.ends}

        def pulling(case: _Case, full: Arrays, given: dict[int, Any], cotangents: dict[int, Any]) -> Arrays:
            return case.pulled(buffers.taken(full, case.pullback.kept), given, cotangents)

        cases = [partial(pulling, case) for case in self.cases]
        return self.pick(cases, full, given, {k: cotangents[k] for k in sorted(ends)}), None

    def pick(self, cases: Sequence[Callable[..., Any]], *operands: Any) -> Any:
        """What the case of this device's group gives."""
        return loops.switch(lax.axis_index(self.names), cases, *operands)


@dataclass(frozen=True, eq=False)
class _Parts:
    """What a group has of packed weights. `slots`: the operands, by position, that `take` takes them of, in its order."""

    nodes: tuple[Node, ...]
    slots: tuple[int, ...]
    take: Callable[..., Arrays]

    @classmethod
    def of(cls, group: Group, run: Run) -> _Parts:
        graph = group.graph
        nodes = tuple(n for n in graph.nodes if n.kind != "input" and is_part(n))
        read = {id(n.operands[0].node) for n in nodes}
        slots = tuple(k for k, n in enumerate(graph.inputs) if id(n) in read)
        taken = PCG(tuple(graph.inputs[k] for k in slots), tuple(map(Value, nodes)), graph.axes)
        return cls(nodes, slots, lambda *slots: list(run(taken, slots)))

    def rest(self, graph: PCG) -> PCG:
        """The group's graph without what takes them: they are inputs."""
        return PCG((*graph.inputs, *self.nodes), graph.outputs, graph.axes)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Buffers:
    """Where what groups keep lies: pieces that every group has are handed out as they are, all others flat, end to end.

    `flat`: for each type of element, and axes along which it differs, the length that the largest group needs.
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

    def filled(self, kept: Sequence[Any]) -> Arrays:
        """The buffers with what one group keeps."""
        rest, found = list(kept), []
        for piece in self.alike:
            found.append(rest.pop(next(k for k, x in enumerate(rest) if zeros_of(x) == piece)))
        for piece in self.flat:
            parts = [x.reshape(-1) for x in rest if (x.dtype, varying(x)) == (piece.dtype, piece.names)]
            free = piece.shape[0] - sum(x.size for x in parts)
            found.append(jnp.concatenate([*parts, Zeros((free,), piece.dtype, piece.names)()]))
        return found

    def taken(self, full: Sequence[Any], pieces: Sequence[Zeros]) -> Arrays:
        """The pieces that one group has put into the buffers, in its order."""
        direct: dict[Zeros, Arrays] = {}
        for piece, x in zip(self.alike, full, strict=False):
            direct.setdefault(piece, []).append(x)
        flat = {(p.dtype, p.names): x for p, x in zip(self.flat, full[len(self.alike) :], strict=True)}
        done: Counter[tuple[Any, frozenset[str]]] = Counter()
        found = []
        for piece in pieces:
            if direct.get(piece):
                found.append(direct[piece].pop(0))
                continue
            key, n = (piece.dtype, piece.names), prod(piece.shape)
            found.append(flat[key][done[key] : done[key] + n].reshape(piece.shape))
            done[key] += n
        return found
