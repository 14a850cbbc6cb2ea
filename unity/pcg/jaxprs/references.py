"""Removal of references: a program that changes arrays in place (`jax.Ref`) becomes one of values only.

Between two equations, a reference is the value that it has there. A loop carries the values of the references that it changes, and
a conditional returns them. References that are made outside of the program are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from unity.base.errors import CaptureError
from unity.pcg.jaxprs.jaxprs import (
    BRANCHED,
    SCANNED,
    Program,
    callable_of,
    called,
    chosen_of,
    each,
    is_reference,
    merged,
    with_equations,
    with_nested,
    with_programs,
)
from unity.pcg.jaxprs.loops import constants_and_carry, predicates
from unity.pcg.jaxprs.source_lines import Place, place_of
from unity.pcg.jaxprs.trace_contexts import precision_of, without_mesh
from unity.pcg.jaxprs.weak_types import struct_of

# (values of references, other operands) → (results, values of the references after it)
Run = Callable[[Sequence[Any], Sequence[Any]], tuple[list[Any], list[Any]]]
CALLED = frozenset({"jit", "pjit", "closed_call", "core_call"})  # calls that are run as their programs


@dataclass(eq=False)
class Reference:
    """A reference, as the value that it has at this point of a run of the program."""

    value: Any


def without_references(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Return a program that computes the same with values only. Returns the same object if it has no references.

    Raises CaptureError for a reference from outside, and for uses that have no counterpart among values. The message has the line.
    """
    outside = {v for v in program.jaxpr.constvars if is_reference(v.aval)}
    for eqn in program.eqns:
        if not outside.isdisjoint(a for a in eqn.invars if isinstance(a, core.Var)):
            raise CaptureError(
                f"{_line(eqn)}: a jax.Ref made outside of the function is read or changed, and a plan is a graph of values only.\n"
                "    Make it inside, from a value that is an argument, and return what it is at the end. (docs: capture#references)"
            )
    return _of_values(program)


def _of_values(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Return a program of values only. One with references as arguments stays: it is a kernel's, or `_run` evaluates it."""
    if not has_references(program) or any(is_reference(v.aval) for v in program.jaxpr.invars):
        return program
    structs = [struct_of(v.aval) for v in program.jaxpr.invars]
    types = [v.aval for e in program.eqns for v in e.outvars if not is_reference(v.aval)]
    with without_mesh(), precision_of([*structs, *types]):
        return jax.make_jaxpr(partial(_run, program.jaxpr, program.consts))(*structs)


def has_references(program: Any) -> bool:
    """Return whether a program, or one nested in it, has references. Those that a kernel is given do not count."""

    def has(e: core.JaxprEqn) -> bool:
        nested = [p for p in each(e.params) if isinstance(p, Program) and not any(is_reference(v.aval) for v in p.invars)]
        return any(is_reference(v.aval) for v in (*e.invars, *e.outvars)) or any(map(has_references, nested))

    return any(map(has, program.eqns))


def _run(jaxpr: core.Jaxpr, consts: Sequence[Any], *args: Any) -> list[Any]:
    """Evaluate a program. Its arguments may be references."""
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else known[atom]

    for eqn in jaxpr.eqns:
        operands = [read(a) for a in eqn.invars]
        known.update(zip(eqn.outvars, _results(eqn, operands), strict=True))
    return [read(a) for a in jaxpr.outvars]


def _results(eqn: core.JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    """Evaluate an equation."""
    name, references = eqn.primitive.name, [x for x in operands if isinstance(x, Reference)]
    if name == "new_ref":
        aval: Any = eqn.outvars[0].aval
        return [Reference(operands[0] if isinstance(operands[0], jax.Array) else jnp.asarray(operands[0], aval.dtype))]
    if name == "empty_ref":
        ty = eqn.params["ty"]
        return [Reference(jnp.zeros(ty.shape, ty.dtype))]
    if not references:
        nested = {k: with_programs(p, _nested_of_values) for k, p in eqn.params.items()}
        same = all(nested[k] is p for k, p in eqn.params.items())
        return callable_of(eqn if same else eqn.replace(params=nested))(*operands)
    if name in ("freeze", "free_ref"):
        return [references[0].value][: len(eqn.outvars)]
    if name in CALLED:
        inner = _closed(called(eqn.params))
        return _run(inner.jaxpr, inner.consts, *operands)
    if name in ACCESSES:
        return _accessed(eqn, operands)
    make = next((f for names, f in STRUCTURED.items() if name in names), None)
    if make is None:
        raise CaptureError(
            f"{_line(eqn)}: {name} changes or reads a jax.Ref, and a plan is a graph of values only.\n    Pass the value (ref[...])"
            " there, and change the reference by the result. (docs: capture#references)"
        )
    return make(eqn, operands)


def _nested_of_values(program: Any) -> Any:
    """Return a program from an equation's parameters, open or closed, as one of values only."""
    if isinstance(program, core.ClosedJaxpr):
        return _of_values(program)
    changed = _of_values(core.ClosedJaxpr(program, ()))
    return program if changed.jaxpr is program else changed.jaxpr


def _line(eqn: core.JaxprEqn) -> str:
    return place_of(eqn.source_info, Place()).line or "the function"


def _closed(program: Any) -> core.ClosedJaxpr:
    return program if isinstance(program, core.ClosedJaxpr) else core.ClosedJaxpr(program, ())


# Reads and writes


def _accessed(eqn: core.JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    """Evaluate a read or a write of a reference."""
    reference, *rest = operands
    values, indices = rest[: len(rest) - eqn.params["tree"].num_leaves], rest[len(rest) - eqn.params["tree"].num_leaves :]
    transforms = jax.tree.unflatten(eqn.params["tree"], indices)
    if len(transforms) > 1 or any(not hasattr(t, "indices") for t in transforms):
        raise CaptureError(
            f"{_line(eqn)}: a jax.Ref is read or changed through a view of a view, or of another shape or type.\n    Index the"
            " reference itself, once. (docs: capture#references)"
        )

    def at_line(e: core.JaxprEqn) -> core.JaxprEqn:
        return with_nested(e, at_line).replace(source_info=eqn.source_info)

    run = partial(ACCESSES[eqn.primitive.name], eqn.params["tree"])
    results, value = _at_line(eqn, run, (reference.value, values, indices), at_line)
    reference.value = reference.value if eqn.primitive.name == "get" else value
    return results


def _read(tree: Any, x: Any, values: Sequence[Any], indices: Sequence[Any]) -> tuple[list[Any], Any]:
    return [_part(x, _indexer(tree, indices))], x


def _swap(tree: Any, x: Any, values: Sequence[Any], indices: Sequence[Any]) -> tuple[list[Any], Any]:
    indexer = _indexer(tree, indices)
    return [_part(x, indexer)], _with_part(x, indexer, values[0], "set")


def _add(tree: Any, x: Any, values: Sequence[Any], indices: Sequence[Any]) -> tuple[list[Any], Any]:
    return [], _with_part(x, _indexer(tree, indices), values[0], "add")


ACCESSES: dict[str, Callable[..., tuple[list[Any], Any]]] = {"get": _read, "swap": _swap, "addupdate": _add}


@dataclass(frozen=True)
class Block:
    """A block of an array: where it starts, its sizes, and the dimensions of size one that a read removes."""

    starts: tuple[Any, ...]
    sizes: tuple[int, ...]
    removed: tuple[int, ...]


def _indexer(tree: Any, indices: Sequence[Any]) -> Block | tuple[Any, ...] | None:
    """Return what JAX's indices of a reference mean: a block, an index of NumPy's kind, or None for the whole array."""
    transforms = jax.tree.unflatten(tree, indices)
    if not transforms:
        return None
    dimensions, shape = transforms[0].indices, transforms[0].shape
    slices = [hasattr(d, "stride") for d in dimensions]
    if all(slices) and all(d.stride == 1 and d.size == n for d, n in zip(dimensions, shape, strict=True)):
        return None
    if all(d.stride == 1 if s else jnp.ndim(d) == 0 for d, s in zip(dimensions, slices, strict=True)):
        starts = [d.start if s else d for d, s in zip(dimensions, slices, strict=True)]
        dtype = jnp.result_type(*([s.dtype for s in starts if isinstance(s, jax.Array)] or [jnp.int32]))
        return Block(
            tuple(jnp.asarray(s, dtype) for s in starts),
            tuple(d.size if s else 1 for d, s in zip(dimensions, slices, strict=True)),
            tuple(k for k, s in enumerate(slices) if not s),
        )
    rank = len(transforms[0].int_indexer_shape)
    first = slices.index(False) if False in slices else 0
    return _index_arrays(dimensions, slices, rank, first)


def _index_arrays(dimensions: Sequence[Any], slices: Sequence[bool], rank: int, first: int) -> tuple[Any, ...]:
    """Return NumPy's index arrays, one a dimension.

    Args:
        dimensions: JAX's index of each dimension.
        slices: which of them are slices; the others are integers, of one common shape.
        rank: the rank of that shape.
        first: where its dimensions come among those of the slices: in the place of the first integers.
    """
    total = rank + sum(slices)
    indices, before = [], 0
    for d, s in zip(dimensions, slices, strict=True):
        if not s:
            integers = jnp.asarray(d)
            axes = range(first, first + rank)[rank - integers.ndim :] if rank else range(0)
            indices.append(lax.broadcast_in_dim(integers, _spread(integers.shape, axes, total), tuple(axes)))
            continue
        axis = before if before < first else before + rank
        positions = d.start + d.stride * jnp.arange(d.size)
        indices.append(lax.broadcast_in_dim(positions, _spread(positions.shape, (axis,), total), (axis,)))
        before += 1
    return tuple(indices)


def _spread(shape: Sequence[int], axes: Iterable[int], rank: int) -> tuple[int, ...]:
    """Return a shape of a rank that has these sizes along some axes, and 1 along the others."""
    sizes = dict(zip(axes, shape, strict=True))
    return tuple(sizes.get(k, 1) for k in range(rank))


def _part(x: Any, indexer: Block | tuple[Any, ...] | None) -> Any:
    """Return the part of an array that an indexer reads."""
    if isinstance(indexer, Block):
        return lax.squeeze(lax.dynamic_slice(x, indexer.starts, indexer.sizes), indexer.removed)
    return x if indexer is None else x[indexer]


def _with_part(x: Any, indexer: Block | tuple[Any, ...] | None, value: Any, how: str) -> Any:
    """Return an array with a part of it set to a value, or the value added to it."""
    if isinstance(indexer, tuple):
        return getattr(x.at[indexer], how)(value)
    value = value if value.dtype == x.dtype else lax.convert_element_type(value, x.dtype)
    block = value if indexer is None else lax.expand_dims(value, indexer.removed)
    if how == "add":
        block = block + (x if indexer is None else lax.dynamic_slice(x, indexer.starts, indexer.sizes))
    return block if indexer is None else lax.dynamic_update_slice(x, block, indexer.starts)


# Control flow


def _scan(eqn: core.JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    """Evaluate a scan.

    Of the references that all steps share, the loop carries those that a step changes. Of the references that it is scanned over,
    each step has a row; the rows that a step changes are stacked again.
    """
    params, (count, carried) = eqn.params, constants_and_carry(eqn.params)
    shared, scanned = _references(operands[:count]), _references(operands[count:])
    step = _pure(params["jaxpr"], operands, [*shared, *scanned])
    constants, rest = _values(operands[:count]), _values(operands[count:])

    def run(values: Sequence[Any], arrays: Sequence[Any], carry: Sequence[Any], stacks: Sequence[Any]) -> Any:
        n, one_step = len(values), [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in (*arrays, *stacks)]
        changes = _changes(step, [*values, *one_step[: len(arrays)]], [*constants, *carry, *one_step[len(arrays) :]])
        changed, changed_rows = changes[:n], changes[n:]
        unchanged = chosen_of(changed, values, False)

        def body(state: Any, xs: Any) -> Any:
            (current, carry), (rows, slices) = state, xs
            results, after = step([*merged(changed, current, unchanged), *rows], [*constants, *carry, *slices])
            state = chosen_of(changed, after[:n]), results[:carried]
            return state, (results[carried:], chosen_of(changed_rows, after[n:]))

        first, xs = (chosen_of(changed, values), list(carry)), (list(arrays), list(stacks))
        (last, carry), (ys, rows) = lax.scan(body, first, xs, params["length"], params["reverse"], unroll=params["unroll"])
        arrays_after = merged(changed_rows, rows, chosen_of(changed_rows, arrays, False))
        return [*carry, *ys], [*merged(changed, last, unchanged), *arrays_after]

    references = [r.value for r in shared], [r.value for r in scanned]
    return _evaluated(eqn, run, [*shared, *scanned], *references, rest[:carried], rest[carried:])


def _while(eqn: core.JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    """Evaluate a `while` loop, which carries the references that it changes."""
    params = eqn.params
    a, b = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    references = _references(operands)
    test = _pure(params["cond_jaxpr"], [*operands[:a], *operands[b:]], references)
    step = _pure(params["body_jaxpr"], operands[a:], references)
    tested, stepped = _values(operands[:a]), _values(operands[a:b])

    if predicates(eqn):
        raise CaptureError(
            f"{_line(eqn)}: under vmap, a while loop that ends at another step for each element reads or changes a jax.Ref.\n"
            "    Carry the value in the loop, and change the reference after it. (docs: capture#references)"
        )

    def run(values: Sequence[Any], carry: Sequence[Any]) -> Any:
        if any(_changes(test, values, [*tested, *carry])):
            raise CaptureError(
                f"{_line(eqn)}: the condition of a while loop changes a jax.Ref.\n    Change it in the loop's body."
                " (docs: capture#references)"
            )
        changed = _changes(step, values, [*stepped, *carry])

        def every(current: Sequence[Any]) -> list[Any]:
            return merged(changed, current, chosen_of(changed, values, False))

        def body(state: Any) -> Any:
            results, after = step(every(state[0]), [*stepped, *state[1]])
            return chosen_of(changed, after), results

        last, carry = lax.while_loop(
            lambda state: test(every(state[0]), [*tested, *state[1]])[0][0], body, (chosen_of(changed, values), list(carry))
        )
        return carry, every(last)

    return _evaluated(eqn, run, references, [r.value for r in references], operands[b:])


def _cond(eqn: core.JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    """Evaluate a conditional, whose branches return the references that any of them changes."""
    index, *rest = operands
    references, plain = _references(rest), _values(rest)
    branches = [_pure(p, rest, references) for p in eqn.params["branches"]]

    def run(index: Any, values: Sequence[Any], plain: Sequence[Any]) -> Any:
        changed = [any(flags) for flags in zip(*(_changes(b, values, plain) for b in branches), strict=True)]

        def chosen(branch: Run) -> Callable[[], Any]:
            def taken() -> Any:
                results, after = branch(values, plain)
                return results, chosen_of(changed, after)

            return taken

        results, last = lax.switch(index, [chosen(b) for b in branches])
        return results, merged(changed, last, chosen_of(changed, values, False))

    return _evaluated(eqn, run, references, index, [r.value for r in references], plain)


STRUCTURED: Mapping[frozenset[str], Callable[..., Sequence[Any]]] = {
    frozenset(SCANNED): _scan,
    frozenset({"while"}): _while,
    frozenset(BRANCHED): _cond,
}


def _pure(program: Any, operands: Sequence[Any], references: Sequence[Reference]) -> Run:
    """Return a program as a function of the values of references and of its other operands: its results, and the new values."""
    inner, places = _closed(program), [references.index(x) if isinstance(x, Reference) else None for x in operands]

    def run(values: Sequence[Any], others: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        inside, rest = [Reference(v) for v in values], iter(others)
        out = _run(inner.jaxpr, inner.consts, *(next(rest) if k is None else inside[k] for k in places))
        return out, [r.value for r in inside]

    return run


def _changes(run: Run, values: Sequence[Any], others: Sequence[Any]) -> list[bool]:
    """Return for each reference whether a program changes it: whether its value is another object afterwards."""
    changes = list[bool]()

    def probe(values: Sequence[Any], others: Sequence[Any]) -> None:
        changes.extend(after is not before for after, before in zip(run(values, others)[1], values, strict=True))

    jax.eval_shape(probe, list(values), list(others))
    return changes


def _evaluated(eqn: core.JaxprEqn, run: Callable[..., Any], references: Sequence[Reference], *arguments: Any) -> Sequence[Any]:
    """Evaluate a function, which returns results and the values of references, in the place of an equation."""
    results, values = _at_line(eqn, run, arguments, lambda e: e)
    for reference, value in zip(references, values, strict=True):
        reference.value = value
    return results


def _references(operands: Sequence[Any]) -> list[Reference]:
    return list(dict.fromkeys(x for x in operands if isinstance(x, Reference)))


def _values(operands: Sequence[Any]) -> list[Any]:
    return [x for x in operands if not isinstance(x, Reference)]


def _at_line(
    eqn: core.JaxprEqn, run: Callable[..., Any], arguments: Sequence[Any], inner: Callable[[core.JaxprEqn], core.JaxprEqn]
) -> Any:
    """Evaluate a function as if it were at an equation's line.

    `inner` is applied to the equations nested in those of the function: steps and branches keep lines of their own.
    """
    program, shape = jax.make_jaxpr(run, return_shape=True)(*arguments)
    program = with_equations(program, lambda e: with_nested(e, inner).replace(source_info=eqn.source_info))
    leaves = core.jaxpr_as_fun(program)(*jax.tree.leaves(list(arguments)))
    return jax.tree.unflatten(jax.tree.structure(shape), leaves)
