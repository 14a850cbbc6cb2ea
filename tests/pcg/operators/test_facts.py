"""What the table says of an operator beside its factors, against JAX: the residuals of its derivative, and how it is compiled."""

from collections.abc import Iterator
from functools import cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core
from operator_cases import CASES
from test_table import equations

from unity.pcg.analysis.residuals import read_backward, residuals
from unity.pcg.ir.program import Body, Equation, Tensor, close
from unity.pcg.operators.table import TABLE
from unity.pcg.propagation.specifications import spec_of
from unity.pcg.types.accumulation import accumulator
from unity.pcg.types.factors import facts_of

LESS = {"reduce": "its function may be linear"}  # derivatives that read less than the table says, for some parameters


def applications() -> Iterator[tuple[str, Equation, list[Tensor], list[Tensor]]]:
    """Yield every primitive of the table as all cases apply it, once for equal parameters and types."""
    seen = set()
    with jax.enable_x64(True):
        for fn, args in CASES.values():
            body = close(jax.make_jaxpr(fn)(*(a() if callable(a) else a for a in args)))
            for program, e in equations(body):
                operands, results = [program.tensor(a) for a in e.operands], [program.tensors[v] for v in e.results]
                key = e.signature, tuple(map(str, operands))
                if e.name in TABLE and key not in seen:
                    seen.add(key)
                    yield e.name, e, operands, results


@cache
def by_primitive() -> dict[str, list[tuple[Equation, list[Tensor], list[Tensor]]]]:
    of: dict[str, list] = {}
    for name, e, operands, results in applications():
        of.setdefault(name, []).append((e, operands, results))
    return of


def alone(e: Equation, operands: list[Tensor], results: list[Tensor]) -> Body:
    """Return the program of one equation, whose operands are all inputs."""
    n = len(operands)
    inputs, outputs = tuple(range(n)), tuple(range(n, n + len(results)))
    apart = Equation(e.primitive, e.params, inputs, outputs, "", origin=e.origin)
    return Body(inputs, outputs, (apart,), dict(enumerate((*operands, *results))))


def variables(xs: Any) -> list[core.Var]:
    return [v for v in xs if not isinstance(v, core.Literal)]


def read_by_jax(e: Equation, operands: list[Tensor], at: tuple[int, ...]) -> frozenset[int]:
    """Return the operands and results that JAX's residuals are functions of, numbered in one order."""

    def forward(*xs: Any) -> Any:
        def of(*chosen: Any) -> Any:
            replaced = dict(zip(at, chosen, strict=True))
            return e.primitive.bind(*(replaced.get(p, x) for p, x in enumerate(xs)), **e.params)

        return jax.vjp(of, *(xs[p] for p in at))

    structs = [t.struct for t in operands]
    program = jax.make_jaxpr(forward)(*structs).jaxpr
    n = len(e.results)
    numbers = {v: k for k, v in reversed(list(enumerate(program.outvars[:n], len(operands)))) if not isinstance(v, core.Literal)}
    numbers |= {v: p for p, v in enumerate(program.invars)}
    producers = {v: eqn for eqn in program.eqns for v in eqn.outvars}
    read, stack, seen = set[int](), variables(program.outvars[n:]), set[core.Var]()
    while stack:
        v = stack.pop()
        if v in seen:
            continue
        seen.add(v)
        if v in numbers:
            read.add(numbers[v])
        elif v in producers:
            stack += variables(producers[v].invars)
    return frozenset(read)


def on_the_way(e: Equation, operands: list[Tensor], p: int) -> list[str] | None:
    """Return the primitives that JAX applies to the tangent of an operand, or None if no result has one."""

    def tangents(t: Any, *xs: Any) -> Any:
        def of(x: Any) -> Any:
            return e.primitive.bind(*(x if q == p else y for q, y in enumerate(xs)), **e.params)

        return jax.jvp(of, (xs[p],), (t,))[1]

    program = jax.make_jaxpr(tangents)(operands[p].struct, *(t.struct for t in operands)).jaxpr
    depends, names = {program.invars[0]}, []
    for eqn in program.eqns:
        if not depends.isdisjoint(variables(eqn.invars)):
            depends.update(eqn.outvars)
            names.append(eqn.primitive.name)
    return None if depends.isdisjoint(variables(program.outvars)) else names


@pytest.mark.parametrize("name", sorted(TABLE))
def test_derivatives_read_what_jax_reads(name: str) -> None:
    facts = facts_of(name)
    for e, operands, results in by_primitive().get(name, ()):
        floating = [p for p, t in enumerate(operands) if t.floating]
        if not any(t.floating for t in results):
            continue
        body = alone(e, operands, results)
        for at in dict.fromkeys([*((p,) for p in floating), tuple(floating)]):
            try:
                with jax.enable_x64(True):
                    expected, passes = read_by_jax(e, operands, at), [p for p in at if on_the_way(e, operands, p) is not None]
            except (NotImplementedError, TypeError, ValueError):
                continue  # JAX has no derivative of it
            read = read_backward(body, tuple(p in at for p in range(len(operands))))
            case = f"{e.signature} of {[*map(str, operands)]} in {at}"
            assert passes == [p for p in at if facts.reads_for(p) is not None], case
            if facts.recomputed:  # results are functions of operands
                expected = frozenset(range(len(operands))) if any(v >= len(operands) for v in expected) else expected
            assert expected <= read if name in LESS else expected == read, case


def stacked_by_jax(e: Equation, operands: list[Tensor], at: tuple[int, ...]) -> int:
    """Return the bytes that a scan over applications to varying operands stacks for the backward pass, for one step."""

    def forward(*stacks: Any) -> Any:
        def step(_: None, xs: Any) -> Any:
            return None, e.primitive.bind(*xs, **e.params)

        def of(*chosen: Any) -> Any:
            replaced = dict(zip(at, chosen, strict=True))
            return lax.scan(step, None, tuple(replaced.get(p, x) for p, x in enumerate(stacks)))[1]

        return jax.vjp(of, *(stacks[p] for p in at))

    structs = [jax.ShapeDtypeStruct((2, *t.shape), t.dtype) for t in operands]
    program = jax.make_jaxpr(forward)(*structs).jaxpr
    kept = dict.fromkeys(variables(program.outvars[len(e.results) :]))
    stacks = {v for eqn in program.eqns if eqn.primitive.name == "scan" for v in eqn.outvars} | set(program.invars)
    types: list[Any] = [v.aval for v in kept if v in stacks]
    return sum(prod(t.shape[1:]) * t.dtype.itemsize for t in types)


@pytest.mark.parametrize("name", sorted(TABLE))
def test_scans_stack_what_jax_stacks(name: str) -> None:
    for e, operands, results in by_primitive().get(name, ()):
        at = tuple(p for p, t in enumerate(operands) if t.floating)
        if not at or not any(t.floating for t in results):
            continue
        try:
            with jax.enable_x64(True):
                expected = stacked_by_jax(e, operands, at)
        except (NotImplementedError, TypeError, ValueError):
            continue  # JAX has no derivative of it
        with jax.enable_x64(True):
            kept = residuals(alone(e, operands, results), tuple(t.floating for t in operands), stacked=True)
        nbytes = sum(t.nbytes for t, flag in zip((*operands, *results), (*kept.operands, *kept.results), strict=True) if flag)
        assert nbytes + sum(n for _, n in kept.inner) == expected, f"{e.signature} of {[*map(str, operands)]}"


# Instructions that XLA never fuses with others, in StableHLO. Loops that draw random bits are unrolled on GPUs.
BARRIERS = (
    "custom_call", "sort", "while", "scatter", "fft", "cholesky", "triangular_solve", "reduce_window", "select_and_scatter",
    "convolution", "dot_general", "optimization_barrier",
)  # fmt: skip
RANDOM = {"random_bits", "random_fold_in", "random_split", "threefry2x32"}


def lowered(e: Equation, operands: list[Tensor]) -> str:
    """Return an equation in StableHLO, for CPUs."""
    with jax.enable_x64(True):
        return jax.jit(lambda *xs: e.primitive.bind(*xs, **e.params)).lower(*(t.struct for t in operands)).as_text()


@pytest.mark.parametrize("name", sorted({*TABLE} - RANDOM))
def test_operators_that_xla_never_fuses_are_alone_and_products_are_products(name: str) -> None:
    facts = facts_of(name)
    for e, operands, _ in by_primitive().get(name, ()):
        text = lowered(e, operands)
        assert facts.alone or not any(f"stablehlo.{barrier}" in text for barrier in BARRIERS), e.signature
        assert facts.product == ("stablehlo.dot_general" in text or "stablehlo.convolution" in text), e.signature


@pytest.mark.parametrize("name", sorted(TABLE))
def test_derivatives_round_cotangents_where_the_table_says_so(name: str) -> None:
    for e, operands, results in by_primitive().get(name, ()):
        for p, t in enumerate(operands):
            try:
                with jax.enable_x64(True):
                    through = t.floating and results[0].floating and on_the_way(e, operands, p)
            except (NotImplementedError, TypeError, ValueError):
                continue  # JAX has no derivative of it
            if through:
                spec = spec_of(alone(e, operands, results), alone(e, operands, results).equations[0])
                rounds = spec is not None and spec.rounds
                converts = name == "convert_element_type" and bits(operands[p]) < bits(results[0])
                assert rounds == ("reduce_precision" in through or converts), e.signature


def bits(t: Tensor) -> int:
    """Return the bits of the real numbers in which partial sums are held."""
    return jnp.finfo(accumulator(t.dtype)).bits


def drawn(t: Tensor, rng: np.random.Generator) -> np.ndarray:
    """Return random elements of a type, of both signs."""
    if t.dtype == bool:
        return rng.random(t.shape) < 0.5
    numbers = rng.normal(size=t.shape) * 20
    return (numbers + (1j * numbers[::-1] if np.dtype(t.dtype).kind == "c" else 0)).astype(t.dtype)


def computed(e: Equation, *operands: np.ndarray) -> np.ndarray:
    return np.asarray(jax.jit(lambda *xs: e.primitive.bind(*xs, **e.params))(*operands))


@pytest.mark.parametrize("name", sorted({*TABLE} - RANDOM))
def test_operands_commute_and_pass_unchanged_where_the_table_says_so(name: str) -> None:
    rng, same, commute = np.random.default_rng(3), list[bool](), list[bool]()
    for e, operands, results in by_primitive().get(name, ()):
        known = all(isinstance(t.dtype, np.dtype) and np.dtype(t.dtype).kind in "biufc" for t in operands)
        if e.primitive.multiple_results or not known or {t.shape for t in operands} != {results[0].shape} or not results[0].shape:
            continue
        with jax.enable_x64(True):
            xs = [drawn(t, rng) for t in operands]
            if len(xs) == 1 and e.params.get("axes") != ():  # a reduction over no dimensions
                same.append(operands == results and np.array_equal(computed(e, *xs), xs[0]))
            elif len(xs) == 2 and operands[0] == operands[1]:
                values, exchanged = computed(e, *xs), computed(e, *xs[::-1])
                commute += [] if np.all(values != values) else [np.allclose(values, exchanged, equal_nan=True)]
    assert not same or facts_of(name).identity == all(same)
    assert not commute or facts_of(name).commutative == all(commute)
