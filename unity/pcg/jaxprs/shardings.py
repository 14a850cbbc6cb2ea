"""Removal of the shardings that a program states, which leaves a program of plain types that computes the same.

Under a mesh of `jax.set_mesh`, JAX writes shardings into the types of values, into parameters (`out_sharding=`), and into equations
that only place their operand; it also runs each equation under the mesh that was set when it was traced. A plan decides all of this
itself. What the user stated may be kept as marks, equations of another primitive.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend import core
from jax.extend.core import primitives
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from unity.pcg.jaxprs.jaxprs import RULED, Program, is_reference
from unity.pcg.jaxprs.source_lines import Place, place_of
from unity.pcg.jaxprs.trace_contexts import NO_MESH, without_mesh, words_of
from unity.pcg.jaxprs.weak_types import is_weak

PLACING = {"reshard": "dst_sharding", "sharding_constraint": "sharding"}  # identities, and their parameter with a sharding
# how users write the equations that state a sharding, if not as `out_sharding=`
WORDS = {
    "reshard": "reshard(..., {})",
    "sharding_constraint": "with_sharding_constraint(..., {})",
    "device_put": "device_put(..., {})",
    "jit": "out_shardings={}",
    "pjit": "out_shardings={}",
}
RECORDED = frozenset({"broadcast_in_dim", "iota"})  # JAX states their sharding itself, to fit the values that they are used with
MANUAL = "shard_map"  # its nested program is of one device
SMALL = 65536  # bytes: a constant up to this size is copied to the host rather than kept on a mesh

EQUAL = ShapedArray((), np.float32).manual_axis_type  # of a value that varies along no axis

Mark = tuple[core.Primitive, Mapping[str, Any]]
# of a sharding, its open dimensions, the rank, the user's line, and the words around it there: "reshard(..., {})"
Marking = Callable[[NamedSharding, frozenset[int], int, str, str], Mark | None]
Rules = Callable[[core.JaxprEqn, core.JaxprEqn], core.ClosedJaxpr | None]


def without_shardings(program: Any, marking: Marking | None = None, rules: Rules | None = None) -> Any:
    """Remove all shardings and meshes from a program, nested programs included. Returns the same object if it has none.

    Args:
        program: a jaxpr, open or closed.
        marking: returns the identity, as a primitive and its parameters, that takes the place of a stated sharding; None for a
            sharding that states nothing.
        rules: returns a program that replaces a call whose derivative rule needs the mesh; None for other calls. Its arguments are
            the equation with and without shardings.
    """
    with without_mesh():
        return _Removal(marking, rules).program(program)


def sharding_of(aval: Any) -> NamedSharding | None:
    """Return the sharding that a type states: one of a mesh with explicit axes."""
    sharding = getattr(aval, "sharding", None)
    stated = isinstance(sharding, NamedSharding) and AxisType.Explicit in (sharding.mesh.axis_types or ())
    return sharding if stated else None


def plain(aval: Any) -> Any:
    """Return a type without its sharding, and without the axes along which it varies. That of a reference is its value's."""
    if is_reference(aval):
        value = plain(aval.inner_aval)
        return aval if value is aval.inner_aval else aval.update(inner_aval=value)
    if not isinstance(aval, ShapedArray) or aval.sharding.mesh.empty:
        return aval
    return aval.update(sharding=NamedSharding(NO_MESH, PartitionSpec(*[None] * aval.ndim)), manual_axis_type=EQUAL)


def literal_value(atom: core.Literal) -> Any:
    """Return the value of a literal, which in JAX may name the mesh under which it was traced, without that mesh."""
    value, aval = np.asarray(atom.val), atom.aval
    number = value.item() if is_weak(aval) and not value.shape else value
    return number if jnp.result_type(number) == value.dtype else value


class _Removal:
    """One removal of shardings, with caches by identity of the programs and contexts that it has seen."""

    def __init__(self, marking: Marking | None, rules: Rules | None) -> None:
        self.marking, self.rules = marking, rules
        self.programs: dict[int, tuple[Any, Any]] = {}
        self.contexts: dict[int, tuple[Any, Any]] = {}
        self.stating: dict[int, tuple[Any, bool]] = {}

    def program(self, program: Any) -> Any:
        """Return a program without shardings."""
        if id(program) not in self.programs:
            self.programs[id(program)] = program, self.rewritten(program) if self.states(program) else program
        return self.programs[id(program)][1]

    def states(self, program: Any) -> bool:
        """Return whether a program mentions a sharding or a mesh."""
        if id(program) not in self.stating:
            atoms = (*program.jaxpr.constvars, *program.invars) if isinstance(program, core.ClosedJaxpr) else program.invars
            mentioned = any(plain(v.aval) is not v.aval for v in atoms) or any(map(self.mentions, program.eqns))
            self.stating[id(program)] = program, mentioned
        return self.stating[id(program)][1]

    def mentions(self, eqn: core.JaxprEqn) -> bool:
        """Return whether an equation or a nested program mentions a sharding or a mesh."""
        return (
            eqn.primitive.name in PLACING
            or self.context(eqn) is not eqn.ctx
            or any(plain(v.aval) is not v.aval for v in eqn.outvars)
            or any(self.parameter(value) is not value for value in _own(eqn).values())
        )

    def rewritten(self, program: Any) -> Any:
        if isinstance(program, core.ClosedJaxpr):
            inner, consts = program.jaxpr, [_local(c) for c in program.consts]
            return core.ClosedJaxpr(self.open(inner), consts)
        return self.open(program)

    def open(self, jaxpr: core.Jaxpr) -> core.Jaxpr:
        """Return an open jaxpr without shardings, equation by equation."""
        values: dict[core.Var, Any] = {}
        eqns: list[core.JaxprEqn] = []

        def define(v: core.Var) -> core.Var:
            aval = plain(v.aval)
            new = v if aval is v.aval else core.DropVar(aval) if isinstance(v, core.DropVar) else core.Var(aval)
            values[v] = new
            return new

        def read(atom: Any) -> Any:
            if not isinstance(atom, core.Literal):
                return values[atom]
            return atom if plain(atom.aval) is atom.aval else core.Literal(literal_value(atom), plain(atom.aval))

        def mark(eqn: core.JaxprEqn, atom: Any, sharding: Any, words: str, open_dims: frozenset[int] = frozenset()) -> Any:
            """Return a value, marked with a stated sharding if that is to be kept."""
            if self.marking is None or not isinstance(sharding, NamedSharding) or isinstance(atom, core.Literal):
                return atom
            marked = self.marking(sharding, open_dims, atom.aval.ndim, place_of(eqn.source_info, Place()).line, words)
            if marked is None:
                return atom
            new = core.Var(atom.aval)
            primitive, params = marked
            eqns.append(eqn.replace([atom], [new], primitive, dict(params), ctx=self.context(eqn)))
            return new

        constants, inputs = [define(v) for v in jaxpr.constvars], [define(v) for v in jaxpr.invars]
        for eqn in jaxpr.eqns:
            operands, words = [read(a) for a in eqn.invars], WORDS.get(eqn.primitive.name, "out_sharding={}")
            if eqn.primitive.name in PLACING:
                values[eqn.outvars[0]] = mark(eqn, operands[0], eqn.params[PLACING[eqn.primitive.name]], words, _open_dims(eqn))
                continue
            if "ctx_mesh" in eqn.params:  # a nested jit
                stated = zip(operands, eqn.params["in_shardings"], strict=True)
                operands = [mark(eqn, a, s, "in_shardings={}") for a, s in stated]
            eqns.append(self.equation(eqn, operands, [define(v) for v in eqn.outvars]))
            for v, sharding in zip(eqn.outvars, _results(eqn), strict=True):
                if not isinstance(v, core.DropVar):
                    values[v] = mark(eqn, values[v], sharding, words)
        outputs = [read(a) for a in jaxpr.outvars]
        return core.Jaxpr(constants, inputs, outputs, eqns, jaxpr.effects, jaxpr.debug_info, jaxpr.is_high)

    def equation(self, eqn: core.JaxprEqn, operands: list, results: list) -> core.JaxprEqn:
        """Return an equation of other operands and results, without shardings among its parameters."""
        params = {name: self.parameter(value) for name, value in _own(eqn).items()}
        if "ctx_mesh" in params:  # of a jit
            unspecified, mesh = self.unspecified
            params |= {"in_shardings": (unspecified,) * len(operands), "out_shardings": (unspecified,) * len(results)}
            params |= {"ctx_mesh": mesh}
        plain_eqn = eqn.replace(params={**eqn.params, **params}, invars=operands, outvars=results, ctx=self.context(eqn))
        rules = self.rules if eqn.primitive.name in RULED and self.mentions(eqn) else None
        program = rules and rules(eqn, plain_eqn)
        if program is None:
            return plain_eqn
        return plain_eqn.replace(primitive=primitives.closed_call_p, params={"call_jaxpr": program})

    @cached_property
    def unspecified(self) -> tuple[Any, Any]:
        """JAX's placeholders for a sharding and for a mesh in the equation of a nested jit that states neither."""
        params = jax.make_jaxpr(jax.jit(lambda x: x))(np.float32(0)).eqns[0].params
        return params["in_shardings"][0], params["ctx_mesh"]

    def parameter(self, value: Any) -> Any:
        """Return a parameter without shardings, the same object if it has none."""
        if isinstance(value, Program):
            return self.program(value)
        if isinstance(value, NamedSharding):
            return None
        if isinstance(value, ShapedArray) or is_reference(value):
            return plain(value)
        if isinstance(value, tuple | list):
            changed = [self.parameter(v) for v in value]
            same = all(a is b for a, b in zip(changed, value, strict=True))
            return value if same else getattr(value, "_make", type(value))(changed)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):  # a kernel's grid, with programs as index maps
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
            changes = {name: new for name, field in fields.items() if (new := self.parameter(field)) is not field}
            return dataclasses.replace(value, **changes) if changes else value
        return value

    def context(self, eqn: core.JaxprEqn) -> Any:
        """Return the context of an equation without a mesh, the same object if it has none."""
        if id(eqn.ctx) not in self.contexts:
            with eqn.ctx.manager, without_mesh():
                current = type(eqn.ctx)()  # the current settings
            self.contexts[id(eqn.ctx)] = eqn.ctx, eqn.ctx if current == eqn.ctx else current
        return self.contexts[id(eqn.ctx)][1]


def _own(eqn: core.JaxprEqn) -> Mapping[str, Any]:
    """Return the parameters of an equation that may mention shardings: none of a program for one device."""
    return {} if eqn.primitive.name == MANUAL else eqn.params


def _open_dims(eqn: core.JaxprEqn) -> frozenset[int]:
    """Return the dimensions that a placing equation leaves open: those that a reshard leaves to axes that are not explicit."""
    sharding, result = eqn.params[PLACING[eqn.primitive.name]], eqn.outvars[0].aval
    if eqn.primitive.name != "reshard":
        return eqn.params.get("unconstrained_dims", frozenset())
    explicit = set(sharding.mesh.axis_types or ()) <= {AxisType.Explicit}
    named = {dim for dim, entry in enumerate(sharding.spec.partitions) if entry}
    return frozenset() if explicit or not isinstance(result, ShapedArray) else frozenset(range(result.ndim)) - named


def _results(eqn: core.JaxprEqn) -> Sequence[Any]:
    """Return for each result of an equation the sharding that the equation states for it, or None."""
    count = len(eqn.outvars)
    if eqn.primitive.name in RECORDED:
        return [None] * count
    several = eqn.params.get("out_shardings", eqn.params.get("devices"))  # of a nested jit; of a device_put
    if isinstance(several, tuple | list) and len(several) == count:
        return several
    return [next((s for s in eqn.params.values() if isinstance(s, NamedSharding)), None)] * count


def _local(value: Any) -> Any:
    """Return a small constant without the mesh that it was created on."""
    if not isinstance(value, jax.Array) or sharding_of(jax.typeof(value)) is None:
        return value
    if value.nbytes > SMALL or not value.is_fully_addressable:
        return value
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        words: Any = words_of(value)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(value))
    return np.asarray(value)
