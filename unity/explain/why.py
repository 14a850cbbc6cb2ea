"""Explanation of one argument or operator: its types in words, its costs, and the costs of plans with other types of it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from math import inf, prod
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from unity.base.errors import PlanError
from unity.base.formatting import duration, pattern, short, size
from unity.constraints.paths import matching, nearest, spellings
from unity.explain.alternatives import Alternative, NodeTypes, alternatives
from unity.pcg.ir.graph import PARALLELIZATION, Node, Value
from unity.pcg.ir.user_lines import label, spoken
from unity.pcg.parallel.axis_names import AxisNames
from unity.pcg.parallel.serial_view import twins
from unity.pcg.types.parallel_type import local_shape
from unity.plan.plan import Plan
from unity.search.cost.prediction import CollectiveTerm, Prediction, TransferTerm
from unity.search.memory.memory import Buffer

MOST = 3  # groups of equal nodes that are explained for one path
EQUAL = 1e-9  # part of a step by which plans of equal time differ, by rounding
ALTERNATIVES = 4  # plans with other types for each group


def why(plan: Plan, path: str, file: Any = None) -> None:
    """Print the explanations of the nodes that a path names, one for each group of equal nodes."""
    console = Console(file=file, markup=False, highlight=False)
    console.width = max(console.width, 140)
    groups = grouped(plan, nodes_named(plan, path))
    for group in groups[:MOST]:
        with console.status("searching for plans with other types"):
            explanation = answer(plan, group)
        _print_answer(explanation, plan, console)
    if len(groups) > MOST:
        console.print(f"… and {len(groups) - MOST} more that are meant by {path}")


def answers(plan: Plan, path: str) -> list[dict[str, Any]]:
    """Return the explanations that `why` prints, as data for other tools."""
    return [asdict(answer(plan, group)) for group in grouped(plan, nodes_named(plan, path))[:MOST]]


@dataclass(frozen=True, eq=False)
class NodePair:
    """A node of the serial graph, and its counterpart in the parallel graph."""

    serial: Node
    parallel: Node

    @property
    def name(self) -> str:
        """The argument's path, or the operator's label."""
        return self.serial.name if self.serial.kind == "input" else label(self.serial)

    @property
    def types(self) -> NodeTypes:
        """The node's types in the plan."""
        return NodeTypes(tuple(v.type for v in self.parallel.operands), self.parallel.types)


def typed_nodes(plan: Plan) -> list[NodePair]:
    """Return all nodes of a plan whose types the search chooses: operators, and inputs of the whole program."""
    own = {id(node) for node in plan.program.serial.inputs}
    pairs = [NodePair(before, after) for before, after in twins(plan.program.serial, plan.program.pcg)]
    return [t for t in pairs if t.serial.inside is None and (t.serial.kind != "input" or id(t.serial) in own)]


def nodes_named(plan: Plan, path: str) -> list[NodePair]:
    """Return the arguments with a path, or the operators of a kind, a line, both ("softmax at model.py:42") or a scope.

    Raises PlanError, with the most similar names, if there are none.
    """
    nodes = typed_nodes(plan)
    arguments = [t for t in nodes if t.serial.kind == "input"]
    paths = spellings(plan.program.family.fn, [t.name for t in arguments])
    operators = [t for t in nodes if t.serial.kind != "input"]
    matches = [arguments[k] for k in matching(path, paths)] or [t for t in operators if path in _spoken(t.serial)]
    if not matches:
        near = difflib.get_close_matches(path, {s for t in operators for s in _spoken(t.serial) if s}, 3)
        hint = f"; the nearest operators are {', '.join(near)}" if near else ""
        raise PlanError(
            f"nothing in this plan is meant by {path!r}: no argument{nearest(path, paths)}{hint}.\n    Give an argument's path, an"
            ' operator\'s kind ("dot_general"), or a line ("model.py:42"). (docs: constraints#why)'
        )
    return matches


def _spoken(node: Node) -> tuple[str, ...]:
    """Return the names by which a user may refer to an operator."""
    return *spoken(node), label(node)


def grouped(plan: Plan, nodes: Iterable[NodePair]) -> list[list[NodePair]]:
    """Group nodes of equal shapes and types that differ only in their layer."""
    groups: dict[tuple, list[NodePair]] = {}
    for t in nodes:
        kind = pattern(t.name) if t.serial.kind == "input" else (t.serial.kind, short(t.serial.source))
        groups.setdefault((kind, tuple(map(str, t.serial.tensors)), t.types), []).append(t)
    return list(groups.values())


@dataclass(frozen=True, eq=False)
class Costs:
    """The predicted costs of a plan, attributed to the nodes of its parallel graph."""

    plan: Plan

    @property
    def prediction(self) -> Prediction:
        return self.plan.program.prediction

    def compute(self, node: Node) -> float:
        """Return the seconds of an operator itself."""
        return sum(t.forward + t.backward for t in self.prediction.operators if t.node is node)

    def collectives(self, node: Node) -> list[CollectiveTerm]:
        """Return the collectives inside of a node, and those that change the types of its operands and results."""
        around = {id(n) for n in self.around(node)}
        return [t for t in self.prediction.collectives if id(t.collective.node) in around]

    def transfers(self, node: Node) -> list[TransferTerm]:
        """Return the transfers of a node's values to the host and back."""
        return [t for t in self.prediction.transfers if t.node is node]

    def held(self, node: Node) -> list[Buffer]:
        """Return the buffers of a node, and of the type changes of its results, that are live at the peak of memory."""
        after = {id(node), *(id(n) for n in self.changes(node))}
        return [h for h in self.plan.program.memory.held if id(h.node) in after and h.nbytes]

    def around(self, node: Node) -> Iterator[Node]:
        """Yield a node, and the parallelization operators before and after it."""
        yield node
        yield from self.changes(node)
        for v in node.operands:
            while v.node.kind in PARALLELIZATION:
                yield v.node
                v = v.node.operands[0]

    def changes(self, node: Node) -> Iterator[Node]:
        """Yield the parallelization operators that follow a node."""
        worklist = [node]
        while worklist:
            for user in self.users.get(id(worklist.pop()), ()):
                if user.kind in PARALLELIZATION:
                    yield user
                    worklist.append(user)

    @cached_property
    def users(self) -> dict[int, list[Node]]:
        """The nodes that read each node's results, by the id of the node that is read."""
        users: dict[int, list[Node]] = {}
        for user, _ in self.plan.program.pcg.walk():
            for n in dict.fromkeys(v.node for v in user.operands):
                users.setdefault(id(n), []).append(user)
        return users


@dataclass(frozen=True)
class ValueDescription:
    """An operand or result of a node: its role, its shape, its type, and the type in words."""

    what: str
    tensor: str
    type: str
    says: str


@dataclass(frozen=True)
class TypeChoice:
    """The best plan with certain types of a node."""

    type: str
    time: float
    memory: float
    chosen: bool  # whether these are the types in the explained plan


@dataclass(frozen=True)
class Answer:
    """The explanation of one node, with its fields named as in the JSON form.

    Attributes:
        alike: the number of equal nodes.
        limit: the memory limit of the plans with other types, in bytes on one device.
        axes: a sentence about the parts of levels that the types name; empty if they name none.
    """

    name: str
    line: str
    alike: int
    values: tuple[ValueDescription, ...]
    constraints: tuple[str, ...]
    costs: tuple[str, ...]
    limit: float
    choices: tuple[TypeChoice, ...]
    axes: str = ""


def answer(plan: Plan, group: Sequence[NodePair]) -> Answer:
    """Explain the first of a group of equal nodes, and search for the best plans with other types of it."""
    twin, limit = group[0], max(plan.program.family.limit or 0.0, plan.memory)
    node, rows = twin.parallel, _alternatives(plan, twin, limit)
    names = plan.program.axis_names.telling_apart(t for row in rows for t in (*row.types.operands, *row.types.results))
    values: list[Value] = [*node.operands, *node.results]
    roles = [f"operand {p}" for p in range(len(node.operands))]
    roles += ["it" if node.kind == "input" else "result" if len(node.types) == 1 else f"result {k}" for k in range(len(node.types))]
    descriptions = [
        ValueDescription(role, str(v.tensor), names.show(v.type, v.tensor.ndim), in_words(v, names))
        for role, v in zip(roles, values, strict=True)
    ]
    choices = [
        TypeChoice(shown(row.types, twin.serial, names), row.candidate.time, row.candidate.memory, k == 0)
        for k, row in enumerate(rows)
    ]
    return Answer(
        name=twin.name,
        line=short(node.source),
        alike=len(group),
        values=tuple(descriptions),
        constraints=tuple(_constraints(plan, twin.serial, names)),
        costs=tuple(_costs(Costs(plan), node, names)),
        limit=limit,
        choices=tuple(choices),
        axes=names.parts,
    )


def _alternatives(plan: Plan, twin: NodePair, limit: float) -> list[Alternative]:
    """Return the best plan with a node's present types, and the best plans with others."""
    same, others = alternatives(plan.program.family, twin.serial, plan.program.candidate, limit, ALTERNATIVES)
    return [Alternative(twin.types, plan.program.candidate) if same is None else same, *others]


def _print_answer(explanation: Answer, plan: Plan, console: Console) -> None:
    """Print an explanation: the types and costs as lines, the choices as a table."""
    line = f" ({explanation.line})" if explanation.line else ""
    more = f", the first of {explanation.alike} that are alike" if explanation.alike > 1 else ""
    console.print(f"{explanation.name}{line}{more}", style="bold")
    texts = [f"{v.what}: {v.tensor} {v.type}: {v.says}" for v in explanation.values]
    texts += [f"mesh axes: {explanation.axes}"] if explanation.axes else []
    texts += [*(f"constrained by {constraint}" for constraint in explanation.constraints), *explanation.costs]
    condition = ", were it not constrained" if explanation.constraints else ""
    room = ", in any memory" if explanation.limit == inf else f" that fit {size(explanation.limit)}"
    texts.append(f"the best plans with other types of it{room}{condition}:")
    for text in texts:
        console.print(f"    {text}")
    table = Table("", "type", "the whole step", "", "memory")
    for c in explanation.choices:
        gain = "" if c.chosen else _gain(c.time, plan.time)
        table.add_row(*map(Text, ("→" if c.chosen else "", c.type, duration(c.time), gain, size(c.memory))))
    if len(explanation.choices) == 1:
        table.add_row("", "no other", "", "", "")
    console.print(table)


def _gain(seconds: float, chosen: float) -> str:
    """Return by how much a plan is slower than the chosen one, in the unit that shows it, and in percent if that shows it, too."""
    gain = seconds - chosen
    if abs(gain) <= EQUAL * chosen:
        return "as fast"
    percent = 100 * gain / chosen
    return f"{'+' if gain > 0 else '−'}{duration(abs(gain))}{f' ({percent:+.1f} %)' if abs(percent) >= 0.1 else ''}"


def in_words(v: Value, names: AxisNames) -> str:
    """Describe a value's type in words, with the bytes of one device's part."""
    axes, phrases = names.axes, []
    for dim, n in enumerate(v.tensor.shape):
        on = [k for k, s in enumerate(v.type) if s.kind == "P" and s.dim == dim]
        if on:
            slices = prod(axes[k].size for k in on)
            phrases.append(f"dimension {dim} (of {n}) in {slices} slices over {names.in_words(on)}")
    if axes and all(s.kind == "U" for s in v.type):
        return f"whole on every device; {size(v.tensor.nbytes)} on each device"
    words = {"U": "replicated over", "R": "replicated, for users that differ, over", "S": "a partial sum over"}
    for kind, word in words.items():
        on = [k for k, s in enumerate(v.type) if s.kind == kind]
        phrases += [f"{word} {names.in_words(on)}"] if on else []
    piece = prod(local_shape(v.tensor.shape, v.type, axes)) * v.tensor.itemsize
    return f"{'; '.join(phrases) or 'on one device'}; {size(piece)} on each device"


def _constraints(plan: Plan, node: Node, names: AxisNames) -> list[str]:
    """Return the constraints that restrict a node of the serial graph."""
    bound, search = plan.program.family.bound, plan.program.family.search
    if not bound.every:
        return []
    opened = search.assembled.opened
    resolver = bound.resolver_for(opened, plan.inspect.machine)
    site = opened.of_node.get(id(node))
    return [c.described(names) for c in bound.every if any(s == site for s, _ in c.mask_rules(resolver))]


def _costs(costs: Costs, node: Node, names: AxisNames) -> Iterator[str]:
    """Yield lines about a node's computation, its collectives and its part of the peak memory."""
    seconds, collectives = costs.compute(node), costs.collectives(node)
    if node.kind != "input":
        yield f"computing: {duration(seconds)} of a step of {duration(costs.prediction.time)}"
    for t in collectives:
        c = t.collective
        over = names.in_words(c.axes)
        yield f"{c.direction} of {c.node.kind}: {c.kind} of {size(c.nbytes)} over {over}, {c.count} ×, {duration(t.seconds)}"
    if not collectives:
        yield "no collectives"
    for t in costs.transfers(node):
        until = "optimizer's state on the host until the update" if t.of_state else "offloaded to the host until the backward pass"
        yield f"{until}: {t.count} × {size(t.nbytes)}, {duration(t.seconds)} there and back"
    held = costs.held(node)
    if held:
        parts = (f"{'less ' if h.nbytes < 0 else ''}{size(abs(h.nbytes))} ({h.why})" for h in held)
        yield f"live at the peak: {', '.join(parts)}"


def shown(types: NodeTypes, node: Node, names: AxisNames) -> str:
    """Return the types of a node's operands and results in short notation."""
    results = ", ".join(names.show(t, tensor.ndim) for t, tensor in zip(types.results, node.tensors, strict=True))
    operands = ", ".join(names.show(t, v.tensor.ndim) for t, v in zip(types.operands, node.operands, strict=True))
    return f"{operands} → {results}" if operands else results
