"""Random bits for each sample by its number, in scans whose steps draw bits for all samples at once.

A counter-based generator (`unity.pcg.operators.counter_bits`) computes every element's bits from the element's number. So the
samples' numbers become one more constant with samples, and the bits of any part of a batch are, bit by bit, those drawn for the
whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from unity.pcg.capture.capture import Captured
from unity.pcg.ir.program import Body, Equation
from unity.pcg.ir.tracing import trace
from unity.pcg.jaxprs.loops import constants_and_carry
from unity.pcg.local.interpreter import BodyInterpreter
from unity.pcg.operators.counter_bits import WORD, bits, is_counter_based
from unity.pcg.propagation.nested.programs import nested_body
from unity.pcg.propagation.nested.scan_programs import REMATERIALIZED, programs
from unity.pcg.types.factors import facts_of
from unity.transforms.splice import spliced, with_steps

NUMBERED = "unity:numbers"  # scope of the scan with samples' numbers; no model has it


def draws(body: Body, size: int) -> bool:
    """Whether a step draws bits for `size` samples that can be drawn sample by sample."""
    return any(by_sample(body, e, size) for e in body.equations) or any(draws(b, size) for b in programs(body).values())


def by_sample(body: Body, e: Equation, size: int) -> bool:
    """Whether an equation draws bits for `size` samples that can be drawn sample by sample."""
    if not facts_of(e.name).draws:
        return False
    key, shape = body.tensor(e.operands[0]), tuple(e.params["shape"])
    return is_counter_based(key.dtype) and key.ndim == 0 and bool(shape) and shape[0] % size == 0 and prod(shape) // size < WORD


def numbered(captured: Captured, number: int, size: int) -> Captured:
    """Return the program with a scan, given by its equation's number, that draws bits by the numbers of its `size` samples."""
    e = captured.body.equations[number]
    step = nested_body(e)
    consts, carry = constants_and_carry(e.params)

    def program(*operands: Any) -> Sequence[Any]:
        numbers = jnp.arange(size, dtype=jnp.uint32)

        def one(carried: Any, own: Any) -> Any:
            return tuple(_Numbered(step, numbers).run((*operands[:consts], *carried, *own))), None

        weights = tuple(operands[consts + carry :])
        return lax.scan(one, tuple(operands[consts : consts + carry]), weights, e.params["length"], unroll=e.params["unroll"])[0]

    by_number = trace(program, (captured.body.tensor(a).struct for a in e.operands), step.tensors.values())
    after = captured.of(spliced(captured.body, set(e.results), e.operands, e.results, by_number, e, NUMBERED), captured.bodies)
    return replace(after, graph=with_steps(after.graph, NUMBERED, step, captured.graph))


class _Numbered(BodyInterpreter):
    """An interpreter of a step that draws bits sample by sample."""

    def __init__(self, body: Body, numbers: jax.Array) -> None:
        super().__init__(body, (), ())
        self.numbers = numbers

    def equation(self, number: int) -> list:
        equation = self.body.equations[number]
        if by_sample(self.body, equation, self.numbers.size):
            key, width, shape = self.read(equation.operands[0]), equation.params["bit_width"], equation.params["shape"]
            return [sample_bits(key, width, shape, self.numbers)]
        if equation.name not in REMATERIALIZED:
            return super().equation(number)
        inner, params = nested_body(equation), equation.params
        run = jax.checkpoint(
            lambda numbers, *operands: _Numbered(inner, numbers).run(operands),
            prevent_cse=params["prevent_cse"],
            policy=params["policy"],
        )
        return run(self.numbers, *(self.read(a) for a in equation.operands))


def sample_bits(key: jax.Array, width: int, shape: Sequence[int], numbers: jax.Array) -> jax.Array:
    """Return the rows of `jax.random.bits(key, shape)` that belong to the samples with these numbers."""
    each = prod(shape) // numbers.size
    within = jnp.arange(each, dtype=jnp.uint32)
    return bits(key, width, (WORD, each), (numbers, within)).reshape(shape)
