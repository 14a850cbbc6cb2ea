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
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from unity.exec.guarded import Pullback, Zeros, zeros_of
from unity.exec.parallel import vary, varying
from unity.pcg.axis import Axis
from unity.pcg.branches import Group, groups_of, names_of, packed_of
from unity.pcg.graph import PCG, Node, Value
from unity.pcg.slots import is_part
from unity.pcg.state import UNUSED, local_shape

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
        results.append(Zeros(local_shape(v.tensor.shape, v.type, axes), v.tensor.dtype, frozenset(along)))
    return _Switch(groups_of(node), results, run, names)(given)


@dataclass(frozen=True, eq=False)
class _Switch:
    """Runs one of several groups' graphs, and its gradient."""

    groups: tuple[Group, ...]
    results: list[Zeros]
    run: Run
    names: tuple[str, ...]

    def __call__(self, operands: Sequence[Any]) -> Arrays:
        real = [k for k, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.inexact)]
        others = {k: x for k, x in enumerate(operands) if k not in real}
        places = {k: n for n, k in enumerate(real)}
        parts = [_Parts.of(group, self.run) for group in self.groups]
        ends = [k for k, piece in enumerate(self.results) if jnp.issubdtype(piece.dtype, jnp.inexact)]
        pieces = [zeros_of(operands[k]) for k in real]
        pullbacks = [Pullback() for _ in self.groups]

        def run(group: Group, own: _Parts, values: Sequence[Any], more: Sequence[Any], rest: Mapping[int, Any]) -> Arrays:
            """All results, zeros for those of other groups. `more`: the parts that the group has of packed weights."""
            whole = {**rest, **dict(zip(real, values, strict=True))}
            given = [*(whole[k] for k in range(len(whole))), *more]
            made = dict(zip(group.results, self.run(own.rest(group.graph), given), strict=True))
            return [vary(made[k], piece.names) if k in made else piece() for k, piece in enumerate(self.results)]

        @jax.custom_vjp
        def call(values: Arrays, rest: dict[int, Any]) -> Arrays:
            pairs = zip(self.groups, parts, strict=True)
            return self.pick([lambda v, r, g=g, p=p: run(g, p, v, p.taken(v, places), r) for g, p in pairs], values, rest)

        def forward(values: Arrays, rest: dict[int, Any]) -> tuple[Arrays, Any]:
            def working(n: int, values: Arrays, rest: dict[int, Any]) -> tuple[Arrays, Arrays]:
                group, own = self.groups[n], parts[n]

                def differentiable(values: Arrays, more: Arrays) -> tuple[Arrays, Arrays]:
                    found = run(group, own, values, more, rest)
                    return [found[k] for k in ends if k in group.results], found

                more = own.taken(values, places)
                _, pull, found = jax.vjp(differentiable, values, more, has_aux=True)
                return found, pullbacks[n].apart(pull, [*values, *rest.values(), *more])

            for n in range(len(self.groups)):  # so that it is known what is kept
                jax.eval_shape(lambda v, r, n=n: working(n, v, r), values, rest)
            buffers = _Buffers.shared([p.kept for p in pullbacks])

            def kept(k: int, values: Arrays, rest: dict[int, Any]) -> tuple[Arrays, Arrays]:
                found, more = working(k, values, rest)
                return found, buffers.filled(more)

            found, full = self.pick([lambda v, r, k=k: kept(k, v, r) for k in range(len(self.groups))], values, rest)
            given = [*values, *rest.values()]
            used = {k for p in pullbacks for k in p.given if 0 <= k < len(given)} | {places[k] for p in parts for k in p.slots}
            return found, (buffers, full, {k: given[k] for k in sorted(used)})

        def backward(residuals: Any, cotangents: Arrays) -> Any:
            buffers, full, given = residuals
            real_cotangents = {k: cotangents[k] for k in ends}

            def pulled(k: int, full: Arrays, given: dict[int, Any], cotangents: dict[int, Any]) -> Arrays:
                slots = [given[places[p]] for p in parts[k].slots]
                more, back = jax.vjp(parts[k].take, *slots)
                own = {len(real) + len(others) + n: x for n, x in enumerate(more)}
                pull = pullbacks[k].together(buffers.taken(full, pullbacks[k].kept), {**given, **own})
                found, ends_of_parts = pull([cotangents[q] for q in ends if q in self.groups[k].results])
                for p, x in zip(parts[k].slots, back(ends_of_parts), strict=True):
                    found[places[p]] += x
                return [vary(x, piece.names) for x, piece in zip(found, pieces, strict=True)]

            cases = [lambda f, g, c, k=k: pulled(k, f, g, c) for k in range(len(self.groups))]
            return self.pick(cases, full, given, real_cotangents), None

        call.defvjp(forward, backward)
        return list(call([operands[k] for k in real], others))

    def pick(self, cases: Sequence[Callable[..., Any]], *operands: Any) -> Any:
        """What the case of this device's group gives."""
        return lax.switch(lax.axis_index(self.names), cases, *operands)


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

    def taken(self, values: Sequence[Any], places: Mapping[int, int]) -> Arrays:
        """All of them, of the operands that are differentiated. `places`: of an operand among these."""
        return self.take(*(values[places[k]] for k in self.slots))


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
