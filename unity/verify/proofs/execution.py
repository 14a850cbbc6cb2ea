"""Execution of a rule by JAX: both sides run as programs on real or virtual devices, values and gradients.

The last of the four layers (docs/rules.md). It shares the operators' local bodies with the layers that interpret them, but runs
them compiled, with XLA's collectives. Sides are compared as whole tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from unity.pcg.types.axis import Axis
from unity.pcg.types.varying_axes import vary
from unity.substitutions.language.rule import Rule
from unity.substitutions.language.term import Apply, Term, Variable, subterms
from unity.substitutions.language.typecheck import TensorType, typecheck
from unity.verify.proofs.instances import Types
from unity.verify.semantics.domains import Array
from unity.verify.semantics.local_programs import dual_type, varying_names
from unity.verify.semantics.meaning import operator_function
from unity.verify.semantics.pieces import join, spread
from unity.verify.semantics.primitives.core import PLAIN

Typed = Mapping[Term, TensorType]
TOLERANCE = 1e-9  # in float64, of the largest element: a few operators on small tensors


@dataclass(frozen=True)
class Deviation:
    """The largest difference between two sides, relative to the largest element: of values, and of the variables' gradients."""

    values: float
    gradients: float

    @property
    def equal(self) -> bool:
        return max(self.values, self.gradients) <= TOLERANCE


def run(rule: Rule, variables: Types, axes: tuple[Axis, ...], seed: int = 0) -> Deviation:
    """Run both sides of a rule in float64, on as many devices as the axes have. Raises ValueError if there are too few."""
    with jax.enable_x64(True):
        variables = {name: TensorType(t.shape, t.states, _double_precision(t.dtype)) for name, t in variables.items()}
        types = typecheck(rule.sides, variables, axes)
        rng = np.random.default_rng(seed)
        operands = {name: _random_pieces(t, axes, rng) for name, t in variables.items()}
        cotangents = [_random_pieces(_dual(types[t]), axes, rng) for t in rule.left]
        left, right = (_run_side(terms, types, operands, cotangents, axes) for terms in (rule.left, rule.right))
    n = len(rule.left)
    result_types = [types[t] for t in rule.left] + [_dual(variables[name]) for name in _floating(variables)]
    deviations = [
        _relative_difference(*(join(x, t.shape, t.states, axes, PLAIN) for x in pair))
        for *pair, t in zip(left, right, result_types, strict=True)
    ]
    return Deviation(max(deviations[:n], default=0.0), max(deviations[n:], default=0.0))


def _double_precision(dtype: str) -> str:
    return "float64" if dtype == "float32" else dtype


def _dual(type_: TensorType) -> TensorType:
    return TensorType(type_.shape, dual_type(type_.states), type_.dtype)


def _floating(variables: Types) -> list[str]:
    return [name for name, t in variables.items() if t.dtype.startswith("float")]


def _random_pieces(type_: TensorType, axes: tuple[Axis, ...], rng: np.random.Generator) -> Array:
    rank, sizes = len(type_.shape), tuple(a.size for a in axes)
    if not type_.dtype.startswith("float"):
        return spread(rng.integers(0, 8, type_.shape).astype(type_.dtype), rank, type_.states, axes, PLAIN)
    addends = rng.normal(size=(*sizes, *type_.shape)) if any(s.kind == "S" for s in type_.states) else None
    return spread(rng.normal(size=type_.shape), rank, type_.states, axes, PLAIN, addends)


def _run_side(
    terms: Sequence[Term], types: Typed, operands: Mapping[str, Array], cotangents: Sequence[Array], axes: tuple[Axis, ...]
) -> list[Array]:
    """Return the results, then the gradients of floating variables, each `[*devices, *local]`."""
    floating = [n for n in operands if types[Variable(n)].dtype.startswith("float")]

    def device(pieces: Mapping[str, Any], cotangents: Sequence[Any]) -> list[Any]:
        def compute(chosen: Mapping[str, Any]) -> list[Any]:
            return _run_terms(terms, types, {**pieces, **chosen}, axes)

        results, pull = jax.vjp(compute, {n: pieces[n] for n in floating})
        gradients = pull(list(cotangents))[0]
        return [*results, *(gradients[n] for n in floating)]

    return _run_on_devices(device, types, operands, cotangents, terms, axes)


def _run_terms(terms: Sequence[Term], types: Typed, pieces: Mapping[str, Any], axes: tuple[Axis, ...]) -> list[Any]:
    """Compute the results of one device, operator by operator."""
    values: dict[Term, Any] = {}
    nodes: dict[Apply, list[Any]] = {}
    for term in subterms(terms):
        if isinstance(term, Variable):
            values[term] = pieces[term.name]
            continue
        if term.node not in nodes:
            operands = tuple(types[x] for x in term.operands)
            nodes[term.node] = operator_function(term.operator, term.attributes, operands, axes)(
                *(values[x] for x in term.operands)
            )
        values[term] = nodes[term.node][term.result]
    return [values[t] for t in terms]


def _run_on_devices(
    device: Any,
    types: Typed,
    operands: Mapping[str, Array],
    cotangents: Sequence[Array],
    terms: Sequence[Term],
    axes: tuple[Axis, ...],
) -> list[Array]:
    """Run a device's function in `shard_map`, on stacked pieces and with stacked results."""
    names, sizes = tuple(a.name for a in axes), tuple(a.size for a in axes)
    lead = len(axes)
    inputs = [*operands.values(), *cotangents]
    states = [types[Variable(n)].states for n in operands] + [dual_type(types[t].states) for t in terms]

    def local(*xs: Any) -> tuple[Any, ...]:
        own = [_replicated(x.reshape(x.shape[lead:]), s, axes) for x, s in zip(xs, states, strict=True)]
        out = device(dict(zip(operands, own, strict=False)), own[len(operands) :])
        return tuple(vary(x, names).reshape(*[1] * lead, *x.shape) for x in out)

    if not axes:
        return [np.asarray(x) for x in jax.jit(local)(*map(jnp.asarray, inputs))]
    devices = np.asarray(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    mesh = Mesh(devices, names, axis_types=(AxisType.Auto,) * lead)
    spec = PartitionSpec(*names)
    run_all = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(spec,) * len(inputs), out_specs=spec))
    return [np.asarray(x) for x in run_all(*inputs)]


def _replicated(x: Any, states: Sequence[Any], axes: tuple[Axis, ...]) -> Any:
    """Return a piece that JAX knows to be the same along axes where it is unused: there, the maximum over devices is the piece."""
    same = tuple(a.name for a in axes if a.name not in varying_names(tuple(states), axes))
    if not same:
        return x
    return jax.lax.pmax(x, same)


def _relative_difference(left: Array, right: Array) -> float:
    size = max(np.abs(left).max(initial=0.0), np.abs(right).max(initial=0.0), 1e-30)
    return float(np.abs(left - right).max(initial=0.0) / size)
