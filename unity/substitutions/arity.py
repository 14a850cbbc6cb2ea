"""Joins and splits of many parts, as the vocabulary has them: of two at a time, from the left; and put together again.

A program is searched in the first form and planned in the second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

from unity.pcg.body import Atom, Body, Equation, Tensor, tensor_type
from unity.substitutions.rewriting import tidy

Inner = Callable[[Equation, Atom], Equation | None]


def opened(body: Body) -> Body:
    """A program as it is searched."""
    return tidy(in_pairs(body))


def closed(body: Body) -> Body:
    """A program as it is planned."""
    return tidy(whole(body))


def in_pairs(body: Body) -> Body:
    """Every join and split of more than two parts as several of two."""
    tensors = dict(body.tensors)
    equations: list[Equation] = []
    for e in body.equations:
        if e.name == "concatenate" and len(e.operands) > 2:
            equations += _joined(e, tensors)
        elif e.name == "split" and len(e.results) > 2:
            equations += _split(e, tensors)
        else:
            equations.append(e)
    return Body(body.inputs, body.outputs, tuple(equations), tensors)


def _new(tensors: dict[int, Tensor], like: Tensor, axis: int, size: int) -> int:
    shape = (*like.shape[:axis], size, *like.shape[axis + 1 :])
    number = max(tensors) + 1
    tensors[number] = tensor_type(shape, like.dtype)
    return number


def _joined(e: Equation, tensors: dict[int, Tensor]) -> list[Equation]:
    axis, like = int(e.params["dimension"]), tensors[e.results[0]]
    sizes = [tensors[a].shape[axis] if isinstance(a, int) else a.tensor.shape[axis] for a in e.operands]
    found, left = [], e.operands[0]
    for k, right in enumerate(e.operands[1:], 1):
        result = e.results[0] if k == len(sizes) - 1 else _new(tensors, like, axis, sum(sizes[: k + 1]))
        found.append(replace(e, operands=(left, right), results=(result,), origin=None))
        left = result
    return found


def _split(e: Equation, tensors: dict[int, Tensor]) -> list[Equation]:
    axis, sizes = int(e.params["axis"]), [int(n) for n in e.params["sizes"]]
    found, rest, like = [], e.operands[0], tensors[e.results[0]]
    for k in range(len(sizes) - 1, 0, -1):
        left = e.results[0] if k == 1 else _new(tensors, like, axis, sum(sizes[:k]))
        params = {**e.params, "sizes": (sum(sizes[:k]), sizes[k])}
        found.append(replace(e, params=params, operands=(rest,), results=(left, e.results[k]), origin=None))
        rest = left
    return found


def whole(body: Body) -> Body:
    """Joins of joins, splits of splits and slices of slices as one, where nothing else reads what is between."""
    readers = Counter(a for e in body.equations for a in e.operands if isinstance(a, int))
    readers.update(a for a in body.outputs if isinstance(a, int))
    slots: list[Equation | None] = []
    slot: dict[int, int] = {}  # of the equation that makes a variable

    def inner(e: Equation, a: Atom) -> Equation | None:
        """What makes an operand, if it is of the same kind and alone to be read."""
        found = slots[slot[a]] if isinstance(a, int) and a in slot and readers[a] == 1 else None
        return found if found is not None and found.name == e.name else None

    for e in body.equations:
        at = len(slots)
        if e.name == "concatenate":
            e = _with_joined(e, inner, slots, slot)
        elif e.name in ("split", "slice") and (first := inner(e, e.operands[0])) is not None:
            both = _of_split(first, e) if e.name == "split" else _of_slice(first, e)
            if both is not None:
                at, e = slot[first.results[0]], both
        slots[at:] = [e, *slots[at + 1 :]]
        slot.update((v, at) for v in e.results)
    return Body(body.inputs, body.outputs, tuple(e for e in slots if e is not None), body.tensors)


def _with_joined(e: Equation, inner: Inner, slots: list[Equation | None], slot: Mapping[int, int]) -> Equation:
    operands: list[Atom] = []
    for a in e.operands:
        found = inner(e, a)
        if found is not None and found.params["dimension"] == e.params["dimension"]:
            operands += found.operands
            slots[slot[found.results[0]]] = None
        else:
            operands.append(a)
    return e if len(operands) == len(e.operands) else replace(e, operands=tuple(operands), origin=None)


def _of_split(first: Equation, second: Equation) -> Equation | None:
    """A split of one of a split's results: one split, where the first one was."""
    (a,) = second.operands
    if first.params["axis"] != second.params["axis"] or not isinstance(a, int):
        return None
    place = first.results.index(a)
    sizes = (*first.params["sizes"][:place], *second.params["sizes"], *first.params["sizes"][place + 1 :])
    results = (*first.results[:place], *second.results, *first.results[place + 1 :])
    return replace(first, params={**first.params, "sizes": sizes}, results=results, origin=None)


def _of_slice(first: Equation, second: Equation) -> Equation | None:
    if first.params["strides"] is not None or second.params["strides"] is not None:
        return None
    starts = first.params["start_indices"]
    moved = {k: tuple(a + b for a, b in zip(starts, second.params[k], strict=True)) for k in ("start_indices", "limit_indices")}
    return replace(second, params={**second.params, **moved}, operands=first.operands, origin=None)
