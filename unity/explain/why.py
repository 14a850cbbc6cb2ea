"""Why one argument or operator is as it is: its type in words, its costs, and what the whole plan would cost with other types."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from unity.base.errors import PlanError
from unity.base.formatting import duration, pattern, short, size
from unity.constraints.paths import matching, nearest, spellings
from unity.exec.lowering import label
from unity.explain.alternatives import Alternative, Ends, alternatives
from unity.pcg.ir.graph import PARALLELIZATION, Node, Value
from unity.pcg.ir.user_lines import spoken
from unity.pcg.parallel.serial_view import twins
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import local_shape, show
from unity.search.cost.prediction import CollectiveTerm, Prediction, predict
from unity.search.memory.backend import backend_of
from unity.search.memory.memory import Held, predict_memory
from unity.search.space.configurations import ranks
from unity.search.space.dimensions import ProgramDimensions
from unity.search.space.offers import offered

if TYPE_CHECKING:
    from unity.plan.plan import Plan

MOST = 3  # different things that a path may mean, for which it is answered
ALTERNATIVES = 4  # of each


def why(plan: Plan, path: str, file: Any = None) -> None:
    """Prints what a path means in a plan: of several equal things the first."""
    console = Console(file=file, markup=False, highlight=False)
    console.width = max(console.width, 140)
    groups = grouped(plan, meant(plan, path))
    for same in groups[:MOST]:
        with console.status("searching for plans with other types"):
            found = answer(plan, same)
        _show(found, plan, console)
    if len(groups) > MOST:
        console.print(f"… and {len(groups) - MOST} more that are meant by {path}")


def answers(plan: Plan, path: str) -> list[dict[str, Any]]:
    """The same as data for other tools."""
    return [asdict(answer(plan, same)) for same in grouped(plan, meant(plan, path))[:MOST]]


@dataclass(frozen=True, eq=False)
class Twin:
    """A node of the program, and what it became in the parallel graph."""

    serial: Node
    parallel: Node

    @property
    def name(self) -> str:
        """What it is called."""
        return str(self.serial.attributes["name"]) if self.serial.kind == "input" else label(self.serial)

    @property
    def ends(self) -> Ends:
        """The types that it has."""
        return Ends(tuple(v.type for v in self.parallel.operands), self.parallel.types)


def typed(plan: Plan) -> list[Twin]:
    """All nodes of a plan that have a type to choose."""
    own = {id(node) for node in plan.serial.inputs}
    pairs = [Twin(before, after) for before, after in twins(plan.serial, plan.pcg)]
    return [t for t in pairs if t.serial.inside is None and (t.serial.kind != "input" or id(t.serial) in own)]


def meant(plan: Plan, path: str) -> list[Twin]:
    """The arguments with a path, or the operators of a kind, a line, both ("softmax at model.py:42") or a scope.

    Raises PlanError, with what is most like it, if there are none.
    """
    there = typed(plan)
    given = [t for t in there if t.serial.kind == "input"]
    known = spellings(plan._made.fn, [t.name for t in given])
    found = [given[k] for k in matching(path, known)]
    operators = [t for t in there if t.serial.kind != "input"]
    found = found or [t for t in operators if path in _spoken(t.serial)]
    if not found:
        near = difflib.get_close_matches(path, {s for t in operators for s in _spoken(t.serial) if s}, 3)
        hint = f"; the nearest operators are {', '.join(near)}" if near else ""
        raise PlanError(
            f"nothing in this plan is meant by {path!r}: no argument{nearest(path, known)}{hint}.\n    Give an argument's path, an"
            ' operator\'s kind ("dot_general"), or a line ("model.py:42"). (docs: constraints#why)'
        )
    return found


def _spoken(node: Node) -> tuple[str, ...]:
    """What an operator may be called by."""
    return *spoken(node), label(node)


def grouped(plan: Plan, found: Iterable[Twin]) -> list[list[Twin]]:
    """Things that are equal but for their layer together."""
    groups: dict[tuple, list[Twin]] = {}
    for t in found:
        kind = pattern(t.name) if t.serial.kind == "input" else (t.serial.kind, short(t.serial.source))
        groups.setdefault((kind, tuple(map(str, t.serial.tensors)), t.ends), []).append(t)
    return list(groups.values())


@dataclass(frozen=True, eq=False)
class Costs:
    """What a plan costs, term by term, for asking what one thing has of it."""

    plan: Plan

    @cached_property
    def differentiated(self) -> frozenset[int]:
        made = self.plan._made
        return made.captured.differentiated if made.search.training.backward else frozenset()

    @cached_property
    def prediction(self) -> Prediction:
        return predict(self.plan.pcg, self.plan.machine, self.differentiated)

    def compute(self, node: Node) -> float:
        """Seconds of an operator itself."""
        return sum(t.forward + t.backward for t in self.prediction.operators if t.node is node)

    def collectives(self, node: Node) -> list[CollectiveTerm]:
        """The collectives inside of a node, and those that change the types of what it takes and gives."""
        around = {id(n) for n in self.around(node)}
        return [t for t in self.prediction.collectives if id(t.collective.node) in around]

    def held(self, node: Node) -> list[Held]:
        """What is held of a node, and of the changes of what it gives, when most is."""
        made, machine = self.plan._made, self.plan.machine
        found = predict_memory(self.plan.pcg, self.differentiated, made.search.training, backend_of(machine))
        after = {id(node), *(id(n) for n in self.changes(node))}
        return [h for h in found.held if id(h.node) in after and h.nbytes]

    def around(self, node: Node) -> Iterator[Node]:
        """A node, and the parallelization operators before and after it."""
        yield node
        yield from self.changes(node)
        for v in node.operands:
            while v.node.kind in PARALLELIZATION:
                yield v.node
                v = v.node.operands[0]

    def changes(self, node: Node) -> Iterator[Node]:
        """The parallelization operators that follow a node."""
        waiting = [node]
        while waiting:
            for user in self.users.get(id(waiting.pop()), ()):
                if user.kind in PARALLELIZATION:
                    yield user
                    waiting.append(user)

    @cached_property
    def users(self) -> dict[int, list[Node]]:
        found: dict[int, list[Node]] = {}
        for user, _ in self.plan.pcg.walk():
            for n in dict.fromkeys(v.node for v in user.operands):
                found.setdefault(id(n), []).append(user)
        return found


@dataclass(frozen=True)
class Said:
    """What is held of a value: its shape, its type, and the same in words."""

    what: str
    tensor: str
    type: str
    says: str


@dataclass(frozen=True)
class Choice:
    """The best plan with one type of a thing."""

    type: str
    time: float
    memory: float
    chosen: bool  # it is the plan itself


@dataclass(frozen=True)
class Answer:
    """Why a thing is as it is. `alike`: how many there are of it; `limit`: what the other choices had to fit."""

    name: str
    line: str
    alike: int
    values: tuple[Said, ...]
    constraints: tuple[str, ...]
    costs: tuple[str, ...]
    limit: float
    choices: tuple[Choice, ...]


def answer(plan: Plan, same: Sequence[Twin]) -> Answer:
    """About one thing (of several that are equal the first), with what the plan would cost if it were otherwise."""
    twin, axes = same[0], plan.pcg.axes
    node = twin.parallel
    values: list[Value] = [*node.operands, *node.results]
    names = [f"operand {p}" for p in range(len(node.operands))]
    names += ["it" if node.kind == "input" else "result" if len(node.types) == 1 else f"result {k}" for k in range(len(node.types))]
    said = [
        Said(name, str(v.tensor), show(v.type, axes, v.tensor.ndim), in_words(v, axes))
        for name, v in zip(names, values, strict=True)
    ]
    limit = max(plan._made.limit or 0.0, plan.memory)
    costs, constraints = tuple(_costs(Costs(plan), node)), tuple(_constraints(plan, twin.serial))
    return Answer(twin.name, short(node.source), len(same), tuple(said), constraints, costs, limit, _choices(plan, twin, limit))


def _choices(plan: Plan, twin: Twin, limit: float) -> tuple[Choice, ...]:
    """The whole plan, with this as it is and otherwise."""
    same, others = alternatives(plan._made, twin.serial, plan.candidate, limit, ALTERNATIVES)
    rows = [Alternative(twin.ends, plan.candidate) if same is None else same, *others]
    return tuple(
        Choice(shown(row.ends, twin.serial, plan.pcg.axes), row.candidate.time, row.candidate.memory, k == 0)
        for k, row in enumerate(rows)
    )


def _show(found: Answer, plan: Plan, console: Console) -> None:
    """In words, and as a table."""
    line = f" ({found.line})" if found.line else ""
    more = f", the first of {found.alike} that are alike" if found.alike > 1 else ""
    console.print(f"{found.name}{line}{more}", style="bold")
    texts = [f"{v.what}: {v.tensor} {v.type}: {v.says}" for v in found.values]
    texts += [*(f"constrained by {constraint}" for constraint in found.constraints), *found.costs]
    condition = ", were it not constrained" if found.constraints else ""
    texts.append(f"the best plans with other types of it that fit {size(found.limit)}{condition}:")
    for text in texts:
        console.print(f"    {text}")
    table = Table("", "type", "the whole step", "", "memory")
    for c in found.choices:
        gain = "" if c.chosen else f"{(c.time / plan.time - 1) * 100:+.1f} %"
        table.add_row(*map(Text, ("→" if c.chosen else "", c.type, duration(c.time), gain, size(c.memory))))
    if len(found.choices) == 1:
        table.add_row("", "no other", "", "", "")
    console.print(table)


def in_words(v: Value, axes: tuple[Axis, ...]) -> str:
    """What a device holds of a value."""
    said = []
    for dim, n in enumerate(v.tensor.shape):
        on = [a for a, s in zip(axes, v.type, strict=True) if s.kind == "P" and s.dim == dim]
        if on:
            said.append(f"dimension {dim} (of {n}) in {prod(a.size for a in on)} slices over {'·'.join(a.name for a in on)}")
    words = {"U": "the same along", "R": "the same, for users that differ, along", "S": "a partial sum over"}
    for kind, word in words.items():
        on = [a.name for a, s in zip(axes, v.type, strict=True) if s.kind == kind]
        said += [f"{word} {'·'.join(on)}"] if on else []
    piece = prod(local_shape(v.tensor.shape, v.type, axes)) * v.tensor.itemsize
    return f"{'; '.join(said) or 'on one device'}; {size(piece)} on each device"


def _constraints(plan: Plan, node: Node) -> list[str]:
    """The constraints that speak of a node."""
    bound, search = plan._made.bound, plan._made.search
    if not bound.every:
        return []
    opened = search.assembled.opened
    found = offered(opened.sites)
    ground = bound.ground(ProgramDimensions(opened, found, ranks(opened.sites, found)), plan.machine)
    site = opened.of_node.get(id(node))
    return [str(c) for c in bound.every if any(s == site for s, _ in c.rules(ground))]


def _costs(costs: Costs, node: Node) -> Iterator[str]:
    seconds, talk = costs.compute(node), costs.collectives(node)
    if node.kind != "input":
        yield f"computing: {duration(seconds)} of a step of {duration(costs.prediction.time)}"
    axes = costs.plan.pcg.axes
    for t in talk:
        c = t.collective
        over = "·".join(axes[i].name for i in c.axes)
        yield f"{c.direction} of {c.node.kind}: {c.kind} of {size(c.nbytes)} over {over}, {c.count} ×, {duration(t.seconds)}"
    if not talk:
        yield "no collectives"
    held = costs.held(node)
    if held:
        parts = (f"{'less ' if h.nbytes < 0 else ''}{size(abs(h.nbytes))} ({h.why})" for h in held)
        yield f"held when most is: {', '.join(parts)}"


def shown(ends: Ends, node: Node, axes: tuple[Axis, ...]) -> str:
    """The types of what a node takes and gives, shortly."""
    made = ", ".join(show(t, axes, tensor.ndim) for t, tensor in zip(ends.results, node.tensors, strict=True))
    given = ", ".join(show(t, axes, v.tensor.ndim) for t, v in zip(ends.operands, node.operands, strict=True))
    return f"{given} → {made}" if given else made
