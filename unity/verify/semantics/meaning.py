"""The value of a term: what every device holds of it. One definition, in whatever elements one likes.

An operator means its local program: the very one that `unity.exec` runs on a device's pieces, traced on their local shapes and
interpreted on all devices. So a rule that holds here holds of what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from unity.pcg.local import collectives as parallel
from unity.pcg.local.interpreter import run_body
from unity.pcg.parallel.resharding import Step
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import local_shape
from unity.pcg.types.varying_axes import vary
from unity.substitutions.language.term import Attribute, Term, Variable, subterms
from unity.substitutions.language.typecheck import TensorType, body_of, concrete, result_types
from unity.substitutions.language.vocabulary import VOCABULARY
from unity.verify.semantics.domains import Array, Domain
from unity.verify.semantics.interpret import interpret
from unity.verify.semantics.local_programs import used
from unity.verify.semantics.stacks import spread


def local_function(
    name: str, attributes: tuple[Attribute, ...], operands: tuple[TensorType, ...], axes: tuple[Axis, ...]
) -> Callable[..., list[jax.Array]]:
    """What one device runs for an operator, from its pieces of the operands to its pieces of the results."""
    operator = VOCABULARY[name]
    results = result_types(name, attributes, operands, axes)
    if operator.parallel:
        k = next(k for k, a in enumerate(axes) if a.name == attributes[-1])
        step = Step(name, (k,), operands[0].states, results[0].states)
        return lambda *xs: [parallel.apply(step, xs[0], axes)]
    body = body_of(name, concrete(operator, attributes, operands), tuple((t.shape, t.dtype) for t in operands))
    before, after = [t.states for t in operands], [t.states for t in results]

    def run(*xs: jax.Array) -> list[jax.Array]:
        found = run_body(body, xs, before, after, axes)
        return [vary(x, used(t, axes)) for x, t in zip(found, after, strict=True)]

    return run


@lru_cache(maxsize=1 << 14)
def local_program(
    name: str, attributes: tuple[Attribute, ...], operands: tuple[TensorType, ...], axes: tuple[Axis, ...]
) -> core.ClosedJaxpr:
    """The same as a jaxpr, its collectives in it."""
    return _traced(local_function(name, attributes, operands, axes), operands, axes)


def _traced(run: Callable[..., list[jax.Array]], operands: Sequence[TensorType], axes: tuple[Axis, ...]) -> core.ClosedJaxpr:
    """The jaxpr of a function of local pieces, its collectives in it."""
    pieces = [jax.ShapeDtypeStruct(local_shape(t.shape, t.states, axes), jnp.dtype(t.dtype)) for t in operands]
    if not axes:
        return jax.make_jaxpr(lambda *xs: tuple(run(*xs)))(*pieces)
    names = tuple(a.name for a in axes)
    mesh = AbstractMesh(tuple(a.size for a in axes), names, axis_types=(AxisType.Auto,) * len(axes))
    varying = [used(t.states, axes) for t in operands]

    def local(*xs: jax.Array) -> tuple[jax.Array, ...]:
        found = run(*(vary(x, v) for x, v in zip(xs, varying, strict=True)))
        return tuple(jnp.expand_dims(vary(x, names), 0) for x in found)

    spec = PartitionSpec()
    program = jax.make_jaxpr(jax.shard_map(local, mesh=mesh, in_specs=(spec,) * len(pieces), out_specs=PartitionSpec(names)))
    (equation,) = program(*pieces).eqns
    return core.ClosedJaxpr(equation.params["jaxpr"], ())


def apply(
    name: str,
    attributes: tuple[Attribute, ...],
    types: tuple[TensorType, ...],
    operands: Sequence[Array],
    axes: tuple[Axis, ...],
    domain: Domain,
    batch: int = 0,
) -> list[Array]:
    """An operator's results on all devices, `[*devices, *batch, *local]`, from its operands', stacked likewise."""
    found = interpret(local_program(name, attributes, types, axes), operands, domain, axes, batch)
    return [x.reshape(*x.shape[: len(axes) + batch], *x.shape[len(axes) + batch + 1 :]) for x in found] if axes else found


def evaluate(
    terms: Iterable[Term],
    types: Mapping[Term, TensorType],
    known: Mapping[str, Array],
    axes: tuple[Axis, ...],
    domain: Domain,
) -> dict[Term, Array]:
    """What all devices hold of every subterm, `[*devices, *local]`. `known` are the pieces of the variables."""
    found: dict[Term, Array] = {}
    for term in subterms(terms):
        if isinstance(term, Variable):
            found[term] = known[term.name]
        else:
            operands = tuple(types[x] for x in term.operands)
            values = [found[x] for x in term.operands]
            found[term] = apply(term.operator, term.attributes, operands, values, axes, domain)[term.result]
    return found


def random_pieces(type_: TensorType, axes: tuple[Axis, ...], domain: Domain, rng: np.random.Generator, batch: int = 0) -> Array:
    """The pieces of a random tensor: whole numbers from all over the domain; 0 to 15 where it holds indices."""
    lead = (batch,) if batch else ()
    shape, sizes = (*lead, *type_.shape), tuple(a.size for a in axes)
    if not jnp.issubdtype(jnp.dtype(type_.dtype), jnp.floating):
        return spread(rng.integers(0, 16, shape), len(type_.shape), type_.states, axes, domain)

    def draw(*s: int) -> Array:
        return domain.constant(rng.integers(-(1 << 30), 1 << 30, s).astype(float))

    partial = any(s.kind == "S" for s in type_.states)
    return spread(draw(*shape), len(type_.shape), type_.states, axes, domain, draw(*sizes, *shape) if partial else None)
