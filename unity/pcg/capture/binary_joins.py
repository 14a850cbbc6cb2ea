"""Binary form of concatenations and splits, as the rewrite rules expect: n parts become n - 1 operations on two, from the left."""

from __future__ import annotations

from dataclasses import replace

from unity.pcg.ir.program import Body, Equation, Tensor, tensor_type


def in_pairs(body: Body) -> Body:
    """Return a body with every concatenation and split of more than two parts as several of two."""
    tensors = dict(body.tensors)
    equations: list[Equation] = []
    for e in body.equations:
        if e.name == "concatenate" and len(e.operands) > 2:
            equations += _concatenate_pairs(e, tensors)
        elif e.name == "split" and len(e.results) > 2:
            equations += _split_pairs(e, tensors)
        else:
            equations.append(e)
    return Body(body.inputs, body.outputs, tuple(equations), tensors)


def _add_variable(tensors: dict[int, Tensor], like: Tensor, axis: int, size: int) -> int:
    """Add a variable of another size along one dimension, and return its number."""
    shape = (*like.shape[:axis], size, *like.shape[axis + 1 :])
    number = max(tensors) + 1
    tensors[number] = tensor_type(shape, like.dtype)
    return number


def _concatenate_pairs(e: Equation, tensors: dict[int, Tensor]) -> list[Equation]:
    axis, like = int(e.params["dimension"]), tensors[e.results[0]]
    sizes = [tensors[a].shape[axis] if isinstance(a, int) else a.tensor.shape[axis] for a in e.operands]
    equations, left = [], e.operands[0]
    for k, right in enumerate(e.operands[1:], 1):
        result = e.results[0] if k == len(sizes) - 1 else _add_variable(tensors, like, axis, sum(sizes[: k + 1]))
        equations.append(replace(e, operands=(left, right), results=(result,), origin=None))
        left = result
    return equations


def _split_pairs(e: Equation, tensors: dict[int, Tensor]) -> list[Equation]:
    axis, sizes = int(e.params["axis"]), [int(n) for n in e.params["sizes"]]
    equations, rest, like = [], e.operands[0], tensors[e.results[0]]
    for k in range(len(sizes) - 1, 0, -1):
        left = e.results[0] if k == 1 else _add_variable(tensors, like, axis, sum(sizes[:k]))
        params = {**e.params, "sizes": (sum(sizes[:k]), sizes[k])}
        equations.append(replace(e, params=params, operands=(rest,), results=(left, e.results[k]), origin=None))
        rest = left
    return equations
