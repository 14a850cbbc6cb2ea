"""The table of meanings, and the loop that interprets a program by it, equation by equation, on stacked arrays.

Every array is stacked: `[*devices, *batch, *local]`, with one leading dimension for each mesh axis, then one for each batch
dimension. A leading dimension of size one stands for any size: all devices, or all candidates of a batch, have the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from unity.pcg.jaxprs.foreign_primitives import name_of
from unity.pcg.jaxprs.source_lines import Place, place_of
from unity.pcg.operators.table import TABLE
from unity.pcg.types.axis import Axis
from unity.verify.semantics.domains import Array, ElementDomain, NotInterpreted, Plain

# Parameters that do not change the function that a primitive computes. (`_prim` holds shapes; its function has its own name.)
NOT_IN_NAMES = ("accuracy", "out_sharding", "sharding", "_prim")
PLAIN = Plain()


@dataclass(frozen=True)
class StackedValue:
    """A stacked array of concrete integers or truth values (`known`), or of elements of the domain."""

    array: Array
    known: bool


@dataclass(frozen=True)
class PrimitiveCall:
    """One equation: a primitive, its parameters, and the local shapes and dtypes of operands and results."""

    primitive: core.Primitive
    params: Mapping[str, Any]
    operands: tuple[Any, ...]
    results: tuple[Any, ...]
    source: str

    @property
    def name(self) -> str:
        return name_of(self.primitive.name, self.params)

    @property
    def function_name(self) -> str:
        """The primitive's name with the parameters that its value depends on: equal names mean equal functions."""
        params = [f"{k}={v}" for k, v in sorted(self.params.items()) if k not in NOT_IN_NAMES and v is not None]
        return f"{self.name}[{', '.join(params)}]" if params else self.name

    def refuse(self, why: str) -> NotInterpreted:
        """Return the error to raise for a call that has no meaning here."""
        return NotInterpreted(f"{self.name}: {why}" + (f" ({self.source})" if self.source else ""))

    def run_by_jax(self, arrays: Sequence[Array]) -> list[Array]:
        """Run the primitive itself on concrete local arrays."""
        with jax.enable_x64(True):
            results: Any = self.primitive.bind(*map(jnp.asarray, arrays), **self.params)
            return [np.asarray(x) for x in (results if self.primitive.multiple_results else [results])]


@dataclass(frozen=True)
class InterpreterRun:
    """The domain, the mesh axes and the number `lead` of leading dimensions (devices and batch) of one interpretation."""

    domain: ElementDomain
    axes: tuple[Axis, ...]
    lead: int

    def lift(self, value: StackedValue) -> Array:
        """Return a value as elements of the domain."""
        return self.domain.constant(value.array) if value.known else value.array

    def together(self, values: Sequence[StackedValue]) -> tuple[ElementDomain, list[Array]]:
        """Return the domain in which values meet, and their arrays in it: plain numbers if all are known, else elements."""
        if all(v.known for v in values):
            return PLAIN, [v.array for v in values]
        return self.domain, [self.lift(v) for v in values]

    def constant(self, value: Any, aval: Any) -> StackedValue:
        """Return a constant of a program, the same on all devices."""
        if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
            data = np.asarray(jax.random.key_data(value)).reshape((*aval.shape, -1))
            cells = [np.broadcast_to(self.domain.function(f"key {data[at].tolist()}"), ()) for at in np.ndindex(*aval.shape)]
            array, known = np.asarray(cells).reshape(aval.shape), False
        else:
            array = np.asarray(value)
            known = not is_inexact(aval.dtype)
            array = array.astype(aval.dtype) if known else self.domain.constant(array)
        return StackedValue(array.reshape((1,) * self.lead + tuple(aval.shape)), known)

    def typed(self, array: Array, known: bool, dtype: Any) -> StackedValue:
        """Return a result in its dtype: known numbers become elements where the dtype is inexact."""
        if not known:
            return StackedValue(array, False)
        if is_inexact(dtype):
            return StackedValue(self.domain.constant(array), False)
        return StackedValue(array.astype(dtype, copy=False), True)

    def shape(self, array: Array) -> tuple[int, ...]:
        """Return the local shape of a stacked array."""
        return array.shape[self.lead :]


def is_inexact(dtype: Any) -> bool:
    """Return whether tensors of a dtype are made of elements: floating and complex ones."""
    return jnp.issubdtype(dtype, np.inexact)


def is_element(dtype: Any) -> bool:
    """Return whether operands of a program are made of elements: floating and complex ones, and PRNG keys."""
    return is_inexact(dtype) or jnp.issubdtype(dtype, jax.dtypes.extended)


Meaning = Callable[[InterpreterRun, PrimitiveCall, Sequence[StackedValue]], list[StackedValue]]
Rearranging = Callable[[InterpreterRun, PrimitiveCall, Array], Array]
MEANINGS: dict[str, Meaning] = {}
ANY_OTHER = "anything else"  # the meaning of primitives that neither this table nor the operator table has


def meaning(*names: str) -> Callable[[Meaning], Meaning]:
    """Register the decorated function as the meaning of primitives of these names."""

    def register(function: Meaning) -> Meaning:
        MEANINGS.update(dict.fromkeys(names, function))
        return function

    return register


def structural(name: str) -> Callable[[Rearranging], Rearranging]:
    """Register the meaning of a primitive that only rearranges its one operand, whatever the elements are."""

    def register(rearrange: Rearranging) -> Rearranging:
        def apply_to_value(
            run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]
        ) -> list[StackedValue]:  # fmt: skip
            return [StackedValue(rearrange(run, call, values[0].array), values[0].known)]

        MEANINGS[name] = apply_to_value
        return rearrange

    return register


def evaluate(run: InterpreterRun, program: core.ClosedJaxpr, values: Sequence[StackedValue]) -> list[StackedValue]:
    """Interpret a program on stacked operands."""
    jaxpr = program.jaxpr
    env: dict[Any, StackedValue] = dict(zip(jaxpr.invars, values, strict=True))
    env.update((v, run.constant(c, v.aval)) for v, c in zip(jaxpr.constvars, program.consts, strict=True))

    def read(atom: Any) -> StackedValue:
        return run.constant(atom.val, atom.aval) if isinstance(atom, core.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        operands, results = tuple(v.aval for v in eqn.invars), tuple(v.aval for v in eqn.outvars)
        call = PrimitiveCall(eqn.primitive, eqn.params, operands, results, place_of(eqn.source_info, Place()).line)
        env.update(zip(eqn.outvars, apply(run, call, [read(a) for a in eqn.invars]), strict=True))
    return [read(a) for a in jaxpr.outvars]


def apply(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """Interpret one primitive.

    A primitive of the operator table must be registered here: as an unknown function of all its operands, every way to split
    it would be refuted. Only the names of primitives are read from the table.
    """
    interpret = MEANINGS.get(call.name)
    if interpret is None:
        if call.name in TABLE:
            raise call.refuse("the operator table splits it, but no meaning is registered for it")
        interpret = MEANINGS[ANY_OTHER]
    return interpret(run, call, values)
