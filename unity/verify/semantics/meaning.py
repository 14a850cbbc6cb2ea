"""The value of a term on all devices, over any domain of elements.

The meaning of an operator is its local program: the one that a plan runs on a device's pieces (`unity.pcg.local`), traced on their
local shapes and interpreted on all devices. So a rule that holds here holds for the program that runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from unity.pcg.jaxprs.trace_contexts import precision_of
from unity.pcg.local import collectives as parallel
from unity.pcg.local.interpreter import run_body
from unity.pcg.parallel.resharding import ReshardingStep
from unity.pcg.types.axis import Axis
from unity.pcg.types.factors import TABLE
from unity.pcg.types.parallel_type import local_shape
from unity.pcg.types.varying_axes import vary
from unity.substitutions.language.term import Attribute, Term, Variable, subterms
from unity.substitutions.language.typecheck import TensorType, body_of, concrete, result_types
from unity.substitutions.language.vocabulary import VOCABULARY
from unity.verify.semantics.domains import Array, ElementDomain
from unity.verify.semantics.interpret import interpret
from unity.verify.semantics.local_programs import varying_names
from unity.verify.semantics.pieces import spread
from unity.verify.semantics.primitives.core import StackedValue
from unity.verify.semantics.symbolic import Symbolic


def operator_function(
    name: str, attributes: tuple[Attribute, ...], operands: tuple[TensorType, ...], axes: tuple[Axis, ...]
) -> Callable[..., list[jax.Array]]:
    """Return the function that one device runs for an operator, from pieces of the operands to pieces of the results."""
    operator = VOCABULARY[name]
    results = result_types(name, attributes, operands, axes)
    if operator.parallel:
        k = next(k for k, a in enumerate(axes) if a.name == attributes[-1])
        step = ReshardingStep(name, (k,), operands[0].states, results[0].states)
        return lambda *xs: [parallel.apply(step, xs[0], axes)]
    body = body_of(name, concrete(operator, attributes, operands), tuple((t.shape, t.dtype) for t in operands))
    before, after = [t.states for t in operands], [t.states for t in results]

    def run(*xs: jax.Array) -> list[jax.Array]:
        outputs = run_body(body, xs, before, after, axes)
        return [vary(x, varying_names(t, axes)) for x, t in zip(outputs, after, strict=True)]

    return run


@TABLE.clears
@lru_cache(maxsize=1 << 14)
def local_program(
    name: str, attributes: tuple[Attribute, ...], operands: tuple[TensorType, ...], axes: tuple[Axis, ...]
) -> core.ClosedJaxpr:
    """Return the program that one device runs for an operator, collectives included."""
    return _traced(operator_function(name, attributes, operands, axes), operands, axes)


def _traced(run: Callable[..., list[jax.Array]], operands: Sequence[TensorType], axes: tuple[Axis, ...]) -> core.ClosedJaxpr:
    """Trace a function of local pieces, collectives included."""
    pieces = [jax.ShapeDtypeStruct(local_shape(t.shape, t.states, axes), jnp.dtype(t.dtype)) for t in operands]
    if not axes:
        with precision_of(pieces):
            return jax.make_jaxpr(lambda *xs: tuple(run(*xs)))(*pieces)
    names = tuple(a.name for a in axes)
    mesh = AbstractMesh(tuple(a.size for a in axes), names, axis_types=(AxisType.Auto,) * len(axes))
    varying = [varying_names(t.states, axes) for t in operands]

    def local(*xs: jax.Array) -> tuple[jax.Array, ...]:
        outputs = run(*(vary(x, v) for x, v in zip(xs, varying, strict=True)))
        return tuple(jnp.expand_dims(vary(x, names), 0) for x in outputs)

    spec = PartitionSpec()
    program = jax.make_jaxpr(jax.shard_map(local, mesh=mesh, in_specs=(spec,) * len(pieces), out_specs=PartitionSpec(names)))
    with precision_of(pieces):
        (equation,) = program(*pieces).eqns
    return core.ClosedJaxpr(equation.params["jaxpr"], ())


def apply(
    name: str,
    attributes: tuple[Attribute, ...],
    types: tuple[TensorType, ...],
    operands: Sequence[Array],
    axes: tuple[Axis, ...],
    domain: ElementDomain,
    batch: int = 0,
) -> list[Array]:
    """Apply an operator on all devices, to operands and with results `[*devices, *batch, *local]`."""
    results, lead = interpret(local_program(name, attributes, types, axes), operands, domain, axes, batch), len(axes) + batch
    return [x.reshape(*x.shape[:lead], *x.shape[lead + 1 :]) for x in results] if axes else results


def evaluate(
    terms: Iterable[Term],
    types: Mapping[Term, TensorType],
    variables: Mapping[str, Array],
    axes: tuple[Axis, ...],
    domain: ElementDomain,
) -> dict[Term, Array]:
    """Return the pieces `[*devices, *local]` of every subterm, from those of the variables."""
    pieces: dict[Term, Array] = {}
    for term in subterms(terms):
        if isinstance(term, Variable):
            pieces[term] = variables[term.name]
        else:
            operands = tuple(types[x] for x in term.operands)
            values = [pieces[x] for x in term.operands]
            pieces[term] = apply(term.operator, term.attributes, operands, values, axes, domain)[term.result]
    return pieces


def symbolic_tensor(name: str, type_: TensorType, domain: Symbolic, rng: np.random.Generator, low: int, high: int) -> StackedValue:
    """Return a whole tensor of symbols, or of random indices from `low` up to, but not including, `high`."""
    if type_.dtype.startswith("float"):
        return StackedValue(domain.symbols(name, type_.shape), False)
    return StackedValue(rng.integers(low, high, type_.shape), True)


def random_pieces(
    type_: TensorType, axes: tuple[Axis, ...], domain: ElementDomain, rng: np.random.Generator, batch: int = 0
) -> Array:
    """Draw the pieces of a random tensor: whole numbers of up to 30 bits as elements of the domain, or indices from 0 to 15."""
    lead = (batch,) if batch else ()
    shape, sizes = (*lead, *type_.shape), tuple(a.size for a in axes)
    if not jnp.issubdtype(jnp.dtype(type_.dtype), jnp.floating):
        return spread(rng.integers(0, 16, shape), len(type_.shape), type_.states, axes, domain)

    def draw(*s: int) -> Array:
        return domain.constant(rng.integers(-(1 << 30), 1 << 30, s).astype(float))

    partial = any(s.kind == "S" for s in type_.states)
    return spread(draw(*shape), len(type_.shape), type_.states, axes, domain, draw(*sizes, *shape) if partial else None)
