"""The table of meanings, and the loop that reads it: a program's equations, one after another, on stacked arrays.

Every array is stacked: `[*devices, *batch, *local]`, one leading dimension for each mesh axis, then one for each batch
dimension. A leading dimension may be of size one where all devices, or all candidates, have the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from unity.pcg.jaxprs.function_primitives import name_of
from unity.pcg.jaxprs.source_lines import Place, place_of
from unity.pcg.operators.table import TABLE
from unity.pcg.types.axis import Axis
from unity.verify.semantics.domains import Array, Domain, NotInterpreted, Plain


@dataclass(frozen=True)
class Value:
    """A stacked array. `known`: of concrete integers or truth values; otherwise of the domain's elements."""

    array: Array
    known: bool


@dataclass(frozen=True)
class Application:
    """One equation: a primitive, its parameters, and the local shapes and dtypes of operands and results."""

    primitive: core.Primitive
    params: Mapping[str, Any]
    operands: tuple[Any, ...]
    results: tuple[Any, ...]
    source: str

    @property
    def name(self) -> str:
        return name_of(self.primitive.name, self.params)

    def refuse(self, why: str) -> NotInterpreted:
        """The error to raise."""
        return NotInterpreted(f"{self.name}: {why}" + (f" ({self.source})" if self.source else ""))


PLAIN = Plain()


@dataclass(frozen=True)
class Run:
    """What an interpretation is done with. `lead`: the number of leading dimensions, devices' and batches'."""

    domain: Domain
    axes: tuple[Axis, ...]
    lead: int

    def lift(self, value: Value) -> Array:
        """A value as elements."""
        return self.domain.constant(value.array) if value.known else value.array

    def together(self, values: Sequence[Value]) -> tuple[Domain, list[Array]]:
        """Values that meet in one operation: plain numbers if all are known, otherwise elements."""
        if all(v.known for v in values):
            return PLAIN, [v.array for v in values]
        return self.domain, [self.lift(v) for v in values]

    def constant(self, value: Any, aval: Any) -> Value:
        """A constant of a program, the same on all devices."""
        if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
            data = np.asarray(jax.random.key_data(value)).reshape((*aval.shape, -1))
            cells = [np.broadcast_to(self.domain.function(f"key {data[at].tolist()}"), ()) for at in np.ndindex(*aval.shape)]
            array, known = np.asarray(cells).reshape(aval.shape), False
        else:
            array = np.asarray(value)
            known = not floating(aval.dtype)
            array = array.astype(aval.dtype) if known else self.domain.constant(array)
        return Value(array.reshape((1,) * self.lead + tuple(aval.shape)), known)

    def shape(self, array: Array) -> tuple[int, ...]:
        """The local shape."""
        return array.shape[self.lead :]


def floating(dtype: Any) -> bool:
    """Whether tensors of a dtype are made of elements (complex numbers too)."""
    return jnp.issubdtype(dtype, np.inexact)


def is_element(dtype: Any) -> bool:
    """Whether tensors of a dtype are made of elements where a program begins: floating ones, and PRNG keys."""
    return floating(dtype) or jnp.issubdtype(dtype, jax.dtypes.extended)


Meaning = Callable[[Run, Application, Sequence[Value]], list[Value]]
MEANINGS: dict[str, Meaning] = {}


def meaning(*names: str) -> Callable[[Meaning], Meaning]:
    """Registers what primitives of these names do."""

    def register(function: Meaning) -> Meaning:
        MEANINGS.update(dict.fromkeys(names, function))
        return function

    return register


def structural(*names: str) -> Callable[[Callable[[Run, Application, Array], Array]], Callable[[Run, Application, Array], Array]]:
    """Registers primitives of one operand that only move elements about, whatever these are."""

    def register(function: Callable[[Run, Application, Array], Array]) -> Callable[[Run, Application, Array], Array]:
        for name in names:
            MEANINGS[name] = lambda run, app, values: [Value(function(run, app, values[0].array), values[0].known)]
        return function

    return register


def evaluate(run: Run, program: core.ClosedJaxpr, values: Sequence[Value]) -> list[Value]:
    """The results of a program."""
    jaxpr = program.jaxpr
    env: dict[Any, Value] = dict(zip(jaxpr.invars, values, strict=True))
    env.update((v, run.constant(c, v.aval)) for v, c in zip(jaxpr.constvars, program.consts, strict=True))

    def read(atom: Any) -> Value:
        return run.constant(atom.val, atom.aval) if isinstance(atom, core.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        operands, results = tuple(v.aval for v in eqn.invars), tuple(v.aval for v in eqn.outvars)
        app = Application(eqn.primitive, eqn.params, operands, results, place_of(eqn.source_info, Place()).line)
        env.update(zip(eqn.outvars, apply(run, app, [read(a) for a in eqn.invars]), strict=True))
    return [read(a) for a in jaxpr.outvars]


def apply(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """The results of one primitive."""
    found = MEANINGS.get(app.name)
    if found is None:
        if app.name in TABLE:
            raise app.refuse("it may be parallelized, but what it means is not said")
        found = MEANINGS["anything else"]
    return found(run, app, values)
