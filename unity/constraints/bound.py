"""Constraints on one function: given to its searches as masks, and held against its plans, independently of any search."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unity.base.errors import ConstraintError, OptionError, PlanError
from unity.base.formatting import short
from unity.constraints.ground import Ground
from unity.constraints.kinds import Across, Constraint, Marked, OperatorPin, Pin, WithoutRules, from_json, marked_by, results_of
from unity.constraints.paths import Spellings, matching, nearest, spellings
from unity.machine.machine import Machine
from unity.pcg.capture.capture import Captured
from unity.pcg.ir.graph import CONSTRAIN, PCG
from unity.pcg.ir.user_lines import spoken
from unity.pcg.parallel.marks import hidden, mark_of, marks
from unity.pcg.parallel.serial_view import twins
from unity.pcg.parallel.wanted_types import met
from unity.search.space.configurations import ranks
from unity.search.space.dimensions import ProgramDimensions
from unity.search.space.masks import Mask, names_of
from unity.search.space.offers import offered
from unity.search.space.opening import sites_of


@dataclass(frozen=True, eq=False)
class Bound:
    """What is constrained: `given` in a call of `unity.optimize`, and `marked` in the function itself.

    `learned`: the numbers of the arguments that are weights, also where no gradients are planned.
    """

    given: tuple[Constraint, ...] = ()
    marked: tuple[Marked, ...] = ()
    paths: Spellings = ()
    learned: frozenset[int] = frozenset()
    # masks of some sites instead of what is constrained there, to see what else there would be
    instead: Callable[[ProgramDimensions], Mapping[int, Mask]] = field(default=lambda dimensions: {})

    @property
    def every(self) -> tuple[Constraint, ...]:
        """All constraints on types."""
        return (*(c for c in self.given if not isinstance(c, WithoutRules)), *self.marked)

    def __call__(self, dimensions: ProgramDimensions, machine: Machine) -> Mapping[int, Mask]:
        """The sites that are not free, and their masks. Raises ConstraintError where a constraint speaks of nothing there."""
        ground, masks = self.ground(dimensions, machine), dict[int, Mask]()
        for constraint in self.every:
            for s, rule in constraint.rules(ground):
                masks[s] = (*masks.get(s, ()), rule)
        return masks | dict(self.instead(dimensions))

    def ground(self, dimensions: ProgramDimensions, machine: Machine) -> Ground:
        """What constraints are held against. Arguments are the first sites."""
        inputs = tuple(s for s, site in enumerate(dimensions.opened.sites) if site.kind == "input")
        learned = frozenset(inputs[k] for k in self.learned)
        return Ground(replace(dimensions, learned=learned), machine, self.paths, inputs)

    def of(self, some: Collection[Constraint]) -> Bound:
        """Some of the constraints."""
        given = tuple(c for c in self.given if c in some)
        return replace(self, given=given, marked=tuple(c for c in self.marked if c in some))

    def to_json(self) -> dict[str, Any]:
        """What was given, as JSON data. (What the function says itself is in its graph.)"""
        return {"given": [c.to_json() for c in self.given], "weights": sorted(self.learned)}

    def check(self, serial: PCG, parallel: PCG, machine: Machine) -> None:
        """Raises PlanError, naming the constraint and the tensor, unless a parallel graph of a program obeys all constraints."""
        broken = next((f"{c}: {what}" for c in self.every for what in self.broken(c, serial, parallel, machine)), None)
        if broken is not None:
            raise PlanError(f"the plan does not obey its constraints: {broken}")

    def broken(self, constraint: Constraint, serial: PCG, parallel: PCG, machine: Machine) -> Iterator[str]:
        """The tensors of a parallel graph that are not as one constraint says, read off their types."""
        names, axes = names_of(machine), parallel.axes
        if isinstance(constraint, Pin):
            for k in matching(constraint.path, self.paths):
                node = parallel.inputs[k]
                if not met(constraint.wanted.slices(node.tensors[0].ndim, names), node.types[0], axes):
                    yield self.paths[k][0]
        elif isinstance(constraint, OperatorPin):
            for node in (n for n, _ in parallel.walk() if constraint.means(n)):
                for tensor, type_ in zip(node.tensors, node.types, strict=True):
                    if not met(constraint.wanted.slices(tensor.ndim, names), type_, axes):
                        yield f"{node.kind} at {short(node.source)}"
        elif isinstance(constraint, Marked):
            for node in (n for n, _ in parallel.walk() if n.kind == CONSTRAIN and mark_of(n) == constraint.wanted):
                if not met(constraint.wanted.slices(node.tensors[0].ndim, names), node.types[0], axes):
                    yield f"the value at {constraint.source}"
        elif isinstance(constraint, Across):
            yield from self.across(constraint, serial, parallel, machine)

    def across(self, constraint: Across, serial: PCG, parallel: PCG, machine: Machine) -> Iterator[str]:
        """The values that are split across a level as a constraint forbids, or not as it requires."""
        opened = sites_of(serial, self.learned, True)
        found = offered(opened.sites)
        ground = self.ground(ProgramDimensions(opened, found, ranks(opened.sites, found)), machine)
        split, levels = ground.splits_a(constraint.dimension), ground.level(constraint.level)
        for before, after in twins(serial, parallel):
            site = opened.of_node.get(id(before), -1)
            for k, type_ in enumerate(after.types if site >= 0 else ()):
                for axis in levels:
                    state = type_[axis]
                    follows = split(site, k, state) if state.kind == "P" else False
                    wrong = {"forbid": follows is True, "only": state.kind == "P" and follows is False}
                    wrong["require"] = not follows and before.kind == "input" and _can(ground, site, constraint)
                    if wrong[constraint.word]:
                        yield f"{before.attributes.get('name') or before.kind} ({short(before.source)})"


def _can(ground: Ground, site: int, constraint: Across) -> bool:
    return site in ground.inputs and any(ground.split(site, ground.follows(constraint.dimension)))


def bound(constraints: Iterable[Constraint], captured: Captured, fn: Callable[..., Any], argnums: int | Sequence[int] = 0) -> Bound:
    """Constraints on a captured function.

    Raises:
        OptionError: something given is no constraint.
        ConstraintError: no argument has a path that is pinned, or the function marks a value where no type can be chosen.
    """
    given = tuple(constraints)
    for c in given:
        if not isinstance(c, (Pin, OperatorPin, Across, WithoutRules)):
            raise OptionError(f"constraints={list(given)!r}: {c!r} is none; give unity.pin, forbid, only, require or without_rules")
    lost = next(hidden(captured.graph), None)
    if lost is not None:
        raise ConstraintError(
            f"{short(lost.source)}: unity.constrain is inside of {lost.kind}, which is one operator to a plan.\n    Constrain what"
            " goes in or what comes out. (docs: constraints#inside-the-function)"
        )
    marked = tuple(dict.fromkeys(map(marked_by, marks(captured.graph))))
    paths = [str(node.attributes["name"]) for node in captured.graph.inputs]
    known = spellings(fn, paths)
    given = tuple(_of_operators(c, known, captured) if isinstance(c, Pin) else c for c in given)
    weights = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    count = max((int(path[5 : path.index("]")]) for path in captured.paths), default=-1) + 1
    starts = tuple(f"args[{i % count}]" for i in weights) if count else ()
    learned = frozenset(k for k, path in enumerate(captured.paths) if path.startswith(starts))
    return Bound(given, marked, known, learned)


def _of_operators(pin: Pin, known: Spellings, captured: Captured) -> Pin | OperatorPin:
    """The pin, of operators if its path is that of no argument. Raises ConstraintError if it is neither's."""
    if matching(pin.path, known):
        return pin
    operators = [node for node, _ in captured.graph.walk() if node.body is not None]
    unbound = OperatorPin(pin.path, pin.wanted, ())
    named = [node for node in operators if unbound.means(node)]
    if not named:
        near = difflib.get_close_matches(pin.path, {s for node in operators for s in spoken(node) if s}, 3)
        hint = f"; the nearest operators are {', '.join(near)}" if near else ""
        arguments = f"no argument has the path {pin.path}{nearest(pin.path, known)}"
        raise ConstraintError(f"{arguments}, and no operator the name{hint} (docs: constraints#paths)")
    return replace(unbound, results=results_of(named))


def restored(data: Any, captured: Captured, fn: Callable[..., Any]) -> Bound:
    """The constraints of a saved plan. Raises PlanError if the data say nothing that is known."""
    try:
        return replace(bound(map(from_json, data["given"]), captured, fn), learned=frozenset(map(int, data["weights"])))
    except (TypeError, ValueError, IndexError, KeyError, ConstraintError) as error:
        raise PlanError(f"its constraints are damaged: {type(error).__name__}: {error}") from error
