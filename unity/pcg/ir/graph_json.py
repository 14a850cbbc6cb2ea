"""Graphs as JSON data of declared types, with a schema version.

The programs of operators are stored as hashes: a graph read from a file can be shown and compared, not run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from msgspec import Meta, field
from msgspec.structs import asdict

from unity.base.documents import Misfit, Natural, Record, at, plain, typed
from unity.base.errors import PlanFileError
from unity.pcg.ir.graph import PARALLELIZATION, PCG, Node, Value
from unity.pcg.ir.payloads import Recompute, payload_of
from unity.pcg.ir.program import Outline, Tensor, tensor_type
from unity.pcg.ir.state_text import StateText, state_of, state_text
from unity.pcg.types.axis import Axis

SCHEMA = 1
MARK = "graph"
KEYS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}  # random key types → their generators
Schema = Annotated[int, Meta(ge=SCHEMA, le=SCHEMA)]
Reference = tuple[Natural, Natural]  # the number of a node, and of its result


class NodeContent(Record, omit_defaults=True):
    """A node without its operands and its nested graph. Empty fields are left out."""

    kind: str
    tensors: tuple[tuple[str, tuple[Natural, ...]], ...]
    types: tuple[tuple[StateText, ...], ...] = ()
    attributes: dict[str, Any] = field(default_factory=dict)
    body: Outline | None = None
    source: str = ""
    scope: str = ""


class NodeRecord(NodeContent, kw_only=True):
    """A node of a graph."""

    operands: tuple[Reference, ...]
    inside: GraphRecord | None = None


class GraphRecord(Record):
    """A graph. Its first nodes are its inputs."""

    axes: tuple[Axis, ...]
    inputs: Natural
    nodes: tuple[NodeRecord, ...]
    outputs: tuple[Reference, ...]


class GraphDocument(GraphRecord, tag_field="unity", tag=MARK):
    """A graph with its hash."""

    schema: Schema
    key: str


def to_json(graph: PCG) -> dict[str, Any]:
    """Convert a graph to data for `json.dumps`."""
    return plain(GraphDocument(**asdict(_record(graph)), schema=SCHEMA, key=graph.key))


def from_json(data: Any) -> PCG:
    """Read a graph from the data of `to_json`, with the same key. Raises PlanFileError for anything else."""
    check_mark(data, MARK)
    document = typed(data, GraphDocument)
    return keyed(_graph(document), document.key)


def check_mark(data: Any, mark: str) -> None:
    """Raise PlanFileError unless data are those of a graph, in the form that a mark names, of a schema that is read here."""
    if not isinstance(data, dict) or data.get("unity") != mark:
        raise PlanFileError(f"this is not a graph that unity saved: it lacks the mark 'unity: {mark}'")
    schema = data.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        raise PlanFileError(f"this graph has schema {schema}, this version of unity reads up to {SCHEMA}: use a newer one")
    if schema != SCHEMA or isinstance(schema, bool):
        raise Misfit(f"{schema!r} is a schema that no version of unity has written", ".schema")


def keyed(graph: PCG, key: str) -> PCG:
    """Return a graph that was read. Raises Misfit unless it has the hash that its data name."""
    if graph.key != key:
        raise Misfit(f"the graph has the hash {graph.key}, not {key}: it was edited", ".key")
    return graph


def _record(graph: PCG) -> GraphRecord:
    axes, inputs, references, outputs = skeleton(graph)
    nodes = tuple(node_record(node, operands) for node, operands in zip(graph.nodes, references, strict=True))
    return GraphRecord(axes, inputs, nodes, outputs)


def node_record(node: Node, operands: tuple[Reference, ...] = ()) -> NodeRecord:
    """Return a node with references in place of its operands."""
    inside = None if node.inside is None else _record(node.inside)
    return NodeRecord(**content_of(node), operands=operands, inside=inside)


def skeleton(graph: PCG) -> tuple[tuple[Axis, ...], int, list[tuple[Reference, ...]], tuple[Reference, ...]]:
    """Return a graph's axes, its number of inputs, the operands of every node, and its outputs."""
    number = {id(n): i for i, n in enumerate(graph.nodes)}

    def references(values: Sequence[Value]) -> tuple[Reference, ...]:
        return tuple((number[id(v.node)], v.index) for v in values)

    operands = [references(n.operands) for n in graph.nodes]
    return graph.axes, len(graph.inputs), operands, references(graph.outputs)


def content_of(node: Node) -> dict[str, Any]:
    """Return the fields of a `NodeContent`."""
    program = node.body or node.outline
    return {
        "kind": node.kind,
        "tensors": tuple((str(getattr(t.dtype, "name", t.dtype)), t.shape) for t in node.tensors),
        "types": tuple(tuple(map(state_text, t)) for t in node.types),
        "attributes": node.attributes,
        "body": Outline(program.key, tuple(program.primitives)) if program else None,
        "source": node.source,
        "scope": node.scope,
    }


def _graph(record: GraphRecord) -> PCG:
    nodes: list[Node] = []
    for k, entry in enumerate(record.nodes):
        with at(f".nodes[{k}]"):
            nodes.append(read_node(entry, nodes, len(record.axes)))
    return assembled(record.axes, record.inputs, nodes, record.outputs)


def read_node(record: NodeRecord, nodes: Sequence[Node], axes: int) -> Node:
    """Return a node whose operands are among `nodes`."""
    with at(".operands"):
        operands = values(record.operands, nodes)
    with at(".inside"):
        inside = None if record.inside is None else _graph(record.inside)
    return node_of(record, operands, inside, axes)


def values(references: Iterable[Reference], nodes: Sequence[Node]) -> tuple[Value, ...]:
    """Return the results that references name. Raises Misfit if one names none."""
    for number, index in references:
        if not 0 <= number < len(nodes) or index >= len(nodes[number].tensors):
            raise Misfit(f"node {number} is not there yet, or has no result {index}")
    return tuple(Value(nodes[number], index) for number, index in references)


def node_of(content: NodeContent, operands: tuple[Value, ...], inside: PCG | None, axes: int) -> Node:
    """Return a node of a graph with `axes` axes. Raises Misfit if its types do not fit."""
    if content.types and (len(content.types) != len(content.tensors) or any(len(t) != axes for t in content.types)):
        raise Misfit(f"expected no types, or one of {axes} states for each of {len(content.tensors)} results", ".types")
    with at(".attributes"):
        data = payload_and_again(content.kind, content.attributes)
    return Node(
        kind=content.kind,
        operands=operands,
        tensors=tuple(_tensor(dtype, shape) for dtype, shape in content.tensors),
        inside=inside,
        types=tuple(tuple(map(state_of, t)) for t in content.types),
        source=content.source,
        scope=content.scope,
        outline=content.body,
        **data,
    )


def payload_and_again(kind: str, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a node's payload and recomputation, as fields, from its attributes. Raises Misfit if its kind has others."""
    payload = payload_of(kind, {k: v for k, v in attributes.items() if k != "again"})
    if "again" not in attributes:
        return {"payload": payload, "again": Recompute.NOTHING}
    again = attributes["again"]
    if again is True and kind in PARALLELIZATION:
        return {"payload": payload, "again": Recompute.WHOLE}
    if type(again) is not int or again not in (Recompute.INNER, Recompute.WHOLE) or kind in PARALLELIZATION:
        raise Misfit(f"a node of kind {kind!r} cannot be recomputed as {again!r}", ".again")
    return {"payload": payload, "again": Recompute(again)}


def assembled(axes: tuple[Axis, ...], inputs: int, nodes: Sequence[Node], outputs: Iterable[Reference]) -> PCG:
    """Return the graph of some nodes. Raises Misfit if its inputs or outputs do not fit them."""
    if inputs > len(nodes) or any(n.kind != "input" for n in nodes[:inputs]):
        raise Misfit(f"the first {inputs} nodes are not the inputs", ".inputs")
    with at(".outputs"):
        return PCG(tuple(nodes[:inputs]), values(outputs, nodes), axes)


def _tensor(dtype: str, shape: Sequence[int]) -> Tensor:
    try:
        return tensor_type(tuple(shape), _dtype(dtype))
    except TypeError:
        raise Misfit(f"{dtype!r} is no type of numbers", ".tensors") from None


@lru_cache(maxsize=256)
def _dtype(name: str) -> Any:
    if name in KEYS:
        return jax.eval_shape(lambda: jax.random.key(0, impl=KEYS[name])).dtype
    return jnp.dtype(name)
