"""The specification of each equation of a body: that of the operator table, with facts that follow from its operands' producers."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from unity.pcg.ir.gradient_flow import carrying
from unity.pcg.ir.program import Atom, Body, Equation
from unity.pcg.types.factors import TABLE, Spec

_SPECS: dict[int, tuple[Equation, Spec | None]] = {}  # a cache by identity: a specification is read thousands of times


def spec_of(body: Body, equation: Equation) -> Spec | None:
    """Return the specification of an equation of a body. None: the operator table has no entry, so that it cannot be divided."""
    spec = _entry_of(body, equation)
    return _after_bounded(body, equation) if spec is not None and spec.linear_if_bounded else spec


def _entry_of(body: Body, equation: Equation) -> Spec | None:
    """Return the specification of an equation in the operator table, or None."""
    cached = _SPECS.get(id(equation))
    if cached is None or cached[0] is not equation:
        entry = TABLE.get(equation.name)
        operands = [body.tensor(a) for a in equation.operands]
        results = [body.tensor(v) for v in equation.results]
        cached = _SPECS[id(equation)] = (equation, entry.spec(equation.params, operands, results) if entry else None)
    return cached[1]


@lru_cache(maxsize=4096)
def _after_bounded(body: Body, equation: Equation) -> Spec | None:
    """Return the specification of an equation that is linear, too, in operands that are sums which cannot overflow."""
    spec, bounded = _entry_of(body, equation), _bounded(body)
    groups = tuple(g for g in spec.linear_if_bounded if all(equation.operands[p] in bounded for p in g)) if spec else ()
    return replace(spec, linear=(*spec.linear, *groups), linear_if_bounded=(), matched={}) if spec and groups else spec


@lru_cache(maxsize=1024)
def _bounded(body: Body) -> frozenset[Atom]:
    """Return the variables of a body that are sums of integers that cannot overflow."""
    specs = ((e, _entry_of(body, e)) for e in body.equations)
    return frozenset(v for e, spec in specs if spec is not None and spec.bounded for v in e.results)


@lru_cache(maxsize=4096)
def summable_arrays(body: Body) -> tuple[int, ...]:
    """Return the arrays in a program that devices may reduce: the results of reductions, and of linear functions of them."""
    specs = ((e, spec_of(body, e)) for e in body.equations)
    combined = (e for e, spec in specs if spec is not None and (spec.linear or any(f.reduction for f in spec.factors)))
    return tuple(v for e in combined for v in e.results if body.tensors[v].ndim)


@lru_cache(maxsize=4096)
def rounding_results(body: Body) -> frozenset[int]:
    """Return the results of equations whose derivative rounds the cotangents of a body's operands."""
    rounding = [e for e in body.equations if (spec := spec_of(body, e)) is not None and spec.rounds]
    if not rounding:  # nearly always
        return frozenset()
    inputs = tuple(body.tensors[v].floating for v in body.inputs)
    return carrying(body, inputs, (True,) * len(body.outputs)).intersection(v for e in rounding for v in e.results)
