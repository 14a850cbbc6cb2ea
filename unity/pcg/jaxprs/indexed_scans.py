"""Scans of stacks: rows that the steps of a loop read or write by a counter become operands and results of the steps.

A `lax.fori_loop` whose steps read `x[:, t]` computes what a scan over the columns of `x` computes. But its derivative adds a
gradient as large as `x` in every step, of which one column is not zero, and `y.at[:, t].set(...)` carries all of `y` through every
step. Stacks are read and written once. Integers have no gradients, and become stacks only if they lie in the order of the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

from unity.pcg.jaxprs.jaxprs import SCANNED, floating, with_programs
from unity.pcg.jaxprs.loops import constants_and_carry
from unity.pcg.jaxprs.trace_contexts import without_mesh
from unity.pcg.jaxprs.weak_types import struct_of

ARITHMETIC: Mapping[str, Callable[..., Any]] = {
    "add": np.add, "eq": np.equal, "ge": np.greater_equal, "gt": np.greater, "le": np.less_equal, "lt": np.less, "max": np.maximum,
    "min": np.minimum, "mul": np.multiply, "ne": np.not_equal, "neg": np.negative, "sub": np.subtract,
}  # fmt: skip
VIEWS = ("broadcast_in_dim", "reshape", "squeeze")
INLINED = ("jit", "pjit")
READS, WRITES = ("dynamic_slice", "gather"), ("dynamic_update_slice", "scatter", "scatter-add")
DEEPEST = 8  # equations from an array of numbers to the `iota` that it is computed from


def with_stacked_scans(program: Any) -> Any:
    """Let the scans of a program, and of its nested programs, take as stacks what their steps index by a counter."""

    def changed(program: Any) -> Any:
        if not isinstance(program, core.Jaxpr):  # closed, before JAX 0.12
            inside = changed(program.jaxpr)
            return program if inside is program.jaxpr else program.replace(jaxpr=inside)
        makers = {v: e for e in program.eqns for v in e.outvars}
        eqns = [_stacked(nested(e), makers) for e in program.eqns]
        return program if all(a is b for a, b in zip(eqns, program.eqns, strict=True)) else program.replace(eqns=eqns)

    def nested(eqn: core.JaxprEqn) -> core.JaxprEqn:
        params = {name: with_programs(value, changed) for name, value in eqn.params.items()}
        return eqn if all(params[name] is value for name, value in eqn.params.items()) else eqn.replace(params=params)

    return with_programs(program, changed)


def _stacked(eqn: core.JaxprEqn, makers: Mapping[Any, core.JaxprEqn]) -> core.JaxprEqn:
    """Return an equation as a scan of stacks if it is a scan that indexes by a counter.

    Args:
        eqn: the equation.
        makers: the equations that compute the variables of its program.
    """
    if eqn.primitive.name not in SCANNED or eqn.params["length"] < 2 or eqn.effects:
        return eqn
    steps = _Steps(eqn, makers)
    reads, writes = list(steps.reads()), list(steps.writes())
    if not reads and not writes:
        return eqn
    with without_mesh():
        program = jax.make_jaxpr(steps.rewritten(reads, writes))(*(struct_of(v.aval) for v in eqn.invars))
    return eqn.replace(primitive=primitives.closed_call_p, params={"call_jaxpr": program}, effects=program.effects)


@dataclass(frozen=True)
class _Row:
    """A row of an array that every step of a scan reads or writes.

    Attributes:
        eqn: the equation that does.
        number: the scan's operand with the array.
        dim: the array's dimension of which the row has one position.
        dropped: whether the row lacks the dimension.
        lowest: the lowest position of all steps.
        descends: whether a stack in the order of the scan's other stacks begins with the highest.
    """

    eqn: core.JaxprEqn
    number: int
    dim: int
    dropped: bool
    lowest: int
    descends: bool

    def stack(self, array: Any, length: int) -> Any:
        """Return the rows of all steps."""
        rows = lax.slice_in_dim(array, self.lowest, self.lowest + length, axis=self.dim)
        rows = jnp.moveaxis(lax.rev(rows, (self.dim,)) if self.descends else rows, self.dim, 0)
        return rows if self.dropped else lax.expand_dims(rows, (self.dim + 1,))

    def written(self, array: Any, rows: Any) -> Any:
        """Return an array after all steps have written their rows to it."""
        rows = jnp.moveaxis(rows if self.dropped else lax.squeeze(rows, (self.dim + 1,)), 0, self.dim)
        rows = lax.rev(rows, (self.dim,)) if self.descends else rows
        last = self.lowest + rows.shape[self.dim]
        if self.eqn.primitive.name == "scatter-add":
            rows = lax.slice_in_dim(array, self.lowest, last, axis=self.dim) + rows
        before = lax.slice_in_dim(array, 0, self.lowest, axis=self.dim)
        after = lax.slice_in_dim(array, last, None, axis=self.dim)
        parts = [part for part in (before, rows, after) if part.shape[self.dim]]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, self.dim)


class _Steps:
    """The steps of a scan, and the integers in them that a counter determines.

    Attributes:
        scan: its equation.
        step: the program of a step.
        known: the values of single integers and truth values in all steps, in the order in which they run.
        users: the number of reads of each variable.
        replaced: the equations, by id, that rows take the place of, besides those of the rows.
    """

    def __init__(self, scan: core.JaxprEqn, makers: Mapping[Any, core.JaxprEqn]) -> None:
        self.scan, self.length, self.reverse = scan, scan.params["length"], scan.params["reverse"]
        self.closed = scan.params["jaxpr"]
        self.step = self.closed if isinstance(self.closed, core.Jaxpr) else self.closed.jaxpr
        self.consts, self.carried = constants_and_carry(scan.params)
        self.known: dict[Any, np.ndarray] = {}
        self.users: dict[Any, int] = {}
        self.replaced: set[int] = set()
        self.note_counters(makers)
        if self.known:
            self.step = self.step.replace(eqns=list(self.inlined(self.step.eqns)))
        self.makers = {v: e for e in self.step.eqns for v in e.outvars}
        for a in (*(a for e in self.step.eqns for a in e.invars), *self.step.outvars):
            if isinstance(a, core.Var):
                self.users[a] = self.users.get(a, 0) + 1

    @property
    def carry(self) -> range:
        """The operands that are carried."""
        return range(self.consts, self.consts + self.carried)

    def note_counters(self, makers: Mapping[Any, core.JaxprEqn]) -> None:
        """Find carried integers to which every step adds the same number, and scanned arrays of numbers."""
        inside = {v: e for e in self.step.eqns for v in e.outvars}
        for k, (v, operand) in enumerate(zip(self.step.invars, self.scan.invars, strict=True)):
            if k < self.consts or not _is_number(_aval(v)):
                continue
            if k in self.carry:
                first, result = _outside(operand, makers), self.step.outvars[k - self.consts]
                update = inside.get(result) if isinstance(result, core.Var) else None
                by = _increment(update, v) if update is not None else None
                if first is not None and by is not None:
                    dtype = _aval(v).dtype  # in which counters of narrow types wrap
                    self.known[v] = first.astype(dtype) + np.asarray(by).astype(dtype) * np.arange(self.length).astype(dtype)
            elif (values := _outside(operand, makers)) is not None:
                self.known[v] = values[::-1] if self.reverse else values

    def inlined(self, eqns: Sequence[core.JaxprEqn]) -> Iterator[core.JaxprEqn]:
        """Note all numbers, and yield the equations; a call that computes numbers, or indexes by them, is replaced by its own."""
        for e in eqns:
            are_known = [self.read(a) is not None for a in e.invars]
            if e.primitive.name in INLINED and any(are_known):
                inner: Any = e.params["jaxpr"]
                program: core.Jaxpr = getattr(inner, "jaxpr", inner)
                indexes = any(i.primitive.name in (*READS, *WRITES) for i in program.eqns)
                if not inner.consts and (all(are_known) or indexes) and (equations := _in_place_of(e, program)):
                    yield from self.inlined(equations)
                    continue
            if len(e.outvars) == 1 and (values := _evaluated(e, self.read)) is not None:
                self.known[e.outvars[0]] = np.broadcast_to(values, (self.length,))
            yield e

    def read(self, atom: Any) -> np.ndarray | None:
        if _is_literal(atom):
            return _literal(atom)
        return self.known.get(atom) if isinstance(atom, core.Var) else None  # literals of arrays have no hash

    def reads(self) -> Iterator[_Row]:
        """Find what steps read row after row from arrays that they do not change."""
        unchanged = {self.step.invars[k] for k in range(self.consts)}
        unchanged |= {self.step.invars[k] for k in self.carry if self.step.outvars[k - self.consts] is self.step.invars[k]}
        for e in self.step.eqns if self.known else ():
            if e.primitive.name in READS and isinstance(v := e.invars[0], core.Var) and v in unchanged:
                row = self.row(e, self.step.invars.index(v), e.params["slice_sizes"], *self.read_places(e))
                if row is not None and (floating(v.aval) or self.is_stack(row, v.aval)):
                    yield self.squeezed(row)

    def squeezed(self, row: _Row) -> _Row:
        """Return a row as what is read of it, if that is the row without the dimension: JAX would stack it for the derivative."""
        readers = [e for e in self.step.eqns if any(a is row.eqn.outvars[0] for a in e.invars)]
        if row.dropped or len(readers) != 1 or self.users[row.eqn.outvars[0]] != 1:
            return row
        (reader,) = readers
        if reader.primitive.name != "squeeze" or tuple(reader.params["dimensions"]) != (row.dim,):
            return row
        self.replaced.add(id(row.eqn))
        return replace(row, eqn=reader, dropped=True)

    def is_stack(self, row: _Row, aval: Any) -> bool:
        return (row.dim, row.lowest, row.descends) == (0, 0, False) and aval.shape[0] == self.length

    def writes(self) -> Iterator[_Row]:
        """Find what steps write row after row to carried arrays that nothing else reads."""
        for k in self.carry if self.known else ():
            v, result = self.step.invars[k], self.step.outvars[k - self.consts]
            e = self.makers.get(result) if isinstance(result, core.Var) else None
            if e is None or e.primitive.name not in WRITES or e.invars[0] is not v or self.users[v] + self.users[result] > 2:
                continue
            if e.primitive.name == "scatter" and not _replaces(e):
                continue
            sizes = _aval(e.invars[1 if e.primitive.name == "dynamic_update_slice" else 2]).shape
            places, dropped = self.write_places(e)
            for d in dropped:
                sizes = (*sizes[:d], 1, *sizes[d:])
            row = self.row(e, k, sizes, places, dropped) if len(sizes) == _aval(v).ndim else None
            if row is not None:
                yield row

    def read_places(self, e: core.JaxprEqn) -> tuple[dict[int, np.ndarray | None], Sequence[int]]:
        """Return the known positions in every dimension that a look-up indexes, and the dimensions that its result lacks."""
        if e.primitive.name == "dynamic_slice":
            return dict(enumerate(map(self.read, e.invars[1:]))), ()
        numbers = e.params["dimension_numbers"]
        in_order = tuple(numbers.offset_dims) == tuple(range(_aval(e.outvars[0]).ndim)) and not numbers.operand_batching_dims
        places = self.components(e.invars[1], numbers.start_index_map) if in_order else {}
        return places, sorted(numbers.collapsed_slice_dims)

    def write_places(self, e: core.JaxprEqn) -> tuple[dict[int, np.ndarray | None], Sequence[int]]:
        """Return the known positions in every dimension that an update indexes, and the dimensions that it lacks."""
        if e.primitive.name == "dynamic_update_slice":
            return dict(enumerate(map(self.read, e.invars[2:]))), ()
        numbers = e.params["dimension_numbers"]
        in_order = tuple(numbers.update_window_dims) == tuple(range(_aval(e.invars[2]).ndim)) and not numbers.operand_batching_dims
        places = self.components(e.invars[1], numbers.scatter_dims_to_operand_dims) if in_order else {}
        return places, sorted(numbers.inserted_window_dims)

    def components(self, indices: Any, dims: Sequence[int]) -> dict[int, np.ndarray | None]:
        """Return the known values of an index vector, by the dimension that each is for."""
        parts: Sequence[Any] = [indices]
        if len(dims) > 1:
            maker = self.makers.get(indices) if isinstance(indices, core.Var) else None
            parts = maker.invars if maker is not None and maker.primitive.name == "concatenate" else ()
        if len(parts) != len(dims) or any(_aval(a).shape != (1,) for a in parts):
            return dict.fromkeys(dims)
        return {int(d): self.read(a) for d, a in zip(dims, parts, strict=True)}

    def row(
        self, e: core.JaxprEqn, number: int, sizes: Sequence[int], places: Mapping[int, np.ndarray | None], dropped: Sequence[int]
    ) -> _Row | None:
        """Return what an equation reads or writes as a row, if the steps go through the rows one by one."""
        shape = _aval(e.invars[0]).shape
        single = [d for d, (n, size) in enumerate(zip(shape, sizes, strict=True)) if size != n]
        clips = e.primitive.name in ("dynamic_slice", "dynamic_update_slice")
        if len(single) != 1 or sizes[single[0]] != 1 or not set(dropped) <= set(single) or (d := single[0]) not in places:
            return None
        if not clips and any(p is None or np.any(p != 0) for other, p in places.items() if other != d):
            return None
        positions = places[d]
        if positions is None or (not clips and (positions.min() < 0 or positions.max() >= shape[d])):
            return None
        positions = np.clip(np.broadcast_to(positions, (self.length,)).astype(np.int64), 0, shape[d] - 1)
        steps = np.unique(np.diff(positions))
        if len(steps) != 1 or abs(steps[0]) != 1:
            return None
        return _Row(e, number, d, bool(dropped), int(positions.min()), bool((steps[0] < 0) != self.reverse))

    def rewritten(self, reads: Sequence[_Row], writes: Sequence[_Row]) -> Callable[..., Sequence[Any]]:
        """Return the scan as a function of its operands, with these rows as stacks."""
        replaced, gone = self.replaced | {id(row.eqn) for row in (*reads, *writes)}, {row.number for row in writes}
        inputs, results = self.step.invars, self.step.outvars
        carry = [k for k in self.carry if k not in gone]
        consts, end = range(self.consts), self.consts + self.carried
        unnamed = core.DebugInfo("step", "", None, None)
        step = self.step.replace(
            invars=[*(inputs[k] for k in (*consts, *carry)), *inputs[end:], *(row.eqn.outvars[0] for row in reads)],
            outvars=[*(results[k - self.consts] for k in carry), *results[self.carried :], *map(_update, writes)],
            eqns=[e for e in self.step.eqns if id(e) not in replaced],
            debug_info=unnamed,
        )
        run = core.jaxpr_as_fun(step if isinstance(self.closed, core.Jaxpr) else self.closed.replace(jaxpr=step))

        def scan(*operands: Any) -> Sequence[Any]:
            def one(state: Sequence[Any], rows: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
                out = run(*operands[: self.consts], *state, *rows)
                return out[: len(carry)], out[len(carry) :]

            stacks = [*operands[end:], *(row.stack(operands[row.number], self.length) for row in reads)]
            options = {"length": self.length, "reverse": self.reverse, "unroll": self.scan.params["unroll"]}
            state, rows = lax.scan(one, [operands[k] for k in carry], stacks, **options)
            own = len(rows) - len(writes)
            final = dict(zip(carry, state, strict=True))
            final |= {row.number: row.written(operands[row.number], r) for row, r in zip(writes, rows[own:], strict=True)}
            return [*(final[k] for k in self.carry), *rows[:own]]

        return scan


def _update(row: _Row) -> Any:
    """Return what an equation writes."""
    return row.eqn.invars[1 if row.eqn.primitive.name == "dynamic_update_slice" else 2]


def _aval(atom: Any) -> Any:
    """Return the type of an atom, of which JAX states neither shape nor dtype."""
    return atom.aval


def _is_number(aval: Any) -> bool:
    return aval.shape == () and jnp.issubdtype(aval.dtype, jnp.integer)


def _is_literal(atom: Any) -> bool:
    return isinstance(atom, core.Literal) and np.size(atom.val) == 1 and np.asarray(atom.val).dtype.kind in "iub"


def _literal(atom: Any) -> np.ndarray:
    return np.asarray(atom.val).astype(atom.aval.dtype).reshape(-1)


def _replaces(scatter: core.JaxprEqn) -> bool:
    """Return whether a scatter writes its updates as they are, unlike `x.at[i].apply(f)`, which has none."""
    program = scatter.params["update_jaxpr"]
    program = getattr(program, "jaxpr", program)
    return program is None or program.outvars[0] is program.invars[1]


def _increment(update: core.JaxprEqn, counter: Any) -> int | None:
    """Return what an equation adds to a counter."""
    if update.primitive.name not in ("add", "sub"):
        return None
    atoms: list[Any] = update.invars
    one, other = atoms
    if one is counter and _is_literal(other):
        return int(other.val) if update.primitive.name == "add" else -int(other.val)
    return int(one.val) if other is counter and _is_literal(one) and update.primitive.name == "add" else None


def _outside(atom: Any, makers: Mapping[Any, core.JaxprEqn], depth: int = DEEPEST) -> np.ndarray | None:
    """Return the values of an array of numbers, flattened, or of a single one, that is computed from an `iota` or a literal."""
    if _is_literal(atom):
        return _literal(atom)
    e = makers.get(atom) if isinstance(atom, core.Var) else None
    if e is None or not depth or len(e.outvars) != 1:
        return None
    aval = _aval(e.outvars[0])
    if e.primitive.name == "iota":
        is_whole = isinstance(aval.dtype, np.dtype) and aval.dtype.kind in "iu"  # a floating one rounds
        return np.arange(aval.size).astype(aval.dtype) if is_whole and aval.ndim == 1 else None
    if e.primitive.name == "rev":
        values = _outside(e.invars[0], makers, depth - 1) if len(e.params["dimensions"]) == aval.ndim else None
        return None if values is None else values[::-1]
    return _evaluated(e, lambda a: _outside(a, makers, depth - 1))


def _evaluated(e: core.JaxprEqn, read: Callable[[Any], np.ndarray | None]) -> np.ndarray | None:
    """Return the integers or truth values of an equation's result, one for every step or element; None if they are not known."""
    name, aval = e.primitive.name, _aval(e.outvars[0])
    kind = np.dtype(aval.dtype).kind if isinstance(aval.dtype, np.dtype) else ""
    if kind not in ("i", "u", "b") or name not in (*ARITHMETIC, *VIEWS, "select_n", "convert_element_type"):
        return None
    if name in VIEWS and aval.size != _aval(e.invars[0]).size:
        return None
    operands = [x for x in map(read, e.invars) if x is not None]
    if len(operands) < len(e.invars):
        return None
    if name == "select_n":
        if len(operands) != 3:
            return None
        values = np.where(operands[0], operands[2], operands[1])
    else:
        values = ARITHMETIC[name](*operands) if name in ARITHMETIC else operands[0]
    return np.asarray(values).astype(aval.dtype)


def _in_place_of(call: core.JaxprEqn, program: core.Jaxpr) -> list[core.JaxprEqn]:
    """Return the equations of a call's program, of the call's own operands and results.

    None are returned if a result is an operand or a literal.
    """
    new: dict[Any, Any] = dict(zip(program.invars, call.invars, strict=True))

    def read(atom: Any) -> Any:
        return new.get(atom, atom) if isinstance(atom, core.Var) else atom

    results = {v: r for v, r in zip(program.outvars, call.outvars, strict=True) if isinstance(v, core.Var) and v not in new}
    if len(results) != len(call.outvars):
        return []
    eqns = []
    for e in program.eqns:
        new.update((v, results.get(v) or core.Var(v.aval)) for v in e.outvars)
        eqns.append(e.replace(invars=list(map(read, e.invars)), outvars=[new[v] for v in e.outvars]))
    return eqns
