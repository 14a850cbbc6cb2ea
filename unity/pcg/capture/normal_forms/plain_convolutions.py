"""Absorption of padding and transposes into convolutions, as in XLA, which runs no kernel for either.

A convolution pads its image itself, and takes the dimensions of image, filters and result in any order.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax import lax

from unity.pcg.ir.dead_code import used
from unity.pcg.ir.program import Atom, Body, Equation, Literal

CONVOLUTION = "conv_general_dilated"


def with_plain_convolutions(body: Body) -> Body:
    """Return a body whose convolutions read images and filters as they are before padding by zeros and transposes.

    A result that is only transposed is computed in the order of the transpose.
    """
    makers = {v: e for e in body.equations for v in e.results}
    if not any(e.name == CONVOLUTION for e in body.equations):
        return body
    turned = _transposed_results(body, makers)
    equations: list[Equation] = []
    for e in body.equations:
        if e.name == "transpose" and e.operands[0] in turned:
            continue
        if e.name == CONVOLUTION:
            e = _absorb(e, makers, turned)
            transpose = turned.get(e.results[0])
            e = e if transpose is None else _with_result_of(e, transpose)
        equations.append(e)
    if all(a is b for a, b in zip(equations, body.equations, strict=False)):
        return body
    return used(Body(body.inputs, body.outputs, tuple(equations), body.tensors))


def _transposed_results(body: Body, makers: Mapping[int, Equation]) -> dict[Atom, Equation]:
    """Return the transposes of convolutions' results that nothing else reads, by the result."""
    ends, transposes = set(body.outputs), dict[Atom, Equation]()
    for e in body.equations:
        v = e.operands[0] if e.name == "transpose" else None
        if isinstance(v, int) and v not in ends and len(body.touching[v]) == 2:  # by its maker and by the transpose
            maker = makers.get(v)
            transposes |= {v: e} if maker is not None and maker.name == CONVOLUTION else {}
    return transposes


def _absorb(convolution: Equation, makers: Mapping[int, Equation], turned: Container[Atom]) -> Equation:
    """Return a convolution that reads the operands of the padding and the transposes that it read.

    It reads the transpose of a `turned` result, which another convolution computes in this order.
    """
    params, operands = dict(convolution.params), list(convolution.operands)
    for k, atom in enumerate(operands):
        while (maker := makers.get(atom) if isinstance(atom, int) else None) is not None:
            changed = None if maker.operands[0] in turned else _before(maker, params, k, makers)
            if changed is None:
                break
            params, atom = changed, maker.operands[0]
        operands[k] = atom
    if tuple(operands) == convolution.operands:
        return convolution
    return replace(convolution, params=params, operands=tuple(operands), origin=None)


def _before(e: Equation, params: Mapping[str, Any], k: int, makers: Mapping[int, Equation]) -> dict[str, Any] | None:
    """Return a convolution's parameters for the operand of what computes its own operand, of number `k`; None if it has none."""
    numbers = params["dimension_numbers"]
    spec = numbers[k]
    if e.name == "transpose":
        order = e.params["permutation"]
        return {**params, "dimension_numbers": _numbers(numbers, k, [order[d] for d in spec])}
    if e.name != "pad" or k != 0 or not _is_zero(e.operands[1], makers) or any(d != 1 for d in params["lhs_dilation"]):
        return None
    config = e.params["padding_config"]
    if any(low < 0 or high < 0 or inner for low, high, inner in config) or any(config[d][:2] != (0, 0) for d in spec[:2]):
        return None
    added = [config[d] for d in spec[2:]]
    own = zip(params["padding"], added, strict=True)
    return {**params, "padding": tuple((int(a + low), int(b + high)) for (a, b), (low, high, _) in own)}


def _with_result_of(convolution: Equation, transpose: Equation) -> Equation:
    """Return a convolution that computes the transpose of its result."""
    order = list(transpose.params["permutation"])
    numbers = convolution.params["dimension_numbers"]
    params = {**convolution.params, "dimension_numbers": _numbers(numbers, 2, [order.index(d) for d in numbers[2]])}
    return replace(convolution, params=params, results=transpose.results, origin=None)


def _numbers(numbers: lax.ConvDimensionNumbers, k: int, spec: Sequence[int]) -> lax.ConvDimensionNumbers:
    """Return dimension numbers with another order of the image's (0), the filters' (1) or the result's dimensions (2)."""
    return lax.ConvDimensionNumbers(*(tuple(map(int, spec)) if i == k else own for i, own in enumerate(numbers)))


def _is_zero(atom: Atom, makers: Mapping[int, Equation]) -> bool:
    """Return whether a scalar is zero, in whatever type it is written."""
    maker = makers.get(atom) if isinstance(atom, int) else None
    if maker is not None and maker.name == "convert_element_type":
        return _is_zero(maker.operands[0], makers)
    return isinstance(atom, Literal) and bool(atom.value == 0)
