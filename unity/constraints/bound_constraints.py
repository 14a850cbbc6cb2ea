"""Constraints bound to one function: masks of its search's choices, and an independent check of its plans."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from unity.base.documents import Natural, Record
from unity.base.errors import ConstraintError, OptionError, PlanError
from unity.base.formatting import short
from unity.constraints.kinds import Across, Constraint, Marked, OperatorPin, Passed, Pin, WithoutRules, marked_by, results_of
from unity.constraints.paths import Spellings, matching, nearest, spellings
from unity.constraints.resolver import Resolver
from unity.machine.machine import Machine
from unity.pcg.capture.capture import Captured
from unity.pcg.ir.graph import CONSTRAIN, PCG
from unity.pcg.ir.user_lines import spoken
from unity.pcg.parallel.axis_names import AxisNames
from unity.pcg.parallel.marks import hidden, mark_of, marks
from unity.pcg.parallel.serial_view import twins
from unity.pcg.parallel.sharding_spec import satisfies
from unity.search.space.configurations import ranks
from unity.search.space.dimensions import ProgramDimensions
from unity.search.space.masks import Mask, names_of
from unity.search.space.offers import offered
from unity.search.space.opening import sites_of
from unity.search.space.sites import Sites


class BoundRecord(Record):
    """The constraints of a plan, and the numbers of the arguments that are weights."""

    passed: tuple[Passed, ...] = msgspec.field(name="given")  # under this name in plan files
    weights: tuple[Natural, ...]


@dataclass(frozen=True, eq=False)
class BoundConstraints:
    """All constraints on a captured function.

    Attributes:
        passed: constraints passed to `unity.optimize`.
        marked: constraints that the function itself states with `unity.constrain`.
        paths: the spellings of the arguments' paths.
        learned: the numbers of the arguments that are weights, even if no gradients are planned.
        overrides: returns masks that replace the constraints at some sites, so that alternatives can be searched there.
    """

    passed: tuple[Passed, ...] = ()
    marked: tuple[Marked, ...] = ()
    paths: Spellings = ()
    learned: frozenset[int] = frozenset()
    overrides: Callable[[ProgramDimensions], Mapping[int, Mask]] = field(default=lambda dimensions: {})

    @property
    def every(self) -> tuple[Constraint, ...]:
        """All constraints on types."""
        return (*(c for c in self.passed if not isinstance(c, WithoutRules)), *self.marked)

    def __call__(self, dimensions: ProgramDimensions, machine: Machine) -> Mapping[int, Mask]:
        """Return the masks of the constrained sites, by site.

        Raises ConstraintError if a constraint names something that the program or the machine does not have.
        """
        resolver, masks = self.resolver(dimensions, machine), dict[int, Mask]()
        for constraint in self.every:
            for s, rule in constraint.mask_rules(resolver):
                masks[s] = (*masks.get(s, ()), rule)
        return masks | dict(self.overrides(dimensions))

    def resolver(self, dimensions: ProgramDimensions, machine: Machine) -> Resolver:
        """Return the resolver of constraints' names for a program on a machine, whose first input sites are the arguments."""
        inputs = tuple(s for s, site in enumerate(dimensions.opened.sites) if site.kind == "input")
        learned = frozenset(inputs[k] for k in self.learned)
        return Resolver(replace(dimensions, learned=learned), machine, self.paths, inputs)

    def resolver_for(self, opened: Sites, machine: Machine) -> Resolver:
        """Return the resolver of constraints' names for the sites of a graph on a machine."""
        offers = offered(opened.sites)
        return self.resolver(ProgramDimensions(opened, offers, ranks(opened.sites, offers)), machine)

    def of(self, some: Collection[Constraint]) -> BoundConstraints:
        """Return a copy with only some of the constraints."""
        passed = tuple(c for c in self.passed if c in some)
        return replace(self, passed=passed, marked=tuple(c for c in self.marked if c in some))

    @property
    def record(self) -> BoundRecord:
        """The passed constraints for a document. Those that the function states are part of its graph."""
        return BoundRecord(self.passed, tuple(sorted(self.learned)))

    def check(self, serial: PCG, parallel: PCG, machine: Machine) -> None:
        """Raise PlanError, naming the constraint and the tensor, unless a parallel graph of a program obeys all constraints."""
        pairs = ((c, place) for c in self.every for place in self.violations(c, serial, parallel, machine))
        violation = next(pairs, None)
        if violation is not None:
            constraint, place = violation
            names = AxisNames.of_every_axis(machine.axes, machine.named_levels)
            raise PlanError(f"the plan does not obey its constraints: {constraint.described(names)}: {place}")

    def violations(self, constraint: Constraint, serial: PCG, parallel: PCG, machine: Machine) -> Iterator[str]:
        """Yield the tensors of a parallel graph whose types do not obey one constraint."""
        names, axes = names_of(machine), parallel.axes
        if isinstance(constraint, Pin):
            for k in matching(constraint.path, self.paths):
                node = parallel.inputs[k]
                if not satisfies(constraint.sharding.slices(node.tensors[0].ndim, names), node.types[0], axes):
                    yield self.paths[k][0]
        elif isinstance(constraint, OperatorPin):
            named = [n for n, _ in parallel.walk() if constraint.means(n)]
            if not named:
                yield "no operator has this name"
            for node in named:
                for tensor, type_ in zip(node.tensors, node.types, strict=True):
                    if not satisfies(constraint.sharding.slices(tensor.ndim, names), type_, axes):
                        yield f"{node.kind} at {short(node.source)}"
        elif isinstance(constraint, Marked):
            for node in (n for n, _ in parallel.walk() if n.kind == CONSTRAIN and mark_of(n) == constraint.sharding):
                if not satisfies(constraint.sharding.slices(node.tensors[0].ndim, names), node.types[0], axes):
                    yield f"the value at {constraint.source}"
        elif isinstance(constraint, Across):
            yield from self.violations_across(constraint, serial, parallel, machine)

    def violations_across(self, constraint: Across, serial: PCG, parallel: PCG, machine: Machine) -> Iterator[str]:
        """Yield the values that are split across a level as a constraint forbids, or not split as it requires."""
        opened = sites_of(serial, self.learned, True)
        resolver = self.resolver_for(opened, machine)
        split, levels = resolver.splits_a(constraint.dimension), resolver.level(constraint.level)
        for before, after in twins(serial, parallel):
            site = opened.of_node.get(id(before), -1)
            for k, type_ in enumerate(after.types if site >= 0 else ()):
                for state in (type_[axis] for axis in levels):
                    follows = split(site, k, state) if state.kind == "P" else False
                    match constraint.word:
                        case "forbid":
                            violates = follows is True
                        case "only":
                            violates = state.kind == "P" and follows is False
                        case "require":
                            violates = not follows and before.kind == "input" and _can_follow(resolver, site, constraint)
                    if violates:
                        yield f"{before.name or before.kind} ({short(before.source)})"


def _can_follow(resolver: Resolver, site: int, constraint: Across) -> bool:
    """Return whether a site is an argument that has the dimension of a constraint."""
    return site in resolver.inputs and any(resolver.split(site, resolver.follows(constraint.dimension)))


def bind(
    constraints: Iterable[Constraint], captured: Captured, fn: Callable[..., Any], argnums: int | Sequence[int] = 0
) -> BoundConstraints:
    """Bind constraints to a captured function.

    Raises:
        OptionError: one of `constraints` is not a constraint.
        ConstraintError: a pin's path names no argument and no operator, or the function marks a value whose type is not chosen.
    """
    passed = list[Passed]()
    for c in (every := tuple(constraints)):
        if not isinstance(c, Passed):
            raise OptionError(f"constraints={list(every)!r}: expected unity.pin, forbid, only, require or without_rules, got {c!r}")
        passed.append(c)
    unreachable = next(hidden(captured.graph), None)
    if unreachable is not None:
        what = (
            "unity.constrain" if captured.marking is None else "unity.constrain, or a sharding that unity.keep_shardings() keeps,"
        )
        raise ConstraintError(
            f"{short(unreachable.source)}: {what} is inside of {unreachable.kind}, which is one operator to a plan.\n"
            "    Constrain its operands or its results. (docs: constraints#inside-the-function)"
        )
    marked = tuple(dict.fromkeys(map(marked_by, marks(captured.graph))))
    paths = spellings(fn, [node.name for node in captured.graph.inputs])
    bound_to = tuple(_argument_or_operator_pin(c, paths, captured) if isinstance(c, Pin) else c for c in passed)
    weights = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    count = max((int(path[5 : path.index("]")]) for path in captured.paths), default=-1) + 1
    starts = tuple(f"args[{i % count}]" for i in weights) if count else ()
    learned = frozenset(k for k, path in enumerate(captured.paths) if path.startswith(starts))
    return BoundConstraints(bound_to, marked, paths, learned)


def _argument_or_operator_pin(pin: Pin, paths: Spellings, captured: Captured) -> Pin | OperatorPin:
    """Return a pin itself if its path names arguments, or else a pin of the operators that it names.

    Raises ConstraintError if it names neither.
    """
    if matching(pin.path, paths):
        return pin
    operators = [node for node, _ in captured.graph.walk() if node.body is not None]
    unbound = OperatorPin(pin.path, pin.sharding, ())
    named = [node for node in operators if unbound.means(node)]
    if not named:
        near = difflib.get_close_matches(pin.path, {s for node in operators for s in spoken(node) if s}, 3)
        hint = f"; the nearest operators are {', '.join(near)}" if near else ""
        arguments = f"no argument has the path {pin.path}{nearest(pin.path, paths)}"
        raise ConstraintError(f"{arguments}, and no operator the name{hint} (docs: constraints#paths)")
    return OperatorPin(pin.path, pin.sharding, results_of(named))


def restored(record: BoundRecord, captured: Captured, fn: Callable[..., Any]) -> BoundConstraints:
    """Return the constraints of a saved plan from their record. Raises ConstraintError if they name nothing of the function."""
    return replace(bind(record.passed, captured, fn), learned=frozenset(record.weights))
