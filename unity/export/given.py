"""Operators that are given functions, as source: general reductions, what is applied to a part of an array, and linear solvers with
what differentiates them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jax.extend import core

from unity.export.applied import Operand
from unity.export.indexing import indexed, scattered
from unity.export.inner import LETTERS, Inner, inputs_of, packed, unpacked_in
from unity.export.source import Code, call, literal, sequence
from unity.export.tracing import Program, closed
from unity.pcg.ir.program import Equation
from unity.pcg.propagation.linear_solves import named, parts, symmetric

if TYPE_CHECKING:
    from unity.export.block import Writing


def combining(e: Equation) -> Program:
    """The program by which a reduction puts two values together."""
    found = e.params["jaxpr"]
    return closed(found if isinstance(found, core.ClosedJaxpr) else core.ClosedJaxpr(found, e.params.get("consts", ())))


def reduction(writing: Writing, e: Equation) -> list[Code]:
    """A general reduction, of whole dimensions or of windows: what combines two values is a function inside."""
    n = len(e.operands) // 2
    codes, inner, program = [writing.read(a).code for a in e.operands], Inner(writing.block, "combine"), combining(e)
    names = [inner.scope.new(LETTERS[k % len(LETTERS)]) for k in range(2 * n)]
    (one, unpack), (other, more) = unpacked_in(inner, "one", names[:n]), unpacked_in(inner, "other", names[n:])
    results = inner.block.write(program.body, inputs_of(program, list(map(Code, names))))
    inner.finish([one, other], [*unpack, *more], [packed([r.code for r in results])])
    given = packed(codes[:n]), packed(codes[n:]), Code(inner.name)
    if e.name == "reduce":
        value = call("lax.reduce", *given, tuple(e.params["dimensions"]))
    else:
        p = e.params
        how = {k: tuple(p[k]) for k in ("base_dilation", "window_dilation") if set(p[k]) != {1}}
        padding = sequence([literal(tuple(pair)) for pair in p["padding"]])
        value = call("lax.reduce_window", *given, tuple(p["window_dimensions"]), tuple(p["window_strides"]), padding, **how)
    return writing.block.let(["combined"] * n, value)


def applies(e: Equation) -> bool:
    """Whether a scatter applies a function to what is there (`x.at[i].apply(f)`), and does not put something else in its place."""
    if e.name != "scatter" or e.params["update_jaxpr"] is None:
        return False
    program = e.params["update_jaxpr"]
    return program.outvars[0] is not program.invars[1]


def applied(e: Equation) -> Program:
    """What a scatter computes of one number that is there, and of another that says nothing."""
    return closed(core.ClosedJaxpr(e.params["update_jaxpr"], e.params["update_consts"]))


def application(writing: Writing, e: Equation) -> list[Code]:
    """A function that is applied to a part of an array: a function inside."""
    operand, indices, nothing = e.operands
    inner, program = Inner(writing.block, "apply"), applied(e)
    name = inner.scope.new("x")
    results = inner.block.write(program.body, inputs_of(program, [Code(name), Code("None")]))
    inner.finish([name], [], [results[0].code])
    given = [writing.read(operand).code, writing.read(indices).code, Code(inner.name), scattered(e)]
    value = call("lax.scatter_apply", *given, update_shape=tuple(writing.body.tensor(nothing).shape), **indexed(e))
    return writing.block.let(["applied"], value)


def linear_solve(writing: Writing, e: Equation) -> list[Code]:
    """A linear solver: the product that it inverts, and how it and its transpose are solved. JAX transposes the product itself."""
    programs = e.params["jaxprs"]
    constants, right = parts(e, [writing.block.named(writing.read(a), "given") for a in e.operands])
    count, codes = len(right), packed([o.code for o in right])

    def function(name: str, before: Sequence[str]) -> Code:
        program, inner = closed(getattr(programs, name)), Inner(writing.block, name)
        names = [inner.scope.new("x") for _ in range(count)]
        parameter, unpack = unpacked_in(inner, "xs", names)
        operands = inputs_of(program, [*(o.code for o in constants[name]), *map(Code, names)])
        operands[: len(constants[name])] = [Operand(o.code, o.tensor, o.varying, o.constant) for o in constants[name]]
        results = [o.code for o in inner.block.write(program.body, operands)]
        more = [packed(results[count:])] if results[count:] else []
        inner.finish([*before, parameter], unpack, [packed(results[:count]), *more])
        return Code(inner.name)

    product, solve = function("matvec", []), function("solve", ["_"])
    how: dict[str, object] = {}
    if "transpose_solve" in named(e):
        how["transpose_solve"] = function("transpose_solve", ["_"])
    how |= {"symmetric": True} if symmetric(e) else {}
    aux = len(e.results) - count
    how |= {"has_aux": True} if aux else {}
    value = call("lax.custom_linear_solve", product, codes, solve, **how)
    if not aux:
        return writing.block.let(["solved"] * count, value)
    whole, rest = writing.block.let(["solved", "beside"], value)
    return [*_items(writing, whole, count), *_items(writing, rest, aux)]


def _items(writing: Writing, whole: Code, count: int) -> list[Code]:
    return [whole] if count == 1 else [Code(f"{whole}[{k}]") for k in range(count)]
