"""Graphs as JSON data, with a schema version.

The programs of operators are stored as hashes: a graph read from a file can be shown and compared, not run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from unity.base.errors import PlanFileError
from unity.pcg.ir.graph import PCG, Node, Value
from unity.pcg.ir.program import Outline, Tensor, tensor_type
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, UNUSED, State, partitioned

SCHEMA = 1
KEYS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}  # random key types → their generators
STATES = {"U": UNUSED, "R": REPLICATED, "S": PARTIAL}


def to_json(graph: PCG) -> dict[str, Any]:
    """Convert a graph to data for `json.dumps`. Raises TypeError if an attribute is not plain data."""
    return {"unity": "graph", "schema": SCHEMA, "key": graph.key, **_graph(graph)}


def from_json(data: Any) -> PCG:
    """Read a graph from the data of `to_json`, with the same key. Raises PlanFileError for anything else."""
    if not isinstance(data, dict) or data.get("unity") != "graph":
        raise PlanFileError("this is not a graph that unity saved: it lacks the mark 'unity: graph'")
    schema = data.get("schema")
    if not isinstance(schema, int) or schema < 1:
        raise PlanFileError(f"this graph's schema is {schema!r}, which no version of unity has written: the file is damaged")
    if schema > SCHEMA:
        raise PlanFileError(f"this graph has schema {schema}, this version of unity reads up to {SCHEMA}: use a newer one")
    try:
        graph = _read_graph(data)
        key = graph.key
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise PlanFileError(f"this graph is damaged: {type(error).__name__}: {error}") from error
    if key != data.get("key"):
        raise PlanFileError(f"this graph is damaged: its content has the hash {key}, but it says {data.get('key')}")
    return graph


def _graph(graph: PCG) -> dict[str, Any]:
    number = {id(n): i for i, n in enumerate(graph.nodes)}

    def reference(v: Value) -> list[int]:
        return [number[id(v.node)], v.index]

    return {
        "axes": [[a.name, a.size, a.level, *([a.reduce_in] if a.reduce_in else [])] for a in graph.axes],
        "inputs": len(graph.inputs),  # the first nodes
        "nodes": [node_json(n, reference) for n in graph.nodes],
        "outputs": [reference(v) for v in graph.outputs],
    }


def node_json(node: Node, reference: Callable[[Value], list[int]]) -> dict[str, Any]:
    """Convert a node to data. `reference` converts its operands."""
    known = node.body or node.outline
    data = {
        "kind": node.kind,
        "operands": [reference(v) for v in node.operands],
        "tensors": [[str(getattr(t.dtype, "name", t.dtype)), list(t.shape)] for t in node.tensors],
        "types": [[_state(s) for s in t] for t in node.types],
        "attributes": {k: _plain(v) for k, v in node.attributes.items()},
        "body": {"key": known.key, "primitives": list(known.primitives)} if known else None,
        "inside": _graph(node.inside) if node.inside is not None else None,
        "source": node.source,
        "scope": node.scope,
    }
    return {k: v for k, v in data.items() if v not in (None, "", [], {}) or k in ("kind", "operands", "tensors")}


def _state(state: State) -> str:
    if state.kind != "P":
        return state.kind
    return f"P{state.dim}" if state.outer == 1 else f"P{state.dim}/{state.outer}"


def _plain(value: Any) -> Any:
    """Convert a value to JSON data that tells tuples from lists."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is tuple:
        return {"tuple": [_plain(v) for v in value]}
    if type(value) is list:
        return [_plain(v) for v in value]
    raise TypeError(f"{value!r} of type {type(value).__name__} cannot be written into a graph's file")


def _read_plain(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(_read_plain(v) for v in value["tuple"])
    return [_read_plain(v) for v in value] if isinstance(value, list) else value


def _read_graph(data: Mapping[str, Any]) -> PCG:
    nodes: list[Node] = []

    def value(reference: Any) -> Value:
        node, index = map(natural, reference)
        _require(node < len(nodes), f"an operand is node {node}, which is not there yet")
        _require(index < len(nodes[node].tensors), f"node {node} has no result {index}")
        return Value(nodes[node], index)

    axes = tuple(Axis(_text(name), natural(size), natural(level), *map(_text, more)) for name, size, level, *more in data["axes"])
    for entry in data["nodes"]:
        nodes.append(read_node(entry, value, len(axes)))
    count = natural(data["inputs"])
    inputs = tuple(nodes[:count])
    _require(len(inputs) == count and all(n.kind == "input" for n in inputs), "its inputs do not come first")
    return PCG(inputs, tuple(value(v) for v in data["outputs"]), axes)


def read_node(data: Mapping[str, Any], value: Callable[[Any], Value], axes: int) -> Node:
    """Read a node of a graph with `axes` axes from the data of `node_json`. Damaged data raise KeyError or ValueError."""
    types = tuple(tuple(_read_state(_text(s)) for s in t) for t in data.get("types", ()))
    tensors = tuple(_read_tensor(dtype, shape) for dtype, shape in data["tensors"])
    _require(all(len(t) == axes for t in types), "a type speaks of other axes than the graph has")
    _require(not types or len(types) == len(tensors), "there are more types than results, or fewer")
    body = data.get("body")
    return Node(
        kind=_text(data["kind"]),
        operands=tuple(value(v) for v in data["operands"]),
        tensors=tensors,
        inside=_read_graph(data["inside"]) if data.get("inside") is not None else None,
        attributes={_text(k): _read_plain(v) for k, v in data.get("attributes", {}).items()},
        types=types,
        source=_text(data.get("source", "")),
        scope=_text(data.get("scope", "")),
        outline=Outline(_text(body["key"]), tuple(map(_text, body["primitives"]))) if body is not None else None,
    )


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} should be text")
    return value


def natural(value: Any) -> int:
    """Return a natural number of a file. Raises ValueError for anything else."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} should be a natural number")
    return value


def _read_tensor(dtype: Any, shape: Any) -> Tensor:
    return tensor_type(tuple(natural(n) for n in shape), _dtype(_text(dtype)))


def _dtype(name: str) -> Any:
    if name in KEYS:
        return jax.eval_shape(lambda: jax.random.key(0, impl=KEYS[name])).dtype
    return jnp.dtype(name)


def _read_state(text: str) -> State:
    if text in STATES:
        return STATES[text]
    dim, _, outer = text.removeprefix("P").partition("/")
    if not text.startswith("P"):
        raise ValueError(f"{text!r} is no state")
    return partitioned(int(dim), int(outer) if outer else 1)
