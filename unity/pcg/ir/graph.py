"""The parallel computation graph: immutable nodes that refer to their operands, hashed by content.

A serial graph, as capture returns it, has no parallel types. In a parallel graph every result has one, and every change of type is
a parallelization operator, an explicit node. Graphs share nodes; nothing is changed in place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from unity.pcg.ir.payloads import (
    OPTIONAL,
    PAYLOADS,
    Branches,
    Input,
    LoopPayload,
    PackedPart,
    Payload,
    Pipeline,
    PipelineTail,
    Recompute,
    Scan,
    Stages,
)
from unity.pcg.ir.program import Body, Outline, Tensor
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import Type, show

P = TypeVar("P", bound=Payload)
NO_CONTENT = ("name", "state_on_host")  # attributes of inputs that do not change what a graph computes


@dataclass(frozen=True, eq=False)
class Node:
    """An application of an operator.

    Attributes:
        kind: "input", the name of a primitive or of a composite ("softmax"), "scan", "pipeline", "tail", "branches", "stages" or
            "remat" (with a graph inside), or a parallelization operator ("partition", "combine", "replicate", "reduce" and their
            fused forms).
        tensors: the global shapes and dtypes of the results.
        body: the program that it computes, unless it has a graph `inside`.
        payload: further data of its kind, such as the length of a scan.
        types: the parallel types of the results; empty in a serial graph.
        source: the user's line.
        lines: the user's lines of the body's equations, if the body is that of an equal operator on other lines; else empty.
        scope: the model's own name for the place, "encoder/layer_3".
        outline: of the body, in a graph that was read from a file.
        policy: the policy of a remat, as `jax.checkpoint` takes it: a function, so not part of the graph's data.
        again: the part of it that the backward pass recomputes: of a parallelization operator, nothing or all.
    """

    kind: str
    operands: tuple[Value, ...]
    tensors: tuple[Tensor, ...]
    body: Body | None = None
    inside: PCG | None = None
    payload: Payload | None = None
    types: tuple[Type, ...] = ()
    source: str = ""
    scope: str = ""
    lines: tuple[str, ...] = ()
    outline: Outline | None = None
    policy: Any = None
    again: Recompute = Recompute.NOTHING

    def __post_init__(self) -> None:
        expected = PAYLOADS.get(self.kind, PackedPart)
        if not isinstance(self.payload, expected) and (self.payload is not None or expected not in OPTIONAL):
            raise TypeError(f"a node of kind {self.kind!r} has a payload {expected.__name__}, not {self.payload!r}")

    @cached_property
    def key(self) -> str:
        """A hash of the operator and of everything below it, independent of the names of nodes."""
        for node in _before(self):  # operands first, so that no hash recurses
            _ = node.key
        program = self.body or self.outline
        parts = [
            self.kind,
            repr(sorted((k, v) for k, v in self.attributes.items() if k not in NO_CONTENT)),
            *(str(t) for t in self.tensors),
            repr(self.types),
            program.key if program else "",
            self.inside.key if self.inside is not None else "",
            *(f"{v.node.key}.{v.index}" for v in self.operands),
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]

    @property
    def attributes(self) -> dict[str, Any]:
        """The payload and the recomputation as files, texts and content hashes have them."""
        attributes = {} if self.payload is None else self.payload.attributes
        if self.again:
            attributes["again"] = self.kind in PARALLELIZATION or int(self.again)
        return attributes

    @property
    def name(self) -> str:
        """The name of an input, such as an argument's path; "" for other nodes."""
        return (isinstance(self.payload, Input) and self.payload.name) or ""

    def of(self, kind: type[P]) -> P:
        """Return the payload, which must be of this class."""
        assert isinstance(self.payload, kind), (self.kind, kind)
        return self.payload

    @property
    def results(self) -> tuple[Value, ...]:
        if len(self.tensors) == 1:  # the common case, on the hottest path
            return (Value(self),)
        return tuple(Value(self, i) for i in range(len(self.tensors)))

    def __repr__(self) -> str:
        return f"<{self.kind} {self.key[:8]}>"


def _before(node: Node) -> list[Node]:
    """Return the nodes below this one that have no hash yet, operands first."""
    order: dict[int, Node] = {}
    stack = [v.node for v in node.operands]
    while stack:
        last = stack[-1]
        missing = [] if "key" in last.__dict__ or id(last) in order else [v.node for v in last.operands]
        missing = [n for n in missing if "key" not in n.__dict__ and id(n) not in order]
        if missing:
            stack += missing
        else:
            stack.pop()
            if "key" not in last.__dict__:
                order[id(last)] = last
    return list(order.values())


@dataclass(frozen=True)
class Value:
    """One result of a node."""

    node: Node
    index: int = 0

    @property
    def tensor(self) -> Tensor:
        return self.node.tensors[self.index]

    @property
    def type(self) -> Type:
        return self.node.types[self.index]


CONSTRAIN = "constrain"  # a value whose type the user constrains; otherwise the identity
PIPELINE = "pipeline"
BRANCHES = "branches"
STAGES = "stages"  # the stages of a pipeline that differ in their operators: each device runs its own
TAIL = "tail"  # the program after a pipeline's last stage, micro-batch by micro-batch (`unity.pcg.parallel.stages`)
THROUGH = frozenset({"remat", STAGES})  # nodes whose inner graph has the types of their operands and results
LOOPS = frozenset({"scan", PIPELINE, TAIL})  # nodes whose inner graph runs `length` times on a device
PARALLELIZATION = frozenset(
    {
        "partition", "combine", "replicate", "reduce", "reduce_partition", "combine_replicate", "combine_partition", "contribute",
        "unreplicate", "view"
    }
)  # fmt: skip
UNCHANGED = PARALLELIZATION | {CONSTRAIN}  # the identity on values


def times_inside(node: Node) -> int:
    """Return the number of times that the graph inside of a node runs: the length of a loop, otherwise 1."""
    return node.payload.length if isinstance(node.payload, LoopPayload) else 1


def reserved_axes(node: Node) -> tuple[str, ...]:
    """Return the names of the mesh axes, in mesh order, along which the stages or groups of a node lie; none if it has none."""
    return node.payload.along if isinstance(node.payload, (Pipeline, PipelineTail, Stages, Branches)) else ()


def carried_by(loop: Node) -> range:
    """Return the positions of a loop's carried operands. The first results are their final values."""
    payload = loop.payload
    assert isinstance(payload, LoopPayload), loop
    first = payload.consts + payload.read
    return range(first, first + payload.carry)


def accumulated_loss(loop: Node) -> Value | None:
    """Return the result of a loop over micro-batches to which each step adds a term, and whose gradient the steps add up."""
    number = loop.payload.loss if isinstance(loop.payload, Scan) else None
    return None if number is None else Value(loop, number)


def recurrent(loop: Node) -> range:
    """Return the positions of carried operands that depend on an earlier step: none in a loop of a single step."""
    single = isinstance(loop.payload, Scan) and loop.payload.length == 1
    return range(0) if single else carried_by(loop)


@dataclass(frozen=True, eq=False)
class PCG:
    """A graph: its inputs in order, its outputs, and the mesh axes of its types if it is parallel."""

    inputs: tuple[Node, ...]
    outputs: tuple[Value, ...]
    axes: tuple[Axis, ...] = ()

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes, operands before users, in the order of a depth-first walk from the outputs; inputs first."""
        order: dict[int, Node] = {id(n): n for n in self.inputs}
        stack: list[tuple[Node, Iterator[Node]]] = []
        for root in (v.node for v in self.outputs):
            if id(root) in order:
                continue
            stack.append((root, iter([v.node for v in root.operands])))
            while stack:
                node, rest = stack[-1]
                following = next((n for n in rest if id(n) not in order), None)
                if following is not None:
                    stack.append((following, iter([v.node for v in following.operands])))
                else:
                    order[id(node)] = node
                    stack.pop()
        return tuple(order.values())

    @cached_property
    def key(self) -> str:
        """The canonical hash: equal for graphs that differ only in the names or order of their nodes."""
        for node in self.nodes:  # operands first, so that no hash recurses
            _ = node.key
        parts = [*(str(n.tensors) + repr(n.types) for n in self.inputs), *(f"{v.node.key}.{v.index}" for v in self.outputs)]
        return hashlib.sha256("\n".join([repr(self.axes), *parts]).encode()).hexdigest()[:32]

    @cached_property
    def users(self) -> Mapping[int, tuple[tuple[Node, int], ...]]:
        """The users of every node (by id), each with an operand position."""
        users: dict[int, list[tuple[Node, int]]] = {id(n): [] for n in self.nodes}
        for node in self.nodes:
            for position, v in enumerate(node.operands):
                users[id(v.node)].append((node, position))
        return {k: tuple(v) for k, v in users.items()}

    def walk(self) -> Iterator[tuple[Node, int]]:
        """Iterate over all nodes, nested ones included, each with the number of times it runs."""
        for node in self.nodes:
            yield node, 1
            if node.inside is not None:
                times = times_inside(node)
                for inner, n in node.inside.walk():
                    yield inner, n * times

    def graphs(self) -> Iterator[PCG]:
        """Iterate over this graph and the graphs nested in it."""
        yield self
        for node in self.nodes:
            if node.inside is not None:
                yield from node.inside.graphs()

    def __len__(self) -> int:
        return sum(1 for node, _ in self.walk() if node.kind != "input")

    def __bool__(self) -> bool:
        return True  # even without operators

    def __str__(self) -> str:
        return "\n".join(_lines(self, "", _Names()))


class _Names:
    """Short names for the values of a text form: `%12`, or `%12.1` for a second result."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}

    def of(self, v: Value) -> str:
        number = self.numbers.setdefault(id(v.node), len(self.numbers))
        return f"%{number}" if len(v.node.tensors) == 1 else f"%{number}.{v.index}"


def _lines(graph: PCG, indent: str, names: _Names) -> Iterable[str]:
    for node in graph.nodes:
        results = ", ".join(f"{names.of(v)}: {v.tensor}{_type(v, graph)}" for v in node.results)
        operands = ", ".join(names.of(v) for v in node.operands)
        notes = ", ".join(f"{k}={_short(v)}" for k, v in node.attributes.items())
        where = f"  # {node.source}" if node.source else ""
        yield f"{indent}{results} = {node.kind}({operands}){f' [{notes}]' if notes else ''}{where}"
        if node.inside is not None:
            yield from _lines(node.inside, indent + "    ", names)
    yield f"{indent}return {', '.join(names.of(v) for v in graph.outputs)}"


def _type(v: Value, graph: PCG) -> str:
    return " " + show(v.type, graph.axes, v.tensor.ndim) if v.node.types else ""


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 40 else text[:37] + "..."
