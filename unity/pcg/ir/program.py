"""Bodies: the straight-line programs over JAX primitives that operators compute, with nested calls inlined.

Capture makes them from jaxprs; the factor solver, the cost model and the lowering read them. They are immutable values, whose
variables are integers.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from unity.base.documents import Record
from unity.base.errors import CaptureError
from unity.pcg.jaxprs.foreign_primitives import HELD, adopted, name_of
from unity.pcg.jaxprs.jaxprs import BRANCHED, RULED, Program, each, equations, floating, is_reference
from unity.pcg.jaxprs.loops import equal_program
from unity.pcg.jaxprs.parameter_text import array_text, identities, program_text, text_of
from unity.pcg.jaxprs.source_lines import Place, place_of
from unity.pcg.jaxprs.trace_contexts import without_mesh
from unity.pcg.jaxprs.weak_types import changes_weak_type_alone
from unity.pcg.types.factors import TABLE, facts_of
from unity.pcg.types.parallel_type import Shape

# calls that are replaced by their body
INLINED = frozenset({
    "jit", "pjit", "closed_call", "eval_jaxpr", "core_call", "composite", "custom_vmap_call", "xla_metadata_call",
    "remat_opt",
})  # fmt: skip
UNSET = frozenset({"empty", "empty2"})  # arrays of unspecified elements: `lax.empty`, and the residuals of branches not taken
REDUCTIONS: Mapping[str, Callable[..., jax.Array]] = {  # over an axis that `vmap` gave a name
    "psum": lambda x, axes: jax.lax.reduce_sum(x, axes),
    "pmax": lambda x, axes: jax.lax.reduce_max(x, axes),
    "pmin": lambda x, axes: jax.lax.reduce_min(x, axes),
}
HOISTED = 4096  # bytes: a larger array inside a nested call becomes an input


@dataclass(frozen=True)
class Tensor:
    """A tensor's global shape and dtype (possibly an extended one, such as a PRNG key's)."""

    shape: Shape
    dtype: Any

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @cached_property
    def floating(self) -> bool:
        """Return whether it can have a gradient."""
        return floating(self)

    @cached_property
    def additive(self) -> bool:
        """Return whether its elements are numbers, which devices can add: neither truth values nor random keys."""
        return jnp.issubdtype(self.dtype, jnp.number)

    @property
    def itemsize(self) -> int:
        return getattr(self.dtype, "itemsize", 8)

    @cached_property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.itemsize

    @cached_property
    def words(self) -> int:
        """The number of integers or floats that an element consists of: a random key is several words of 32 bits."""
        return self.itemsize // 4 if jnp.issubdtype(self.dtype, jax.dtypes.prng_key) else 1

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    @cached_property
    def _text(self) -> str:
        name = getattr(self.dtype, "name", str(self.dtype))
        return f"{name}[{','.join(map(str, self.shape))}]"

    def __str__(self) -> str:
        return self._text


@lru_cache(maxsize=65536)
def tensor_type(shape: Shape, dtype: Any) -> Tensor:
    """Return a tensor type, the same object for equal ones, with sizes as Python integers."""
    return Tensor(tuple(map(int, shape)), dtype)


@dataclass(frozen=True, eq=False)
class Literal:
    """A constant scalar or small array written into a body."""

    value: Any
    tensor: Tensor

    @property
    def zero(self) -> bool:
        """Return whether it is zero, so that a sum over devices may count it several times."""
        return self.tensor.additive and not np.any(np.asarray(self.value))

    @property
    def sliceable(self) -> bool:
        """Return whether it is an array of numbers, of which a device may take a part."""
        return bool(self.tensor.shape) and not jnp.issubdtype(self.tensor.dtype, jax.dtypes.extended)

    @cached_property
    def key(self) -> str:
        """The type and the value as text."""
        scalar = not self.tensor.shape and not jnp.issubdtype(self.tensor.dtype, jax.dtypes.extended)
        return f"{self.tensor}={np.asarray(self.value).item()!r}" if scalar else f"{self.tensor}={array_text(self.value)}"


Atom = int | Literal


@dataclass(frozen=True, eq=False)
class Equation:
    """An application of a primitive.

    Attributes:
        source: the user's line.
        group: the numbered nested calls that it came from, outermost first.
        scope: the names that the model gave the place (`jax.named_scope`; Flax and Haiku modules).
        inactive: for a call with a derivative rule, the operands to which no gradient flows.
        library: the library function called at the user's line whose implementation contains it, as `diagonal` of `jnp.diagonal`.
        occurrence: how many equal calls on the same operands precede a call that must stay apart from them
            (`pcg.capture.value_numbering`).
    """

    primitive: core.Primitive
    params: Mapping[str, Any]
    operands: tuple[Atom, ...]
    results: tuple[int, ...]
    source: str
    group: tuple[str, ...] = ()
    origin: core.JaxprEqn | None = None
    scope: str = ""
    inactive: tuple[bool, ...] = ()
    library: str = ""
    occurrence: int = 0

    @cached_property
    def name(self) -> str:
        """The name of its primitive, or of the function that JAX represents as one primitive."""
        return name_of(self.primitive.name, self.params)

    @property
    def undifferentiated(self) -> bool:
        """Whether it is a call that is never differentiated, as no gradient flows to any operand."""
        return bool(self.inactive) and all(self.inactive)

    @cached_property
    def signature(self) -> str:
        """The primitive and its parameters as text, and which of several calls that must stay apart it is."""
        inactive = f" inactive {[k for k, flag in enumerate(self.inactive) if flag]}" if any(self.inactive) else ""
        occurrence = f" occurrence {self.occurrence}" if self.occurrence else ""
        return f"{self.name} {params_key(self.params)}{inactive}{occurrence}"

    @cached_property
    def identity(self) -> tuple[int, ...]:
        """The ids of functions among the parameters and in nested programs, of which the signature compares the code alone."""
        own = identities(self.params) if self.name in WITH_FUNCTIONS else ()
        nested = filter(None, map(_content_of, each(self.params)))
        return (*own, *(i for _, identity in nested for i in identity))

    def reading(self, operands: tuple[Atom, ...]) -> Equation:
        """Return the equation with other operands. It shares the text of the parameters, a twentieth of a search's time."""
        other = dataclasses.replace(self, operands=operands)
        known = vars(self)
        vars(other).update((name, known[name]) for name in ("signature", "identity") if name in known)
        return other

    def with_provenance_of(self, other: Equation) -> Equation:
        """Return the equation with the line, the scope, the calls and the library function of another."""
        return dataclasses.replace(self, source=other.source, scope=other.scope, group=other.group, library=other.library)


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
        numbers: dict[int, int] = {v: k for k, v in enumerate(self.inputs)}
        text = [f"in {[str(self.tensors[v]) for v in self.inputs]}"]
        for e in self.equations:
            names = [_atom_key(a, numbers) for a in e.operands]
            for v in e.results:
                numbers[v] = len(numbers)
            text.append(f"{e.signature} {names} {[str(self.tensors[v]) for v in e.results]}")
        text.append(f"out {[_atom_key(a, numbers) for a in self.outputs]}")
        return hashlib.sha256("\n".join(text).encode()).hexdigest()[:32]

    @cached_property
    def value_key(self) -> str:
        """A hash that is equal for bodies which compute equal values, though calls in them must stay apart for their gradients."""
        if not any(e.occurrence for e in self.equations):
            return self.key
        return replace(self, equations=tuple(replace(e, occurrence=0) for e in self.equations)).key

    @cached_property
    def numbering(self) -> tuple[int, ...]:
        """The numbers of the variables in order. What names variables of a body also fits one of equal key and equal numbering."""
        return (*self.inputs, *(v for e in self.equations for v in e.results))

    @cached_property
    def identity(self) -> tuple[int, ...]:
        """The ids of all functions in it: bodies of equal key and identity do the same, even where functions hide state."""
        return tuple(i for e in self.equations for i in e.identity)

    @cached_property
    def touching(self) -> Mapping[int, Sequence[int]]:
        """The numbers of the equations that use or define each variable."""
        numbers: dict[int, list[int]] = {}
        for i, e in enumerate(self.equations):
            for v in {*(a for a in e.operands if isinstance(a, int)), *e.results}:
                numbers.setdefault(v, []).append(i)
        return numbers

    @cached_property
    def reads(self) -> Sequence[Sequence[tuple[int, int]]]:
        """The position and the variable of each operand of each equation, literals left out."""
        return [[(p, a) for p, a in enumerate(e.operands) if isinstance(a, int)] for e in self.equations]

    @property
    def primitives(self) -> tuple[str, ...]:
        """The names of the primitives, in order."""
        return tuple(e.name for e in self.equations)


class Outline(Record):
    """A body as files store it: its hash, and the names of its primitives, in order."""

    key: str
    primitives: tuple[str, ...]


WITH_FUNCTIONS = frozenset({
    *RULED, "pure_callback", "custom_partitioning", "kernel", HELD,
})  # fmt: skip


def _atom_key(atom: Atom, numbers: Mapping[int, int]) -> str:
    return atom.key if isinstance(atom, Literal) else str(numbers[atom])


def params_key(params: Mapping[str, Any]) -> str:
    """Format parameters as text that is the same in every process: nested programs by content, functions by their code.

    Weak types are left out, as they mean nothing inside of a program (`unity.pcg.jaxprs.weak_types`).
    """
    return ", ".join(f"{k}={text_of(v, _program_key)}" for k, v in sorted(params.items()) if k != "weak_type")


def _program_key(value: Any) -> str | None:
    content = _content_of(value)
    return None if content is None else content[0]


def _content_of(value: Any) -> tuple[str, tuple[int, ...]] | None:
    """Return the key and the identity of a nested program; None for any other parameter."""
    if isinstance(value, Body):
        return value.key, value.identity
    if not isinstance(value, Program):
        return None
    if any(is_reference(v.aval) for v in value.invars):  # a kernel's, which is no body
        called = (x for e in value.eqns for x in (e, *equations(e)))
        return str(program_text(value)), tuple(i for e in called for i in identities(e.params))
    return _content_of_jaxpr(value)


@TABLE.clears
@lru_cache(maxsize=16384)
def _content_of_jaxpr(jaxpr: core.ClosedJaxpr | core.Jaxpr) -> tuple[str, tuple[int, ...]]:
    body = close(jaxpr) if isinstance(jaxpr, core.ClosedJaxpr) else from_jaxpr(jaxpr)
    return body.key, body.identity


def close(closed: core.ClosedJaxpr) -> Body:
    """Convert a closed jaxpr to a body, its constants written into it as literals."""
    body, consts = from_jaxpr(closed.jaxpr), closed.consts
    if not consts:
        return body
    values = {v: Literal(c, body.tensors[v]) for v, c in zip(body.inputs, consts, strict=False)}

    def replace(a: Atom) -> Atom:
        return values.get(a, a) if isinstance(a, int) else a

    equations = tuple(e.reading(tuple(map(replace, e.operands))) for e in body.equations)
    return Body(body.inputs[len(consts) :], tuple(map(replace, body.outputs)), equations, body.tensors)


class _Builder:
    """A builder of bodies, which numbers variables and inlines nested calls."""

    def __init__(self, hoist: bool = False) -> None:
        self.hoist = hoist
        self.tensors: dict[int, Tensor] = {}
        self.equations: list[Equation] = []
        self.hoisted: dict[int, tuple[int, Any]] = {}  # id of a large constant → its variable, itself
        self.calls = 0
        self.active: set[int] = set()  # variables to which gradients may flow
        self.constants: set[int] = set()  # variables that depend on small constants alone

    def new(self, aval: Any, where: str = "") -> int:
        number = len(self.tensors)
        if not hasattr(aval, "dtype") or is_reference(aval):
            raise CaptureError(
                f"{where or 'a function with a derivative rule'} uses a jax.Ref: a plan is a graph of values only.\n    Use"
                " functional updates (x.at[...].set) there. (docs: capture#references)"
            )
        self.tensors[number] = tensor_type(tuple(aval.shape), aval.dtype)
        return number

    def argument(self, aval: Any) -> int:
        """Add an input, to which gradients may flow if it is floating point."""
        number = self.new(aval)
        if self.tensors[number].floating:
            self.active.add(number)
        return number

    def inactive(self, operands: Sequence[Atom]) -> tuple[bool, ...]:
        """Return for each operand whether no gradient flows to it, whatever is differentiated."""
        return tuple(a not in self.active for a in operands)

    def inline(self, jaxpr: core.Jaxpr, args: Sequence[Atom], group: tuple[str, ...], call: Place) -> tuple[Atom, ...]:
        """Add the equations of a jaxpr, with calls replaced by their bodies, and return its results."""
        env: dict[Any, Atom] = dict(zip((*jaxpr.constvars, *jaxpr.invars), args, strict=True))

        def read(atom: Any) -> Atom:
            if isinstance(atom, core.Literal):
                aval: Any = atom.aval
                return Literal(atom.val, tensor_type(tuple(aval.shape), aval.dtype))
            return env[atom]

        for eqn in jaxpr.eqns:
            results = self.add_or_inline(eqn, tuple(read(a) for a in eqn.invars), group, call)
            env.update(zip(eqn.outvars, results, strict=True))
        return tuple(read(a) for a in jaxpr.outvars)

    def inline_closed(
        self, closed: core.ClosedJaxpr, args: Sequence[Atom], group: tuple[str, ...], call: Place
    ) -> tuple[Atom, ...]:
        """Add the equations of a jaxpr with constants, and return its results."""
        return self.inline(closed.jaxpr, (*map(self.constant, closed.consts), *args), group, call)

    def add_or_inline(self, eqn: core.JaxprEqn, operands: tuple[Atom, ...], group: tuple[str, ...], call: Place) -> Sequence[Atom]:
        """Add an equation, or inline the program that replaces it, and return its results."""
        inner = self.program(eqn, operands)
        place = place_of(eqn.source_info, call, "" if inner is None else str(eqn.params.get("name", "")))
        if inner is not None:
            self.calls += 1
            label = f"{eqn.params.get('name', eqn.primitive.name)}#{self.calls}"
            return self.inline_closed(inner, operands, (*group, label), place)
        if eqn.primitive.name in REDUCTIONS and all(isinstance(a, int) for a in eqn.params["axes"]):
            reduce = jax.make_jaxpr(partial(REDUCTIONS[eqn.primitive.name], axes=eqn.params["axes"]))
            return [self.inline_closed(reduce(self.tensor(x).struct), (x,), group, place)[0] for x in operands]
        if eqn.primitive.name == "device_put" or changes_weak_type_alone(eqn):  # the plan says where values lie
            return operands
        branch = self.taken(eqn, operands)
        if branch is not None:
            return self.inline_closed(branch, operands[1:], group, place)
        equal = equal_program(eqn)
        if equal is not None:
            return self.inline_closed(jax.make_jaxpr(equal)(*(v.aval for v in eqn.invars)), operands, group, place)
        return self.add(eqn, operands, group, place)

    def add(self, eqn: core.JaxprEqn, operands: tuple[Atom, ...], group: tuple[str, ...], place: Place) -> tuple[int, ...]:
        """Add an equation, and return its results."""
        kind = eqn.primitive.name
        results = tuple(self.new(v.aval, place.line) for v in eqn.outvars)
        inactive = self.inactive(operands)
        if any(not flag and facts_of(kind).reads_for(p) is not None for p, flag in enumerate(inactive)):
            self.active.update(v for v in results if self.tensors[v].floating)
        what = eqn.primitive, eqn.params, operands, results
        recorded = inactive if kind in RULED else ()
        self.equations.append(Equation(*what, place.line, group, eqn, place.scope, recorded, place.library))
        constant = kind in TABLE and all(isinstance(a, Literal) or a in self.constants for a in operands)
        if constant and all(self.tensors[v].nbytes <= HOISTED for v in results):
            self.constants.update(results)
        return results

    def program(self, eqn: core.JaxprEqn, operands: Sequence[Atom]) -> core.ClosedJaxpr | None:
        """Return the program to inline for a call, or zeros for an array of unspecified elements. None for other primitives."""
        result: Any = eqn.outvars[0].aval if eqn.outvars else None
        if eqn.primitive.name in UNSET and not jnp.issubdtype(result.dtype, jax.dtypes.extended):
            return _zeros(result)
        if eqn.primitive.name not in INLINED:
            return adopted(eqn, self.inactive(operands))
        inner = next((eqn.params[k] for k in ("jaxpr", "call_jaxpr", "call", "fwd_jaxpr") if k in eqn.params), None)
        # Since JAX 0.12 both are one class, and every jaxpr has its constants.
        return inner if inner is None or isinstance(inner, core.ClosedJaxpr) else core.ClosedJaxpr(inner, ())

    def taken(self, eqn: core.JaxprEqn, operands: Sequence[Atom]) -> core.ClosedJaxpr | None:
        """Return the branch of a conditional whose index is a constant; None for any other equation.

        XLA folds the index, and so removes the other branches with everything that they communicate.
        """
        index = self.value(operands[0]) if eqn.primitive.name in BRANCHED else None
        if index is None:
            return None
        branches = eqn.params["branches"]
        return branches[min(max(int(index), 0), len(branches) - 1)]

    def value(self, atom: Atom) -> Any:
        """Return the value of an atom that depends on small constants alone, None for any other."""
        if isinstance(atom, int) and atom not in self.constants:
            return None
        needed, equations = {atom}, list[Equation]()
        for e in reversed(self.equations):
            if not needed.isdisjoint(e.results):
                equations.append(e)
                needed.update(a for a in e.operands if isinstance(a, int))
        values: dict[int, Any] = {}

        def read(a: Atom) -> Any:
            return values[a] if isinstance(a, int) else np.asarray(a.value, a.tensor.dtype)

        with jax.ensure_compile_time_eval(), without_mesh():
            for e in reversed(equations):
                results = e.primitive.bind(*map(read, e.operands), **e.params)
                values.update(zip(e.results, results if e.primitive.multiple_results else [results], strict=True))
        return read(atom)

    def tensor(self, atom: Atom) -> Tensor:
        return atom.tensor if isinstance(atom, Literal) else self.tensors[atom]

    def constant(self, value: Any) -> Atom:
        aval = jax.typeof(value)
        tensor = tensor_type(tuple(aval.shape), aval.dtype)
        if not self.hoist or tensor.nbytes <= HOISTED:
            return Literal(value, tensor)
        if id(value) not in self.hoisted:
            self.hoisted[id(value)] = self.new(aval), value
        return self.hoisted[id(value)][0]


def _zeros(aval: Any) -> core.ClosedJaxpr:
    with jax.enable_x64(True):  # the type is explicit
        return jax.make_jaxpr(lambda: jnp.zeros(aval.shape, aval.dtype))()


@TABLE.clears
@lru_cache(maxsize=4096)
def from_jaxpr(jaxpr: core.Jaxpr) -> Body:
    """Convert a jaxpr to a body, whose inputs are the jaxpr's constants and then its arguments."""
    builder = _Builder()
    inputs = tuple(builder.argument(v.aval) for v in (*jaxpr.constvars, *jaxpr.invars))
    outputs = builder.inline(jaxpr, inputs, (), Place())
    return Body(inputs, outputs, tuple(builder.equations), builder.tensors)


def program_of(closed: core.ClosedJaxpr) -> tuple[Body, tuple[Any, ...]]:
    """Convert a function's jaxpr. Returns the body, and the large closed-over arrays, which are its last inputs."""
    builder = _Builder(hoist=True)
    arguments = tuple(builder.argument(v.aval) for v in closed.jaxpr.invars)
    outputs = builder.inline_closed(closed, arguments, (), Place())
    hoisted = builder.hoisted.values()
    body = Body((*arguments, *(v for v, _ in hoisted)), outputs, tuple(builder.equations), builder.tensors)
    return body, tuple(value for _, value in hoisted)
