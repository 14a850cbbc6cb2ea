"""Branches as they run: every device picks those of its group by its place along the axes of the groups.

All devices give all results: zeros where the branch is another group's. Everything that is read differs, for JAX, along these axes
before the switch, so gradients are summed up after it, where all devices take part (design section 7).

The gradient is a switch, too. JAX's own would hand out, from every branch, what any of them keeps. Here what a group keeps lies in
buffers that all groups share (`_Buffers`), and what was given is not kept at all.
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
from unity.pcg.graph import PCG, Node
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
        ends = [k for k, piece in enumerate(self.results) if jnp.issubdtype(piece.dtype, jnp.inexact)]
        pieces = [zeros_of(operands[k]) for k in real]
        pullbacks = [Pullback() for _ in self.groups]

        def run(group: Group, values: Sequence[Any], rest: Mapping[int, Any]) -> Arrays:
            """All results, zeros for those of other groups."""
            whole = {**rest, **dict(zip(real, values, strict=True))}
            made = dict(zip(group.results, self.run(group.graph, [whole[k] for k in range(len(whole))]), strict=True))
            return [vary(made[k], piece.names) if k in made else piece() for k, piece in enumerate(self.results)]

        @jax.custom_vjp
        def call(values: Arrays, rest: dict[int, Any]) -> Arrays:
            return self.pick([lambda v, r, g=g: run(g, v, r) for g in self.groups], values, rest)

        def forward(values: Arrays, rest: dict[int, Any]) -> tuple[Arrays, Any]:
            def working(group: Group, pullback: Pullback, values: Arrays, rest: dict[int, Any]) -> tuple[Arrays, Arrays]:
                def differentiable(*values: Any) -> tuple[Arrays, Arrays]:
                    found = run(group, values, rest)
                    return [found[k] for k in ends if k in group.results], found

                _, pull, found = jax.vjp(differentiable, *values, has_aux=True)
                return found, pullback.apart(pull, [*values, *rest.values()])

            for group, pullback in zip(self.groups, pullbacks, strict=True):  # so that it is known what is kept
                jax.eval_shape(lambda v, r, g=group, p=pullback: working(g, p, v, r), values, rest)
            buffers = _Buffers.shared([p.kept for p in pullbacks])

            def kept(k: int, values: Arrays, rest: dict[int, Any]) -> tuple[Arrays, Arrays]:
                found, more = working(self.groups[k], pullbacks[k], values, rest)
                return found, buffers.filled(more)

            found, full = self.pick([lambda v, r, k=k: kept(k, v, r) for k in range(len(self.groups))], values, rest)
            given = [*values, *rest.values()]
            used = sorted({k for p in pullbacks for k in p.given if k >= 0})
            return found, (buffers, full, {k: given[k] for k in used})

        def backward(residuals: Any, cotangents: Arrays) -> Any:
            buffers, full, given = residuals
            real_cotangents = {k: cotangents[k] for k in ends}

            def pulled(k: int, full: Arrays, given: dict[int, Any], cotangents: dict[int, Any]) -> Arrays:
                pull = pullbacks[k].together(buffers.taken(full, pullbacks[k].kept), given)
                found = pull([cotangents[q] for q in ends if q in self.groups[k].results])
                return [vary(x, piece.names) for x, piece in zip(found, pieces, strict=True)]

            cases = [lambda f, g, c, k=k: pulled(k, f, g, c) for k in range(len(self.groups))]
            return self.pick(cases, full, given, real_cotangents), None

        call.defvjp(forward, backward)
        return list(call([operands[k] for k in real], others))

    def pick(self, cases: Sequence[Callable[..., Any]], *operands: Any) -> Any:
        """What the case of this device's group gives."""
        return lax.switch(lax.axis_index(self.names), cases, *operands)


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
