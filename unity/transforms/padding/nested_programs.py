"""Checkpoints, scans and calls with a derivative rule whose nested programs run on padded operands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import jax

from unity.pcg.ir.program import Atom, Body, Equation
from unity.pcg.ir.tracing import trace
from unity.pcg.jaxprs.loops import constants_and_carry
from unity.pcg.local.interpreter import run_body
from unity.pcg.propagation.nested.derivative_rules import is_readable, jvp_body
from unity.pcg.propagation.nested.programs import nested_body
from unity.transforms.padding.fills import Fill
from unity.transforms.padding.padded_values import PaddedValue, PaddedValues, Sizes

CARRIES = 4  # passes over a scan's step, after which padding has reached all that is carried, or stays outside
Argument = tuple[Sizes, Fill] | None  # the padded sizes and the fill of an operand; None: it is not padded


class NestedPadding(Protocol):
    """A function that returns a nested program on padded operands, and its padded results; None for those that are not padded."""

    def __call__(
        self, body: Body, arguments: Sequence[Argument], call: Equation, carried: Sequence[Sizes] = ()
    ) -> tuple[Body, tuple[PaddedValue | None, ...]]:
        """Pad a nested program.

        Args:
            body: The nested program.
            arguments: Its operands.
            call: The equation that it is nested in.
            carried: The padded sizes of its first results, which are filled with zeros.
        """
        ...


def rematerialized(values: PaddedValues, e: Equation, walk: NestedPadding) -> None:
    """Add a checkpoint whose program runs on padded operands."""
    operands = [values.of(a) for a in e.operands]
    program, results = walk(nested_body(e), [_argument(v) for v in operands], e)
    atoms = [values.own(a, e) if v is None else v.variable for a, v in zip(e.operands, operands, strict=True)]
    _add(values, e, program, atoms, [_argument(r) for r in results])


def scanned(values: PaddedValues, e: Equation, walk: NestedPadding) -> None:
    """Add a scan whose steps run on padded slices. It carries values padded as at first or as a step returns."""
    body, (consts, carry) = nested_body(e), constants_and_carry(e.params)
    operands = [values.of(a) for a in e.operands]
    fixed, slices = [_argument(v) for v in operands[:consts]], [_slice(v) for v in operands[consts + carry :]]
    first = [{} if v is None else v.sizes for v in operands[consts : consts + carry]]
    carried = _carried_sizes(body, fixed, first, slices, e, walk)
    program, results = walk(body, [*fixed, *_filled_with_zeros(carried), *slices], e, carried)
    atoms = [values.own(a, e) if v is None else v.variable for a, v in zip(e.operands[:consts], operands[:consts], strict=True)]
    for a, sizes in zip(e.operands[consts : consts + carry], carried, strict=True):
        value = values.zero_filled(a, sizes, e)
        atoms.append(values.own(a, e) if value is None else value.variable)
    for a, part in zip(e.operands[consts + carry :], slices, strict=True):
        atoms.append(values.own(a, e) if part is None else values.wide(a, _stacked(part[0]), e).variable)
    carries, stacks = map(_argument, results[:carry]), map(_argument, results[carry:])
    _add(values, e, program, atoms, [*carries, *(s and (_stacked(s[0]), s[1]) for s in stacks)])


def _carried_sizes(
    body: Body, fixed: Sequence[Argument], first: Sequence[Sizes], slices: Sequence[Argument], e: Equation, walk: NestedPadding
) -> Sequence[Sizes]:
    """Return the padded sizes of what a scan carries: those at first, or else those that a step returns."""
    carried = list(first)
    for _ in range(CARRIES):
        _, results = walk(body, [*fixed, *_filled_with_zeros(carried), *slices], e)
        returned = [s or ({} if r is None else r.sizes) for s, r in zip(carried, results, strict=False)]
        if returned == carried:
            break
        carried = returned
    return carried


def _filled_with_zeros(sizes: Sequence[Sizes]) -> list[Argument]:
    return [(s, 0) if s else None for s in sizes]


def _add(values: PaddedValues, e: Equation, program: Body, operands: Sequence[Atom], results: Sequence[Argument]) -> None:
    """Add an equation with another nested program, and its results with their padding."""
    variables = []
    for v, result in zip(e.results, results, strict=True):
        if result is None:
            values.present.add(v)
        variables.append(v if result is None else values.register(v, *result).variable)
    params = {**e.params, "jaxpr": program}
    new = replace(e, operands=tuple(operands), results=tuple(variables), params=params, origin=None)
    values.writer.equations.append(new)


def with_rule(values: PaddedValues, e: Equation, walk: NestedPadding) -> bool:
    """Add a call with a derivative rule, such as relu, on padded operands.

    Returns False, and adds nothing, if its results differ in padding, from each other or from those of the rule.
    """
    operands = [v for v in map(values.of, e.operands) if v is not None and v.fill is not None]
    if len(operands) < len(e.operands) or not is_readable(e):
        return False
    rule = jvp_body(e)
    arguments = [(v.sizes, v.fill) for v in operands]
    tangents = [(sizes, 0) for (sizes, _), floats in zip(arguments, rule.floating, strict=True) if floats]
    primal, results = walk(nested_body(e), arguments, e)
    derivative, both = walk(rule.body, [*arguments, *tangents], e)
    padded = [r for r in (*results, *both) if r is not None]
    count = len(results)
    zeros = [0] * (len(both) - count)
    if len(padded) < count + len(both) or any(dict(r.sizes) != dict(padded[0].sizes) for r in padded):
        return False
    fills = [r.fill for r in padded]
    if None in fills or fills != [*fills[:count], *fills[:count], *zeros]:  # a rule may compute the values in another way
        return False

    @jax.custom_jvp
    def call(*xs: Any) -> Any:
        return tuple(_run(primal, xs))

    @call.defjvp
    def _(xs: Any, ts: Any) -> Any:
        out = _run(derivative, (*xs, *(t for t, floats in zip(ts, rule.floating, strict=True) if floats)))
        return tuple(out[:count]), tuple(out[count:])

    program = trace(call, (values.writer.tensors[v.variable].struct for v in operands), primal.tensors.values())
    (traced,) = program.equations  # JAX makes arrays that the function closes over operands of the call
    atoms = {x: (v.variable, fixed) for x, v, fixed in zip(program.inputs, operands, e.inactive, strict=True)}
    reads, inactive = zip(*(atoms[a] if isinstance(a, int) else (a, True) for a in traced.operands), strict=True)
    variables = tuple(values.register(v, r.sizes, r.fill).variable for v, r in zip(e.results, padded, strict=False))
    values.writer.equations.append(replace(traced, operands=reads, results=variables, inactive=inactive).with_provenance_of(e))
    return True


def _argument(value: PaddedValue | None) -> Argument:
    return None if value is None else (value.sizes, value.fill)


def _slice(value: PaddedValue | None) -> Argument:
    """Return the padded sizes and the fill of one step's slice of a stacked value."""
    sizes = {} if value is None else {d - 1: n for d, n in value.sizes.items() if d > 0}
    return (sizes, value.fill) if value is not None and sizes else None


def _stacked(sizes: Sizes) -> Sizes:
    """Return the padded sizes of a stack of values."""
    return {d + 1: n for d, n in sizes.items()}


def _run(body: Body, operands: Sequence[Any]) -> list:
    """Run a program."""
    return run_body(body, operands, [()] * len(body.inputs), [()] * len(body.outputs), ())
