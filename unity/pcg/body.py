"""What an operator computes: a small straight-line program over JAX primitives, with nested calls inlined.

Bodies are made from jaxprs at capture and read by the factor solver, the cost model and the lowering. They are plain
immutable values; variables are integers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.extend import core, source_info_util

from unity.pcg.state import Shape

INLINED = frozenset({"jit", "pjit", "closed_call", "core_call"})  # calls that mean nothing but their body


@dataclass(frozen=True)
class Tensor:
    """A tensor's global shape and dtype (possibly an extended one, such as a PRNG key's)."""

    shape: Shape
    dtype: Any

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def floating(self) -> bool:
        """Whether it can have a gradient: floating point or complex (bfloat16 and float8 included)."""
        return jax.dtypes.issubdtype(self.dtype, np.inexact)

    @property
    def itemsize(self) -> int:
        return getattr(self.dtype, "itemsize", 8)

    @cached_property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.itemsize

    def __str__(self) -> str:
        name = getattr(self.dtype, "name", str(self.dtype))
        return f"{name}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, eq=False)
class Literal:
    """A constant scalar or small array written into a body."""

    value: Any
    tensor: Tensor

    @property
    def zero(self) -> bool:
        """Whether it may stand in a sum over devices without being counted several times."""
        return self.tensor.floating and not np.any(np.asarray(self.value))


Atom = int | Literal


@dataclass(frozen=True, eq=False)
class Equation:
    """One primitive applied. `group` names the nested calls (outermost first) that it came from, each with a number."""

    primitive: core.Primitive
    params: Mapping[str, Any]
    operands: tuple[Atom, ...]
    results: tuple[int, ...]
    source: str
    group: tuple[str, ...] = ()
    origin: core.JaxprEqn | None = None

    @property
    def name(self) -> str:
        return self.primitive.name


@dataclass(frozen=True, eq=False)
class Body:
    """A straight-line program: `equations` compute `outputs` from `inputs`; `tensors[v]` is the type of variable v."""

    inputs: tuple[int, ...]
    outputs: tuple[Atom, ...]
    equations: tuple[Equation, ...]
    tensors: Mapping[int, Tensor] = field(repr=False)

    def tensor(self, atom: Atom) -> Tensor:
        return atom.tensor if isinstance(atom, Literal) else self.tensors[atom]

    @cached_property
    def key(self) -> str:
        """A hash of the content: equal for bodies that differ only in the numbering of variables."""
        numbers: dict[int, int] = {}
        text = [f"in {[str(self.tensors[v]) for v in self.inputs]}"]
        for v in self.inputs:
            numbers[v] = len(numbers)
        for e in self.equations:
            names = [_atom_key(a, numbers) for a in e.operands]
            for v in e.results:
                numbers[v] = len(numbers)
            text.append(f"{e.name} {params_key(e.params)} {names} {[str(self.tensors[v]) for v in e.results]}")
        text.append(f"out {[_atom_key(a, numbers) for a in self.outputs]}")
        return hashlib.sha256("\n".join(text).encode()).hexdigest()[:32]


def _atom_key(atom: Atom, numbers: Mapping[int, int]) -> str:
    if isinstance(atom, Literal):
        return f"{atom.tensor}={np.asarray(atom.value).tobytes().hex() if atom.tensor.shape else atom.value!r}"
    return str(numbers[atom])


def params_key(params: Mapping[str, Any]) -> str:
    """Parameters as text that is the same in every process: nested programs by content, functions by name."""
    return ", ".join(f"{k}={_value_key(v)}" for k, v in sorted(params.items()))


def _value_key(value: Any) -> str:
    if isinstance(value, core.ClosedJaxpr):
        return close(value).key
    if isinstance(value, core.Jaxpr):
        return from_jaxpr(value).key
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(_value_key, value)) + ")"
    if callable(value) and not isinstance(value, type):
        return getattr(value, "__qualname__", type(value).__name__)
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def close(closed: core.ClosedJaxpr, also_inline: frozenset[str] = frozenset()) -> Body:
    """A closed jaxpr as a body, its constants written into it as literals."""
    body, consts = from_jaxpr(closed.jaxpr, also_inline), closed.consts
    if not consts:
        return body
    values = {v: Literal(c, body.tensors[v]) for v, c in zip(body.inputs, consts, strict=False)}

    def replace(a: Atom) -> Atom:
        return values.get(a, a) if isinstance(a, int) else a

    equations = tuple(dataclasses.replace(e, operands=tuple(map(replace, e.operands))) for e in body.equations)
    return Body(body.inputs[len(consts) :], tuple(map(replace, body.outputs)), equations, body.tensors)


class _Builder:
    """Numbers variables and collects equations while nested calls are inlined."""

    def __init__(self, inlined: frozenset[str]) -> None:
        self.inlined = inlined
        self.tensors: dict[int, Tensor] = {}
        self.equations: list[Equation] = []
        self.calls = 0

    def new(self, aval: Any) -> int:
        number = len(self.tensors)
        self.tensors[number] = Tensor(tuple(aval.shape), aval.dtype)
        return number

    def inline(self, jaxpr: core.Jaxpr, args: Sequence[Atom], group: tuple[str, ...]) -> tuple[Atom, ...]:
        env: dict[Any, Atom] = dict(zip((*jaxpr.constvars, *jaxpr.invars), args, strict=True))

        def read(atom: Any) -> Atom:
            if isinstance(atom, core.Literal):
                return Literal(atom.val, Tensor(tuple(atom.aval.shape), atom.aval.dtype))
            return env[atom]

        for eqn in jaxpr.eqns:
            operands = tuple(read(a) for a in eqn.invars)
            inner = self.program(eqn)
            if inner is not None:
                self.calls += 1
                name = f"{eqn.params.get('name', eqn.primitive.name)}#{self.calls}"
                closed = [self.constant(c) for c in inner.consts]
                results = self.inline(inner.jaxpr, (*closed, *operands), (*group, name))
                env.update(zip(eqn.outvars, results, strict=True))
                continue
            numbers = tuple(self.new(v.aval) for v in eqn.outvars)
            env.update(zip(eqn.outvars, numbers, strict=True))
            source = source_info_util.summarize(eqn.source_info)
            self.equations.append(Equation(eqn.primitive, eqn.params, operands, numbers, source, group, eqn))
        return tuple(read(a) for a in jaxpr.outvars)

    def program(self, eqn: core.JaxprEqn) -> core.ClosedJaxpr | None:
        """The program of a call that means nothing but its body."""
        if eqn.primitive.name not in self.inlined:
            return None
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        return core.ClosedJaxpr(inner, ()) if isinstance(inner, core.Jaxpr) else inner

    def constant(self, value: Any) -> Literal:
        aval = jax.typeof(value)
        return Literal(value, Tensor(tuple(aval.shape), aval.dtype))


def from_jaxpr(jaxpr: core.Jaxpr, also_inline: frozenset[str] = frozenset()) -> Body:
    """The body of a jaxpr; its inputs are the jaxpr's constants and then its arguments."""
    builder = _Builder(INLINED | also_inline)
    inputs = tuple(builder.new(v.aval) for v in (*jaxpr.constvars, *jaxpr.invars))
    outputs = builder.inline(jaxpr, inputs, ())
    return Body(inputs, outputs, tuple(builder.equations), builder.tensors)


def used(body: Body) -> Body:
    """The body without equations that no output depends on."""
    wanted = {a for a in body.outputs if isinstance(a, int)}
    kept = []
    for e in reversed(body.equations):
        if wanted.intersection(e.results):
            kept.append(e)
            wanted.update(a for a in e.operands if isinstance(a, int))
    return Body(body.inputs, body.outputs, tuple(reversed(kept)), body.tensors)


def extract(body: Body, chosen: Iterable[int], outputs: Sequence[int], duplicated: Mapping[int, int]) -> tuple[Body, tuple[int, ...]]:
    """The equations numbered `chosen` as a body of their own, and the variables of `body` that are its inputs.

    `duplicated` maps a variable to the equation that computes it where that equation is copied in rather than shared.
    """
    numbers = sorted(_with_copies(body, chosen, duplicated))
    made = {v for i in numbers for v in body.equations[i].results}
    inputs: dict[int, None] = {}
    for i in numbers:
        inputs.update((a, None) for a in body.equations[i].operands if isinstance(a, int) and a not in made)
    order = tuple(inputs)
    equations = tuple(body.equations[i] for i in numbers)
    kept = {v for e in equations for v in e.results} | set(order)
    return Body(order, tuple(outputs), equations, {v: body.tensors[v] for v in kept}), order


def _with_copies(body: Body, chosen: Iterable[int], duplicated: Mapping[int, int]) -> set[int]:
    found, stack = set(), list(chosen)
    while stack:
        i = stack.pop()
        if i not in found:
            found.add(i)
            stack += [duplicated[a] for a in body.equations[i].operands if isinstance(a, int) and a in duplicated]
    return found
