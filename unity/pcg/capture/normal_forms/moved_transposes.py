"""Transposes that move behind the parts and reductions that are taken of them, where they are smaller or vanish.

`q, k, v = jnp.moveaxis(qkv, 2, 0)` transposes a tensor, of which each part is in the old order. The parts of the tensor itself need
no transpose, and a product reads what remains of it (`transposed_products`). A transpose after elementwise work stays, as it is
written with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax.extend.core import primitives

from unity.pcg.capture.heavy_operators import light
from unity.pcg.ir.dead_code import used
from unity.pcg.ir.program import Atom, Body, Equation, Tensor
from unity.pcg.operators.table.reduction import REDUCTIONS, WHOLE_REDUCTIONS

PARTS = ("slice", "split", "unstack", "squeeze")
MOVABLE = ("transpose", *PARTS, *REDUCTIONS, *WHOLE_REDUCTIONS)


def with_moved_transposes(body: Body) -> Body:
    """Return a body in which no transpose is read by parts and reductions alone."""
    users: dict[int, list[Equation]] = {}
    for e in body.equations:
        for a in e.operands:
            if isinstance(a, int):
                users.setdefault(a, []).append(e)
    outputs = set(body.outputs)
    movable = {v for v, some in users.items() if v not in outputs and all(e.name in MOVABLE for e in some)}
    makers = {v: e for e in body.equations for v in e.results}
    for e in body.equations:
        if e.name == "transpose" and e.results[0] in movable and _is_fused(body, e.operands[0], makers, users):
            movable.remove(e.results[0])
    if not any(e.name == "transpose" and e.results[0] in movable for e in body.equations):
        return body
    return _Moving(body, movable).run()


def _is_fused(body: Body, atom: Atom, makers: Mapping[int, Equation], users: Mapping[int, list[Equation]]) -> bool:
    """Return whether a transpose is written with elementwise work before it, and costs nothing more."""
    maker = makers.get(atom) if isinstance(atom, int) else None
    while maker is not None and maker.name == "reshape":
        atom = maker.operands[0]
        maker = makers.get(atom) if isinstance(atom, int) else None
    if maker is None or maker.name in MOVABLE:
        return False
    return light(body, maker) and sum(len(users.get(v, ())) for v in maker.results) == 1


class _Moving:
    """The rewriting of one body, equation by equation.

    Attributes:
        movable: the variables that only parts and reductions read.
        moved: the transposed variables that have no equation, each with its source and the order of the source's dimensions.
        same: the results that equal another variable.
    """

    def __init__(self, body: Body, movable: set[int]) -> None:
        self.body, self.movable = body, movable
        self.tensors: dict[int, Tensor] = dict(body.tensors)
        self.next = max(body.tensors) + 1
        self.moved: dict[int, tuple[Atom, tuple[int, ...]]] = {}
        self.same: dict[int, Atom] = {}
        self.equations: list[Equation] = []

    def run(self) -> Body:
        for e in self.body.equations:
            e = e.reading(tuple(map(self.read, e.operands))) if self.same else e
            first = e.operands[0] if e.operands else None
            transposed = self.moved.get(first) if isinstance(first, int) else None
            if e.name == "transpose":
                source, order = transposed or (e.operands[0], tuple(range(len(e.params["permutation"]))))
                self.define(e.results[0], source, tuple(order[d] for d in e.params["permutation"]), e)
            elif transposed is not None:
                self.move(e, *transposed)
            else:
                self.equations.append(e)
        return used(Body(self.body.inputs, tuple(map(self.read, self.body.outputs)), tuple(self.equations), self.tensors))

    def read(self, atom: Atom) -> Atom:
        return self.same.get(atom, atom) if isinstance(atom, int) else atom

    def define(self, v: int, source: Atom, order: tuple[int, ...], e: Equation) -> None:
        """Let a result of `e` be a transpose of `source`: without an equation if its users move before it, or it is in order."""
        if order == tuple(range(len(order))):
            self.same[v] = source
        elif v in self.movable:
            self.moved[v] = source, order
        elif e.name == "transpose" and source == e.operands[0]:
            self.equations.append(e)
        else:
            transpose = {"primitive": primitives.transpose_p, "params": {"permutation": order}}
            self.equations.append(replace(e, **transpose, operands=(source,), results=(v,), origin=None))

    def move(self, e: Equation, source: Atom, order: tuple[int, ...]) -> None:
        """Let an equation of a transpose take its parts, or its reduction, of the source, and transpose the results."""
        params, gone = _of_source(e, order)
        left = [d for d in order if d not in gone]
        after = tuple(sorted(left).index(d) for d in left)
        results = []
        for v in e.results:
            shape = self.body.tensors[v].shape
            sizes = dict(zip(after, shape, strict=True))
            self.tensors[self.next] = replace(self.body.tensors[v], shape=tuple(sizes[d] for d in range(len(shape))))
            results.append(self.next)
            self.next += 1
        self.equations.append(replace(e, params=params, operands=(source,), results=tuple(results), origin=None))
        for v, u in zip(e.results, results, strict=True):
            self.define(v, u, after, e)


def _of_source(e: Equation, order: Sequence[int]) -> tuple[dict[str, Any], set[int]]:
    """Return the parameters of an equation of a transposed tensor for the tensor itself, and its dimensions that results lack."""
    params = dict(e.params)
    if e.name == "slice":
        for name in ("start_indices", "limit_indices", "strides"):
            if params[name] is not None:
                values = dict(zip(order, params[name], strict=True))
                params[name] = tuple(values[d] for d in range(len(order)))
        return params, set()
    if e.name in ("split", "unstack"):
        params["axis"] = order[params["axis"]]
        return params, {params["axis"]} if e.name == "unstack" else set()
    name = "dimensions" if e.name == "squeeze" else "axes"
    params[name] = tuple(sorted(order[d] for d in params[name]))
    return params, set(params[name])
