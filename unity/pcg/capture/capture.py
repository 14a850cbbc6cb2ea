"""Capture of any JAX function as a serial PCG: trace it on abstract arguments, inline calls, cluster equations into operators."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import unwrap
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend import core
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from unity.base.errors import CaptureError
from unity.base.formatting import with_article
from unity.pcg.capture.clustering import EquationCluster, clusters
from unity.pcg.capture.constant_copies import with_own_constants
from unity.pcg.capture.folded_constants import with_folded_constants
from unity.pcg.capture.heavy_operators import PLATFORM, constants, is_fused_product
from unity.pcg.capture.normal_forms import (
    absorbed,
    with_early_picks,
    with_known_indices,
    with_moved_transposes,
    with_plain_convolutions,
    without_forwarding_calls,
)
from unity.pcg.capture.observations import Observation, observed_program
from unity.pcg.capture.operator_names import calls, label
from unity.pcg.capture.routing import without_sorting
from unity.pcg.capture.unread_operands import without_unread
from unity.pcg.capture.value_numbering import deduplicated, with_numbered_calls
from unity.pcg.ir.dead_code import extract, used
from unity.pcg.ir.graph import CONSTRAIN, PCG, Node, Value
from unity.pcg.ir.nested_programs import bodies
from unity.pcg.ir.payloads import Input, Remat, Scan
from unity.pcg.ir.program import Atom, Body, Equation, Literal
from unity.pcg.jaxprs.effects import Notice, warn
from unity.pcg.jaxprs.indexed_scans import with_stacked_scans
from unity.pcg.jaxprs.jaxprs import NESTING, is_reference
from unity.pcg.jaxprs.loops import constants_and_carry
from unity.pcg.jaxprs.parameter_text import text_of
from unity.pcg.jaxprs.ragged_products import with_plain_dimensions
from unity.pcg.jaxprs.references import without_references
from unity.pcg.jaxprs.shard_maps.regions import raised
from unity.pcg.jaxprs.sharded_rules import with_own_rules
from unity.pcg.jaxprs.shardings import Marking, sharding_of, without_shardings
from unity.pcg.jaxprs.source_lines import Place, owner, place_of
from unity.pcg.jaxprs.straight_scans import with_straight_scans
from unity.pcg.jaxprs.trace_contexts import WIDE, without_mesh
from unity.pcg.jaxprs.unread_results import without_unread_results
from unity.pcg.jaxprs.weak_types import is_weak, struct_of
from unity.pcg.operators.pallas_kernels import with_kernels
from unity.pcg.operators.table import TABLE
from unity.pcg.propagation.choices import choices
from unity.pcg.propagation.nested.programs import nested_body
from unity.pcg.propagation.nested.scan_programs import REMATERIALIZED, SCANNED
from unity.pcg.types.factors import facts_of

VALUES = (  # errors that JAX raises if a program inspects the value of a tracer
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerBoolConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


Weak = tuple[tuple[bool, ...], tuple[bool, ...]]


@dataclass(frozen=True)
class Captured:
    """A captured function.

    body: its program.
    graph: its program as a graph of operators.
    consts: the arrays that it closes over, which are its last inputs.
    in_tree: the tree structure of its arguments.
    out_tree: the tree structure of its results.
    paths: the path of every argument leaf, as the user would write it.
    differentiated: the leaves of `argnums`.
    weak: whether each argument leaf, and each result leaf, is weakly typed.
    marking: returns the marks that keep the shardings that the function states; None if they are not kept.
    result_shardings: the sharding of each result in its type.
    observations: its side effects, whose values the program returns after the function's own results.
    notices: the warnings about side effects that are dropped, or run without their order.
    in_64: whether 64-bit types were enabled.
    """

    body: Body
    graph: PCG
    consts: tuple[Any, ...]
    in_tree: Any
    out_tree: Any
    paths: tuple[str, ...]
    differentiated: frozenset[int]
    weak: Weak
    marking: Marking | None = None
    result_shardings: tuple[NamedSharding, ...] = ()
    observations: tuple[Observation, ...] = ()
    notices: tuple[Notice, ...] = ()
    in_64: bool = False

    def of(self, body: Body, known: Bodies | None = None) -> Captured:
        """Return this function with another program that computes the same. `known`: as for `graph_of`."""
        names = [node.name for node in self.graph.inputs]
        return replace(self, body=body, graph=graph_of(body, names, known))

    @cached_property
    def needs_64(self) -> bool:
        """Whether JAX has the types of the program only while 64-bit types are enabled, as they were when it was captured."""
        return self.in_64 and _has_wide_types(self.body)

    @cached_property
    def bodies(self) -> Bodies:
        """The programs of its operators, by content, for `graph_of`, which adds those of graphs that are made of its parts.

        Attempts to divide a program often have the same new operators, whose choices are derived once.
        """
        bodies = (node.body for node, _ in self.graph.walk() if node.body is not None)
        return {(body.key, body.identity): body for body in bodies}


Clustering = Callable[[Body, Mapping[int, int]], list[EquationCluster]]


def capture(
    fn: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    clustering: Clustering = clusters,
    marking: Marking | None = None,
) -> Captured:
    """Capture `fn(*args)` without computing anything.

    Args:
        fn: the function.
        *args: pytrees of arrays or `jax.ShapeDtypeStruct`s.
        argnums: the arguments that the gradient is for, as in `jax.grad`.
        clustering: partitions the equations into operators (`unity.plan.files.cache` replays a stored partition).
        marking: returns the marks that keep the shardings that the function states (`unity.constraints.program_shardings`).

    Raises:
        CaptureError: an argument is not an array, `argnums` has no argument that can be differentiated, or the function cannot be
            traced because it inspects values, uses results of side effects or leaks tracers. The message has the reason and the
            user's line.
        Exception: any other error of the function, with a note.
    """
    leaves, in_tree = jax.tree.flatten(args)
    paths = tuple(_path(path) for path, _ in jax.tree_util.tree_flatten_with_path(args)[0])
    structs = [_struct(x, p) for x, p in zip(leaves, paths, strict=True)]
    differentiated = _differentiated(args, structs, argnums)
    closed, results, shape = _trace(fn, jax.tree.unflatten(in_tree, structs), marking)
    with without_mesh():
        observed = observed_program(closed)
        body, names = _plain(observed.body), (*paths, *(f"<constant {k}>" for k in range(len(observed.consts))))
        graph = graph_of(body, names, clustering=clustering)
    warn(observed.notices)
    out_tree, stated = jax.tree.structure(shape), tuple(aval.sharding for aval in results)
    return Captured(
        body,
        graph,
        observed.consts,
        in_tree,
        out_tree,
        paths,
        differentiated,
        _weak(closed),
        marking,
        stated,
        observed.observations,
        observed.notices,
        bool(jax.config.read("jax_enable_x64")),
    )


def _has_wide_types(body: Body) -> bool:
    """Return whether a program, or one nested in it, has values of 64-bit types."""
    if any(str(t.dtype) in WIDE for t in body.tensors.values()):
        return True
    return any(_has_wide_types(nested) for e in body.equations for nested in bodies(e))


def _plain(body: Body) -> Body:
    """Return a body in the normal forms that transformations read, too: they follow samples through look-ups by row."""
    return with_known_indices(used(without_sorting(with_numbered_calls(body))))


def _weak(closed: core.ClosedJaxpr) -> Weak:
    return tuple(map(is_weak, closed.in_avals)), tuple(map(is_weak, closed.out_avals))


@dataclass(frozen=True)
class ResultTypes:
    """Types of a function's results that JAX checks, beyond shapes and dtypes.

    weak: whether each result is weakly typed.
    specs: the sharding of each result along the explicit axes of a mesh.
    same: whether the function computes what was captured. Other weak types of arguments may promote dtypes differently.
    """

    weak: tuple[bool, ...]
    specs: tuple[PartitionSpec, ...]
    same: bool = True


def result_types(
    fn: Callable[..., Any],
    captured: Captured,
    weak: Sequence[bool],
    shardings: Sequence[NamedSharding | None],
    mesh: AbstractMesh | None,
    planned: Sequence[PartitionSpec] = (),
) -> ResultTypes:
    """Trace a captured function on arguments of other weak types and shardings, and return the types of its results.

    Arguments that lie as a plan wants them may have shardings that the function does not admit. The results then have those with
    which it was captured; if that was under another mesh, they have the plan's, `planned`, or are whole.
    """
    tensors = [node.tensors[0].struct for node in captured.graph.inputs[: len(weak)]]
    structs = [t.update(weak_type=w, sharding=s) for t, w, s in zip(tensors, weak, shardings, strict=True)]
    same = tuple(weak) == captured.weak[0]
    try:
        closed, avals, _ = _trace(fn, jax.tree.unflatten(captured.in_tree, structs), captured.marking)
    except Exception:
        if not same or mesh is None:
            raise
        own = captured.result_shardings
        others = planned or (PartitionSpec(),) * len(own)
        return ResultTypes(captured.weak[1], tuple(s.spec if s.mesh == mesh else p for s, p in zip(own, others, strict=True)))
    if not same:
        with without_mesh():
            same = _plain(observed_program(closed).body).key == captured.body.key
    return ResultTypes(_weak(closed)[1], tuple(aval.sharding.spec for aval in avals), same)


def _trace(fn: Callable[..., Any], args: Sequence[Any], marking: Marking | None = None) -> tuple[core.ClosedJaxpr, Any, Any]:
    """Trace a function under the user's mesh. Returns its program without shardings, the types of its results, and their tree."""
    try:
        closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    except CaptureError:
        raise
    except jax.errors.UnexpectedTracerError as error:
        raise CaptureError(f"{_where(error) or _name(fn)}: {_name(fn)} {_LEAK}") from error
    except Exception as error:
        if isinstance(error, VALUES) or (isinstance(error, TypeError) and "of concrete values" in str(error)):
            raise CaptureError(
                f"{_where(error) or _name(fn)}: {_name(fn)} looks at a value that is not known while it is planned:"
                f" {_first_line(error)}\n    Use jax.numpy.where, lax.cond or lax.scan there, or close over what is constant."
                " (docs: capture#values)"
            ) from error
        if isinstance(error, ValueError) and "Non-hashable static arguments" in str(error):
            raise CaptureError(
                f"{_where(error) or _name(fn)}: a jax.jit takes as static what is not known while it is planned.\n    Numbers and"
                " flags among the arguments are arrays, too: fix those that are static by functools.partial. (docs: capture#leaves)"
            ) from error
        if isinstance(error, TypeError) and "not a valid JAX type" in str(error) and "return" in str(error):
            raise CaptureError(
                f"{_name(fn)} returns something that is not an array: {_first_line(error)}\n    Return arrays only; leave strings,"
                " functions and the like out of the result. (docs: capture#results)"
            ) from error
        error.add_note(f"This came from {_name(fn)} itself, while unity traced it on abstract arguments to plan it.")
        raise
    if leaked := {v for v, c in zip(closed.jaxpr.constvars, closed.consts, strict=True) if isinstance(c, Tracer)}:
        raise CaptureError(f"{_first_use(leaked, closed.jaxpr) or _name(fn)}: {_name(fn)} {_LEAK}")
    program = with_plain_dimensions(without_references(raised(without_shardings(closed, marking, with_own_rules))))
    return without_unread_results(with_straight_scans(with_stacked_scans(with_kernels(program)))), closed.out_avals, shape


_LEAK = (
    "uses a value of another trace: one left behind in a global, an attribute or a cache, or one of a jax.jit or jax.grad around"
    " the planning.\n    Return such values and pass them in as arguments; plan outside of other transformations."
    " (docs: capture#leaks)"
)


def _first_use(values: Collection[core.Var], program: core.Jaxpr) -> str:
    """Return the user's line of the first equation that reads one of some values, with that value's type, or an empty text."""
    for eqn in program.eqns:
        for v in eqn.invars:
            if isinstance(v, core.Var) and v in values:
                line = place_of(eqn.source_info, Place()).line
                return f"{line} reads {with_article(str(v.aval))}" if line else ""
    return ""


def _where(error: BaseException) -> str:
    """Return the user's line that an exception comes from: the innermost frame that belongs neither to JAX nor to unity."""
    line, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if owner(code.co_filename) == "user" or (not line and owner(code.co_filename) == "library"):
            line = f"{code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return line


def _differentiated(args: Sequence[Any], structs: Sequence[Any], argnums: int | Sequence[int]) -> frozenset[int]:
    """Return the leaves of `argnums`, by number among all argument leaves."""
    arguments = tuple(argnums) if isinstance(argnums, Iterable) else (argnums,)
    for i in arguments:
        if not isinstance(i, int) or not -len(args) <= i < len(args):
            raise CaptureError(
                f"argnums={argnums!r} names argument {i!r}, but there are {len(args)} arguments.\n    Arguments are counted"
                " from 0, as in jax.grad. (docs: capture#argnums)"
            )
    leaves = _leaves_of(args, {i % len(args) for i in arguments})
    if leaves and not any(jnp.issubdtype(structs[k].dtype, jnp.inexact) for k in leaves):
        kinds = ", ".join(sorted({str(structs[k].dtype) for k in leaves}))
        raise CaptureError(
            f"argnums={argnums!r} names arguments without a real number in them (only {kinds}): they have no gradient.\n"
            "    Give the position of the weights, as in jax.grad, or plan the forward pass alone: training=False. (docs:"
            " capture#argnums)"
        )
    return leaves


def _leaves_of(args: Sequence[Any], arguments: set[int]) -> frozenset[int]:
    leaves, start = set(), 0
    for k, arg in enumerate(args):
        count = len(jax.tree.leaves(arg))
        leaves |= set(range(start, start + count)) if k in arguments else set()
        start += count
    return frozenset(leaves)


def _struct(x: Any, path: str) -> jax.ShapeDtypeStruct:
    try:
        aval = jax.typeof(x) if not isinstance(x, jax.ShapeDtypeStruct) else x
        if is_reference(aval):
            raise CaptureError(
                f"{path} is a jax.Ref, and a plan is a graph of values only.\n    Pass its value (ref[...]), and make a reference"
                " of it inside. (docs: capture#references)"
            )
        return struct_of(aval).update(sharding=sharding_of(aval))
    except TypeError:
        kind = f"{type(x).__name__} of {x.dtype}, no array of JAX" if hasattr(x, "dtype") else f"{type(x).__name__}, not an array"
        raise CaptureError(
            f"{path} is {with_article(kind)}.\n    Pass arrays or jax.ShapeDtypeStruct as leaves; close over"
            " everything else (functools.partial, or a lambda). (docs: capture#leaves)"
        ) from None


def _path(path: Any) -> str:
    first, rest = path[0], path[1:]
    return f"args[{first.idx}]{jax.tree_util.keystr(rest)}"


def _name(fn: Any) -> str:
    code = getattr(unwrap(fn), "__code__", None)  # of a jax.jit, too
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    return f"{getattr(fn, '__name__', type(fn).__name__)}{where}"


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


Bodies = dict[tuple[str, tuple[int, ...]], Body]


def graph_of(body: Body, names: Sequence[str], known: Bodies | None = None, clustering: Clustering = clusters) -> PCG:
    """Return a body as a graph of operators; scans and remats have a nested graph.

    Args:
        body: the program.
        names: the names of its inputs.
        known: programs of operators, by content. Graphs built with the same dictionary share them, and everything derived from
            them.
        clustering: partitions the equations into operators.
    """
    return _Capture({} if known is None else known, clustering).graph(body, names)


class _Capture:
    """The conversion of a body to a graph. Equal operators share their body, so that every analysis of it runs once.

    bodies: the programs of operators, by content.
    clustering: partitions the equations of a body into operators.
    looped: the current body is nested in a loop that runs its body more than once.
    """

    def __init__(self, bodies: Bodies, clustering: Clustering) -> None:
        self.bodies, self.clustering = bodies, clustering
        self.looped = False

    def graph(self, body: Body, names: Sequence[str]) -> PCG:
        body = with_moved_transposes(with_known_indices(deduplicated(without_forwarding_calls(body))))
        body = with_early_picks(with_plain_convolutions(absorbed(body)))
        body = without_unread(body)  # the zeros for an unread operand are not those that others read
        body = with_own_constants(with_folded_constants(body))
        inputs = tuple(
            Node("input", (), (body.tensors[v],), payload=Input(k, name))
            for k, (v, name) in enumerate(zip(body.inputs, names, strict=True))
        )
        values: dict[int, Value] = {v: Value(n) for v, n in zip(body.inputs, inputs, strict=True)}
        constant, sizes = constants(body), calls(body)
        for cluster in self.clustering(body, constant):
            first, outputs = body.equations[cluster.members[0]], cluster.outputs
            if first.name in SCANNED + REMATERIALIZED:
                outputs = first.results
                node = self.nested(body, first, tuple(self.read(body, a, values, constant) for a in first.operands))
            else:
                if first.name == CONSTRAIN:  # of a value, which may be a constant
                    part, order = _constrained(body, first), first.operands
                else:
                    part, order = _with_separate_factors(*extract(body, cluster.members, outputs, constant))
                operands = tuple(self.read(body, a, values, constant) for a in order)
                tensors = tuple(body.tensors[v] for v in outputs)
                members = [body.equations[i] for i in cluster.members]
                line, scope = _most_common(e.source for e in members), _most_common(e.scope for e in members)
                program, lines = self.shared(part), tuple(e.source for e in part.equations)
                if lines == tuple(e.source for e in program.equations):
                    lines = ()
                node = Node(label(part, sizes), operands, tensors, program, source=line, scope=scope, lines=lines)
            values.update((v, Value(node, k)) for k, v in enumerate(outputs))
        return PCG(inputs, tuple(self.read(body, a, values, constant) for a in body.outputs))

    def shared(self, part: Body) -> Body:
        """Return the first body of this capture with the same content."""
        return self.bodies.setdefault((part.key, part.identity), part)

    def read(self, body: Body, atom: Atom, values: dict[int, Value], constant: Mapping[int, int]) -> Value:
        """Return the value of an atom. A constant becomes a separate node."""
        if isinstance(atom, Literal):
            return Value(Node("constant", (), (atom.tensor,), self.shared(Body((), (atom,), (), {}))))
        if atom not in values:
            part, _ = extract(body, [constant[atom]], [atom], constant)
            values[atom] = Value(Node("constant", (), (body.tensor(atom),), self.shared(part)))
        return values[atom]

    def nested(self, body: Body, equation: Equation, operands: tuple[Value, ...]) -> Node:
        """Return a scan or a remat with its program as a nested graph."""
        params, program = equation.params, used(nested_body(equation))
        tensors = tuple(body.tensors[v] for v in equation.results)
        line, scope = equation.source, equation.scope
        if equation.name in SCANNED:
            consts, carry = constants_and_carry(params)
            names = _names(operands[:consts], "const") + [f"carry {k}" for k in range(carry)]
            names += [f"step of {name}" for name in _names(operands[consts + carry :], "stack")]
            payload = Scan(params["length"], params["reverse"], consts, carry, params["unroll"])
            outer, self.looped = self.looped, self.looped or params["length"] > params["unroll"]
            inside = self.graph(program, names)
            self.looped = outer
            return Node("scan", operands, tensors, None, inside, payload, source=line, scope=scope)
        # Without a loop between the two passes, XLA's CSE would reuse some values of the forward pass and recompute others.
        prevent_cse = params["prevent_cse"] or not self.looped
        inside = self.graph(program, _names(operands, "operand"))
        policy = params.get("policy")
        payload = Remat(prevent_cse, None if policy is None else text_of(policy, lambda value: None))
        return Node("remat", operands, tensors, None, inside, payload, source=line, scope=scope, policy=policy)


def _constrained(body: Body, constraint: Equation) -> Body:
    """Return the program of an equation that constrains a value, with the value as its input even where it is a literal."""
    (operand,), (result,) = constraint.operands, constraint.results
    v = operand if isinstance(operand, int) else max(body.tensors) + 1
    tensors = {v: body.tensor(operand), result: body.tensors[result]}
    return Body((v,), (result,), (constraint.reading((v,)),), tensors)


def _with_separate_factors(part: Body, order: tuple[int, ...]) -> tuple[Body, tuple[int, ...]]:
    """Let a product of a tensor with itself read it twice: `x @ x.T` has rows of one factor and columns of the other."""
    (e, *others), v = part.equations, part.inputs[0] if len(part.inputs) == 1 else None
    if v is None or others or not facts_of(e.name).product or e.operands != (v, v) or is_fused_product(part, e):
        return part, order
    other = max(part.tensors) + 1
    tensors = {**part.tensors, other: part.tensors[v]}
    return Body((v, other), part.outputs, (replace(e.reading((v, other)), origin=None),), tensors), order * 2


def _names(operands: Sequence[Value], role: str) -> list[str]:
    """Return names of the inputs of a nested graph: those of the arguments that it takes, or their role and number."""
    return [(v.node.kind == "input" and v.node.name) or f"{role} {k}" for k, v in enumerate(operands)]


def _most_common(texts: Iterable[str]) -> str:
    """Return the most frequent nonempty text, of several the last one, or ""."""
    nonempty = [t for t in texts if t]
    return max(reversed(nonempty), key=nonempty.count) if nonempty else ""


def unparallelized(graph: PCG) -> list[tuple[Node, str]]:
    """Return the operators that run whole on every device, each with the reason: no factor of them is known or can be followed."""
    operators = []
    for node, _ in graph.walk():
        if node.body is not None and node.kind != "constant":
            unknown = sorted({e.name for e in node.body.equations if e.name not in TABLE and e.name not in STRUCTURED})
            if unknown:
                operators.append((node, f"no entry for {', '.join(unknown)} in the operator table"))
            elif opaque(node.body):
                operators.append((node, "no dimension can be followed through the program inside"))
    return operators


def opaque(body: Body) -> bool:
    """Return whether a loop, conditional or custom call of arrays cannot be partitioned at all."""
    nests = any(e.name in STRUCTURED for e in body.equations)
    return nests and any(body.tensor(a).ndim for a in body.outputs) and not any(c.divided for c in choices(body))


STRUCTURED = NESTING | {PLATFORM}
