"""Smaller bodies of a body: without what nothing needs, without what is computed twice, or some of its equations alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from unity.pcg.ir.program import Body, Equation, Literal


def used(body: Body) -> Body:
    """The body without equations that no output depends on."""
    wanted = {a for a in body.outputs if isinstance(a, int)}
    kept = []
    for e in reversed(body.equations):
        if not wanted.isdisjoint(e.results):
            kept.append(e)
            wanted.update(a for a in e.operands if isinstance(a, int))
    return Body(body.inputs, body.outputs, tuple(reversed(kept)), body.tensors)


def deduplicated(body: Body, pure: Callable[[Equation], bool]) -> Body:
    """The body with equal equations computed once, where `pure` allows it (a mean taken twice, for itself and for a variance)."""
    first: dict[tuple, tuple[int, ...]] = {}
    same: dict[int, int] = {}
    kept = []
    for e in body.equations:
        if same and any(a in same for a in e.operands if isinstance(a, int)):
            e = e.reading(tuple(same.get(a, a) if isinstance(a, int) else a for a in e.operands))
        if pure(e):
            content = (e.signature, *(a.key if isinstance(a, Literal) else a for a in e.operands))
            results = first.setdefault(content, e.results)
            if results is not e.results:
                same.update(zip(e.results, results, strict=True))
                continue
        kept.append(e)
    outputs = tuple(same.get(a, a) if isinstance(a, int) else a for a in body.outputs)
    return Body(body.inputs, outputs, tuple(kept), body.tensors)


def extract(
    body: Body, chosen: Iterable[int], outputs: Sequence[int], duplicated: Mapping[int, int]
) -> tuple[Body, tuple[int, ...]]:
    """The equations numbered `chosen` as a body of their own, and the variables of `body` that are its inputs.

    `duplicated` maps a variable to the equation that computes it where that equation is copied in rather than shared. Copies
    come right before their first use, so that equal operators have equal bodies wherever their constants were first made.
    """
    numbers = _with_copies(body, chosen, duplicated)
    made = {v for i in numbers for v in body.equations[i].results}
    inputs: dict[int, None] = {}
    for i in numbers:
        inputs.update((a, None) for a in body.equations[i].operands if isinstance(a, int) and a not in made)
    order = tuple(inputs)
    equations = tuple(body.equations[i] for i in numbers)
    kept = {v for e in equations for v in e.results} | set(order)
    return Body(order, tuple(outputs), equations, {v: body.tensors[v] for v in kept}), order


def _with_copies(body: Body, chosen: Iterable[int], duplicated: Mapping[int, int]) -> list[int]:
    found: dict[int, None] = {}
    for i in sorted(chosen):
        stack = [i]
        while stack:
            operands = body.equations[stack[-1]].operands
            missing = (duplicated[a] for a in operands if isinstance(a, int) and a in duplicated)
            copy = next((j for j in missing if j not in found), None)
            if copy is None:
                found.setdefault(stack.pop(), None)
            else:
                stack.append(copy)
    return list(found)
