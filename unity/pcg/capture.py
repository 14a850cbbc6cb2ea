"""From any JAX function to a serial PCG: trace it on abstract arguments, inline its calls, and join equations to operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core

from unity.pcg.body import Atom, Body, Equation, Literal, Tensor, close, extract, from_jaxpr, used
from unity.pcg.clustering import clusters, constants, label, outputs_of
from unity.pcg.errors import CaptureError
from unity.pcg.graph import PCG, Node, Value
from unity.pcg.table import TABLE

SCANNED = ("scan",)
REMATERIALIZED = ("remat2", "checkpoint", "remat")


@dataclass(frozen=True)
class Captured:
    """A captured function: its graph, the values that it closed over (further inputs, last), and its output's structure."""

    graph: PCG
    consts: tuple[Any, ...]
    in_tree: Any
    out_tree: Any
    paths: tuple[str, ...]  # of every argument leaf, as the user would write it
    differentiated: frozenset[int]  # leaves of `argnums`


def capture(fn: Callable[..., Any], *args: Any, argnums: int | Sequence[int] = 0) -> Captured:
    """The graph of `fn(*args)`. Arguments are pytrees of arrays or `jax.ShapeDtypeStruct`s; nothing is computed.

    Raises CaptureError when an argument is not an array or the function cannot be traced, with the reason and the place.
    """
    leaves, in_tree = jax.tree.flatten(args)
    paths = tuple(_path(path) for path, _ in jax.tree_util.tree_flatten_with_path(args)[0])
    structs = jax.tree.unflatten(in_tree, [_struct(x, p) for x, p in zip(leaves, paths, strict=True)])
    try:
        closed, shape = jax.make_jaxpr(fn, return_shape=True)(*structs)
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError, jax.errors.TracerIntegerConversionError) as error:
        raise CaptureError(
            f"{_name(fn)} looks at the values of its arguments, which are not known while it is planned: {_first_line(error)}\n"
            "    Use jax.numpy.where, lax.cond or lax.scan there, or close over what is constant. (docs: capture#values)"
        ) from error
    if closed.effects:
        raise CaptureError(
            f"{_name(fn)} has side effects ({', '.join(sorted(map(str, closed.effects)))}), which a plan would repeat on every"
            " device.\n    Take jax.debug.print, callbacks and the like out of the planned function. (docs: capture#effects)"
        )
    wanted = {argnums % len(args)} if isinstance(argnums, int) else {i % len(args) for i in argnums}
    differentiated = _leaves_of(args, wanted)
    body = used(_arguments_first(closed))
    consts = tuple(closed.consts)
    names = (*paths, *(f"<constant {k}>" for k in range(len(consts))))
    return Captured(graph_of(body, names), consts, in_tree, jax.tree.structure(shape), paths, differentiated)


def _leaves_of(args: Sequence[Any], wanted: set[int]) -> frozenset[int]:
    found, start = set(), 0
    for k, arg in enumerate(args):
        count = len(jax.tree.leaves(arg))
        found |= set(range(start, start + count)) if k in wanted else set()
        start += count
    return frozenset(found)


def _arguments_first(closed: core.ClosedJaxpr) -> Body:
    """The function's body, with what it closes over as its last inputs."""
    body, n = from_jaxpr(closed.jaxpr), len(closed.consts)
    return Body((*body.inputs[n:], *body.inputs[:n]), body.outputs, body.equations, body.tensors)


def _struct(x: Any, path: str) -> jax.ShapeDtypeStruct:
    try:
        aval = jax.typeof(x) if not isinstance(x, jax.ShapeDtypeStruct) else x
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    except TypeError:
        raise CaptureError(
            f"{path} is a {type(x).__name__}, not an array.\n    Pass arrays or jax.ShapeDtypeStruct as leaves; close over"
            " everything else (functools.partial, or a lambda). (docs: capture#leaves)"
        ) from None


def _path(path: Any) -> str:
    first, rest = path[0], path[1:]
    return f"args[{first.idx}]{jax.tree_util.keystr(rest)}"


def _name(fn: Any) -> str:
    code = getattr(fn, "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    return f"{getattr(fn, '__name__', type(fn).__name__)}{where}"


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def graph_of(body: Body, names: Sequence[str]) -> PCG:
    """A body as a graph of operators; scans and remats get a graph inside."""
    inputs = tuple(
        Node("input", (), (body.tensors[v],), attributes={"index": k, "name": name})
        for k, (v, name) in enumerate(zip(body.inputs, names, strict=True))
    )
    values: dict[int, Value] = {v: Value(n) for v, n in zip(body.inputs, inputs, strict=True)}
    constant = constants(body)
    for cluster in clusters(body):
        first = body.equations[cluster.members[0]]
        members = list(cluster.members)
        made = outputs_of(body, members)
        if first.name in SCANNED + REMATERIALIZED:
            node = _nested(body, first, lambda a: _read(body, a, values, constant))
            made = list(first.results)
        else:
            part, order = extract(body, members, made, constant)
            operands = tuple(values[v] for v in order)
            node = Node(label(part), operands, tuple(body.tensors[v] for v in made), part, source=_source(body, members))
        values.update((v, Value(node, k)) for k, v in enumerate(made))
    return PCG(inputs, tuple(_read(body, a, values, constant) for a in body.outputs))


def _source(body: Body, members: Sequence[int]) -> str:
    """The user's line behind most of an operator."""
    lines = [body.equations[i].source for i in members]
    return max(lines, key=lines.count)


def _read(body: Body, atom: Atom, values: Mapping[int, Value], constant: Mapping[int, int]) -> Value:
    """The value of an atom; a constant becomes a node of its own."""
    if isinstance(atom, int) and atom in values:
        return values[atom]
    if isinstance(atom, Literal):
        part = Body((), (atom,), (), {})
    else:
        part, _ = extract(body, [constant[atom]], [atom], constant)
    return Value(Node("constant", (), (body.tensor(atom),), part))


def _nested(body: Body, equation: Equation, read: Callable[[Atom], Value]) -> Node:
    params = equation.params
    inner = params["jaxpr"]
    program = used(close(inner) if isinstance(inner, core.ClosedJaxpr) else from_jaxpr(inner))
    operands = tuple(read(a) for a in equation.operands)
    tensors = tuple(body.tensors[v] for v in equation.results)
    if equation.name in SCANNED:
        consts, carry = params["num_consts"], params["num_carry"]
        names = [f"const {k}" for k in range(consts)] + [f"carry {k}" for k in range(carry)]
        names += [f"step of {k}" for k in range(len(operands) - consts - carry)]
        attributes = {
            "length": params["length"], "reverse": params["reverse"], "consts": consts, "carry": carry, "unroll": params["unroll"],
        }  # fmt: skip
        return Node("scan", operands, tensors, None, graph_of(program, names), attributes, source=equation.source)
    attributes = {"prevent_cse": params["prevent_cse"]}
    names = [f"operand {k}" for k in range(len(operands))]
    inside = graph_of(program, names)
    policy = params.get("policy")
    if policy is not None:
        attributes["policy"] = getattr(policy, "__qualname__", type(policy).__name__)
    return Node("remat", operands, tensors, None, inside, attributes, source=equation.source, policy=policy)


def unparallelized(graph: PCG) -> list[tuple[Node, str]]:
    """Operators of which no factor is known, and why: they run whole on every device."""
    found = []
    for node, _ in graph.walk():
        if node.body is not None and node.kind != "constant":
            unknown = sorted({e.name for e in node.body.equations if e.name not in TABLE and e.name not in STRUCTURED})
            if unknown:
                found.append((node, f"no entry for {', '.join(unknown)} in the operator table"))
    return found


STRUCTURED = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "cond", "while", "scan", "remat2", "checkpoint"})


def tensor_of(aval: Any) -> Tensor:
    """An aval, array or ShapeDtypeStruct as a tensor."""
    return Tensor(tuple(aval.shape), aval.dtype)
