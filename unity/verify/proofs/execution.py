"""A rule through JAX itself: both sides as programs on real devices (virtual ones will do), values and gradients.

The last of the four layers (docs/rules.md). It shares the operators' local bodies with what the others interpret, but runs
them compiled, with XLA's own collectives; sides are compared as the tensors that their pieces stand for.
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
from unity.verify.semantics.domains import Array, Plain
from unity.verify.semantics.local_programs import dual_type, used
from unity.verify.semantics.meaning import local_function
from unity.verify.semantics.pieces import join, spread

Typed = Mapping[Term, TensorType]
PLAIN = Plain()
TOLERANCE = 1e-9  # in float64, of the largest element: a few operators on small tensors


@dataclass(frozen=True)
class Run:
    """How far two sides are apart, relative to the largest element: values, and gradients for every variable."""

    values: float
    gradients: float

    @property
    def equal(self) -> bool:
        return max(self.values, self.gradients) <= TOLERANCE


def run(rule: Rule, known: Types, axes: tuple[Axis, ...], seed: int = 0) -> Run:
    """Both sides of a rule on as many devices as the axes have, in float64. Raises ValueError if there are too few devices."""
    with jax.enable_x64(True):
        known = {name: TensorType(t.shape, t.states, _wide(t.dtype)) for name, t in known.items()}
        types = typecheck(rule.sides, known, axes)
        rng = np.random.default_rng(seed)
        given = {name: _pieces(t, axes, rng) for name, t in known.items()}
        cotangents = [_pieces(_dual(types[t]), axes, rng) for t in rule.left]
        left, right = (_side(terms, types, given, cotangents, axes) for terms in (rule.left, rule.right))
    n = len(rule.left)
    wholes = [types[t] for t in rule.left] + [_dual(known[name]) for name in _floating(known)]
    apart = [_apart(*(join(x, t.shape, t.states, axes, PLAIN) for x in pair)) for *pair, t in zip(left, right, wholes, strict=True)]
    return Run(max(apart[:n], default=0.0), max(apart[n:], default=0.0))


def _wide(dtype: str) -> str:
    return "float64" if dtype == "float32" else dtype


def _dual(type_: TensorType) -> TensorType:
    return TensorType(type_.shape, dual_type(type_.states), type_.dtype)


def _floating(known: Types) -> list[str]:
    return [name for name, t in known.items() if t.dtype.startswith("float")]


def _pieces(type_: TensorType, axes: tuple[Axis, ...], rng: np.random.Generator) -> Array:
    rank, sizes = len(type_.shape), tuple(a.size for a in axes)
    if not type_.dtype.startswith("float"):
        return spread(rng.integers(0, 8, type_.shape).astype(type_.dtype), rank, type_.states, axes, PLAIN)
    parts = rng.normal(size=(*sizes, *type_.shape)) if any(s.kind == "S" for s in type_.states) else None
    return spread(rng.normal(size=type_.shape), rank, type_.states, axes, PLAIN, parts)


def _side(
    terms: Sequence[Term], types: Typed, given: Mapping[str, Array], cotangents: Sequence[Array], axes: tuple[Axis, ...]
) -> list[Array]:
    """Results, then gradients of floating variables, each `[*devices, *local]`."""
    names = list(given)
    floating = [n for n in names if types[Variable(n)].dtype.startswith("float")]

    def device(pieces: Mapping[str, Any], cotangents: Sequence[Any]) -> list[Any]:
        def compute(chosen: Mapping[str, Any]) -> list[Any]:
            return _run_terms(terms, types, {**pieces, **chosen}, axes)

        results, pull = jax.vjp(compute, {n: pieces[n] for n in floating})
        gradients = pull(list(cotangents))[0]
        return [*results, *(gradients[n] for n in floating)]

    return _on_devices(device, types, given, cotangents, terms, axes)


def _run_terms(terms: Sequence[Term], types: Typed, pieces: Mapping[str, Any], axes: tuple[Axis, ...]) -> list[Any]:
    """One device's results, operator by operator."""
    found: dict[Term, Any] = {}
    nodes: dict[Apply, list[Any]] = {}
    for term in subterms(terms):
        if isinstance(term, Variable):
            found[term] = pieces[term.name]
            continue
        if term.node not in nodes:
            operands = tuple(types[x] for x in term.operands)
            nodes[term.node] = local_function(term.operator, term.attributes, operands, axes)(*(found[x] for x in term.operands))
        found[term] = nodes[term.node][term.result]
    return [found[t] for t in terms]


def _on_devices(
    device: Any,
    types: Typed,
    given: Mapping[str, Array],
    cotangents: Sequence[Array],
    terms: Sequence[Term],
    axes: tuple[Axis, ...],
) -> list[Array]:
    """Runs a device's function in `shard_map` on pieces that come and go stacked."""
    names, sizes = tuple(a.name for a in axes), tuple(a.size for a in axes)
    lead = len(axes)
    inputs = [*given.values(), *cotangents]
    states = [types[Variable(n)].states for n in given] + [dual_type(types[t].states) for t in terms]

    def local(*xs: Any) -> tuple[Any, ...]:
        own = [_as_held(x.reshape(x.shape[lead:]), s, axes) for x, s in zip(xs, states, strict=True)]
        out = device(dict(zip(given, own, strict=False)), own[len(given) :])
        return tuple(vary(x, names).reshape(*[1] * lead, *x.shape) for x in out)

    if not axes:
        return [np.asarray(x) for x in jax.jit(local)(*map(jnp.asarray, inputs))]
    devices = np.asarray(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    mesh = Mesh(devices, names, axis_types=(AxisType.Auto,) * lead)
    spec = PartitionSpec(*names)
    run_all = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(spec,) * len(inputs), out_specs=spec))
    return [np.asarray(x) for x in run_all(*inputs)]


def _as_held(x: Any, states: Sequence[Any], axes: tuple[Axis, ...]) -> Any:
    """A piece as JAX knows it: the same along axes where it is unused. (There, the largest of all devices' is everyone's.)"""
    same = tuple(a.name for a in axes if a.name not in used(tuple(states), axes))
    if not same:
        return x
    return jax.lax.pmax(x, same)


def _apart(left: Array, right: Array) -> float:
    size = max(np.abs(left).max(initial=0.0), np.abs(right).max(initial=0.0), 1e-30)
    return float(np.abs(left - right).max(initial=0.0) / size)
