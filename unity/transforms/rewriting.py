"""The transformation of a captured program by rules: its search, its plan-file form, and its replay when a plan is loaded."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from msgspec import structs

from unity.base.documents import Natural, Record
from unity.base.errors import DerivationError, OptionError, PlanError
from unity.base.interruption import UntilInterrupted
from unity.base.user_warnings import warn_user
from unity.pcg.capture.capture import Bodies, Captured
from unity.pcg.ir.graph import PCG
from unity.pcg.ir.program import Body
from unity.pcg.parallel.axis_names import AxisNames
from unity.pcg.propagation.nested.scan_programs import with_inside
from unity.search.joint.joint import Budget, Improvement, improvements
from unity.search.joint.nested import Program, program
from unity.search.joint.pricing import Prices
from unity.substitutions.language.axioms import default_digest, default_library
from unity.substitutions.language.derivation import Derivation, NestedDerivation, RewriteStep
from unity.substitutions.language.library import Library, load
from unity.substitutions.language.text import print_side
from unity.substitutions.rewriting.forms import distinct
from unity.substitutions.rewriting.occurrences import Occurrence, Pattern, occurrences, patterns
from unity.substitutions.rewriting.reading import Reading
from unity.substitutions.rewriting.recording import step_of
from unity.substitutions.rewriting.rewriting import rewritten
from unity.transforms.loops import LoopRewriting, scans
from unity.transforms.loops import best as best_of_loops
from unity.transforms.transformation import RewrittenLines, Transformation, TransformationRecord, TransformationSource
from unity.verify.derivations.canonical_form import apply_body, canonical_forms
from unity.verify.derivations.replay import check


class DirectedRule(Record):
    """A rule in one direction, by name."""

    rule: str
    backward: bool

    def __str__(self) -> str:
        return f"{self.rule}{' (backward)' if self.backward else ''}"


class NumberedRule(Record):
    """A rule, applied at the occurrence with this number among all of a segment."""

    applied: DirectedRule
    number: Natural


class RewrittenSegment(Record):
    """A segment by its number among a program's distinct ones (its key holds ids of functions, of one process), and its rules."""

    segment: Natural
    rules: tuple[NumberedRule, ...]


class RewritingRecord(TransformationRecord, tag="rewriting"):
    """A `Rewriting` in a document: the hash of the graph after it, the rewritten segments, and the derivation."""

    graph: str
    segments: tuple[RewrittenSegment, ...]
    derivation: Derivation

    def apply(self, source: TransformationSource) -> Rewriting:
        rules, whole = source.library(), _whole(source.program)
        keys = _distinct_keys(whole)
        if any(part.segment >= len(keys) for part in self.segments):
            raise PlanError("it rewrites a segment that the program does not have")
        ways = {keys[part.segment]: tuple(_named(rule, rules) for rule in part.rules) for part in self.segments}
        changed = {key: end_of(part, path_of(part, ways[key], rules)) for key, part in programs_of(whole, ways).items()}
        after = source.program.of(whole.with_segments(changed))
        if after.graph.key != self.graph:
            raise PlanError("its rewriting leads to another graph: it was made by another version of unity, or by other rules")
        return Rewriting(source.program, after, ways, rules, self.derivation)


RewritePath = tuple[tuple[Body, Occurrence], ...]  # for each step, the program before it, and the occurrence


@dataclass(frozen=True, eq=False, repr=False)
class Rewriting(Transformation):
    """A captured function before and after rewriting. One in which no rule was applied is false.

    Attributes:
        ways: by key, the uses of rules in every distinct rewritten segment.
        library: the rules.
        recorded: the derivation, if the rewriting was read from a document.
    """

    by_rules = True
    kind = "rewriting"
    title = "Rewritten"
    effect = "The program after all rules"

    ways: dict[str, tuple[NumberedRule, ...]]
    library: Library
    recorded: Derivation | None = None

    @classmethod
    def none(cls, captured: Captured) -> Rewriting:
        """The rewriting that leaves a captured function as it is."""
        return cls(captured, captured, {}, Library(()))

    def __bool__(self) -> bool:
        return bool(self.ways)

    @cached_property
    def derivation(self) -> Derivation:
        """Every application of a rule, from the captured program to the rewritten one."""
        if self.recorded is not None or not self:
            return self.recorded or Derivation()
        whole = _whole(self.before)
        paths = {key: path_of(part, self.ways[key], self.library) for key, part in programs_of(whole, self.ways).items()}
        ends = {key: end_of(part, paths[key]) for key, part in programs_of(whole, self.ways).items()}
        return _derivation(whole, paths, ends)

    def check(self) -> None:
        """Replay the derivation with none of the search's code. Raises DerivationError if it does not lead to this program."""
        check(self.before.body, self.after.body, self.derivation, self.library)

    @cached_property
    def applied(self) -> tuple[tuple[DirectedRule, int], ...]:
        """The rules that were applied, with the number of places: equal segments count each, a loop's body counts once."""
        if not self:
            return ()
        often: dict[DirectedRule, int] = {}
        for one, _ in _whole(self.before).walk():
            for part in one.segments:
                for way in self.ways.get(part.key, ()):
                    often[way.applied] = often.get(way.applied, 0) + 1
        return tuple(often.items())

    @cached_property
    def uses(self) -> tuple[RewrittenLines, ...]:
        """The rules in the order of application, segment by segment. Equal segments are represented by one's lines."""
        if not self:
            return ()
        uses_of_rules: list[RewrittenLines] = []
        whole = _whole(self.before)
        often = Counter(part.key for one, _ in whole.walk() for part in one.segments)
        for key, part in programs_of(whole, self.ways).items():
            steps = zip(self.ways[key], path_of(part, self.ways[key], self.library), strict=True)
            uses_of_rules += [
                RewrittenLines(str(way.applied), self._statement(way.applied), _lines(*where), often[key]) for way, where in steps
            ]
        return tuple(uses_of_rules)

    def _statement(self, way: DirectedRule) -> str:
        rule = self.library[way.rule].rule
        left, right = map(print_side, (rule.right, rule.left) if way.backward else (rule.left, rule.right))
        return f"{left}  →  {right}"

    def graphs(self, most: int) -> Iterator[tuple[PCG, tuple[RewrittenLines, ...]]]:
        """Yield the graph after each application of a rule, or after several. Applications to equal segments are one."""
        before = _whole(self.before)
        bodies = programs_of(before, self.ways)
        paths = {key: path_of(part, self.ways[key], self.library) for key, part in bodies.items()}
        applications = [(key, k) for key, path in paths.items() for k in range(1, len(path) + 1)]
        per_step = max(1, -(-len(applications) // most))
        for first in range(0, len(applications), per_step):
            end = first + len(applications[first : first + per_step])
            graph = self.after.graph
            if end < len(applications):
                changed = {key: end_of(bodies[key], paths[key][:k]) for key, k in dict(applications[:end]).items()}
                graph = self.before.of(before.with_segments(changed), self.before.bodies).graph
            yield graph, self.uses[first : first + per_step]

    @property
    def record(self) -> RewritingRecord:
        numbers = {key: number for number, key in enumerate(_distinct_keys(_whole(self.before)))}
        segments = tuple(RewrittenSegment(numbers[key], rules) for key, rules in self.ways.items())
        return RewritingRecord(self.after.graph.key, segments, self.derivation)

    def explained(self, names: AxisNames) -> list[str]:
        lines = [f"rewritten by proved rules: {len(self.before.graph)} operators were captured"]
        for way, times in self.applied:
            lines.append(f"    {times} × {way}:  {self._statement(way)}")
        return lines

    def __str__(self) -> str:
        return f"rewritten by {', '.join(f'{times} × {way}' for way, times in self.applied) or 'no rule'}"


def _whole(captured: Captured) -> Program:
    """Return a captured program with its nested programs, all in segments."""
    return program(captured.body, captured.differentiated)


def rewriting_of(captured: Captured, improvement: Improvement, library: Library, known: Bodies | None = None) -> Rewriting:
    """Return a result of the joint search as a rewriting. `known`: see `graph_of`."""
    ways = {key: tuple(_way(w.occurrence.pattern, w.number) for w in chosen.path) for key, chosen in improvement.chosen.items()}
    return Rewriting(captured, captured.of(improvement.body, known), ways, library)


def _way(pattern: Pattern, number: int) -> NumberedRule:
    return NumberedRule(DirectedRule(pattern.rule.name, pattern.backward), number)


def _named(rule: NumberedRule, library: Library) -> NumberedRule:
    """Return a rule of a document by its present name."""
    return structs.replace(rule, applied=structs.replace(rule.applied, rule=library.present_name(rule.applied.rule)))


def _derivation(whole: Program, paths: Mapping[str, RewritePath], ends: Mapping[str, Body]) -> Derivation:
    """Return the steps that changed a program's segments, and those of the programs inside of it.

    Segments are rewritten from the last to the first, so that the values that a step names are still computed as captured. Nested
    programs of scans and remats are rewritten before.
    """
    changed = {key: one for key, one in whole.inside.items() if one.has(ends)}
    instead = {key: one.with_segments(ends) for key, one in changed.items()}
    forms, steps = canonical_forms(with_inside(whole.body, instead)), list[RewriteStep]()
    for part in reversed(whole.segments):
        inputs = [forms.values[v] for v in part.inputs]
        for body, occurrence in paths.get(part.key, ()):
            step = step_of(apply_body(forms.store, with_inside(body, instead), inputs), occurrence)
            if step is None:
                raise DerivationError(f"the rule {occurrence.pattern} was applied where no step can say so")
            steps.append(step)
    inside = {key: NestedDerivation(instead[key].key, _derivation(one, paths, ends)) for key, one in changed.items()}
    return Derivation(tuple(steps), inside)


def _distinct_keys(whole: Program) -> tuple[str, ...]:
    """Return the keys of the segments of a program and its nested ones, in their order, equal segments once."""
    return tuple(dict.fromkeys(part.key for one, _ in whole.walk() for part in one.segments))


def programs_of(whole: Program, wanted: Container[str]) -> dict[str, Body]:
    """Return the programs of the segments whose keys are in `wanted`, one for all equal segments."""
    return {part.key: part.body for one, _ in whole.walk() for part in one.segments if part.key in wanted}


def _lines(body: Body, occurrence: Occurrence) -> tuple[str, ...]:
    """Return the user's lines of an occurrence, in the program's order."""
    matched = {*occurrence.inner, *(root.atom for root in occurrence.roots)}
    return tuple(dict.fromkeys(e.source for e in body.equations if e.source and not matched.isdisjoint(e.results)))


def end_of(body: Body, path: RewritePath) -> Body:
    """Return a segment after its last step."""
    if not path:
        return distinct(body)
    new = rewritten(*path[-1])
    assert new is not None
    return distinct(new)


def path_of(body: Body, ways: Sequence[NumberedRule], library: Library) -> RewritePath:
    """Replay a segment's steps."""
    steps = []
    body = distinct(body)
    for way in ways:
        name, backward = way.applied.rule, way.applied.backward
        entry = library.find(name)
        if entry is None:
            raise PlanError(f"its rewriting uses the rule {name}, which the library does not have")
        occurrence = next(itertools.islice(occurrences(Reading(body), Pattern(entry.rule, backward)), way.number, None), None)
        new = rewritten(body, occurrence) if occurrence is not None else None
        if occurrence is None or new is None:
            raise PlanError(f"its rewriting uses the rule {name} where it does not apply")
        steps.append((body, occurrence))
        body = distinct(new)
    return tuple(steps)


PROGRAMS = 200  # number of programs that are priced unless a budget is given
# The patience of a search without a budget. Of fourteen models on 8 H100s or one, each gain of 1 % was found at most 30 programs
# after the one before; two of less, 0.9 and 0.3 %, after 137.
PATIENCE = 64


def budget_of(budget: Any) -> Budget:
    """Return the user's budget: programs if it is an integer, seconds if it is a float. Raises OptionError otherwise."""
    if budget is None:
        return Budget(PROGRAMS, patience=PATIENCE)
    if isinstance(budget, bool) or not isinstance(budget, (int, float)) or budget < 0:
        raise OptionError(f"budget={budget!r} is neither a number of programs (an int) nor of seconds (a float)")
    return Budget(programs=budget) if isinstance(budget, int) else Budget(seconds=budget)


@dataclass(frozen=True, eq=False)
class Rewriter:
    """Searches for rewritings with the rules of a library.

    `rules` is None for unity's own library, which is read when it is needed: a plan from the cache may need no rule.
    """

    rules: Library | None
    budget: Budget

    @property
    def library(self) -> Library:
        """The library of rules."""
        return default_library() if self.rules is None else self.rules

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that a result depends on, as JSON data."""
        if self.rules is None:
            rules: Any = default_digest()
        else:
            rules = [*(e.hash for e in self.rules.entries), *(rule.name for rule in self.rules.loops)]
        return {"rules": rules, "budget": [self.budget.programs, self.budget.seconds, self.budget.patience]}

    def best(self, captured: Captured, prices: Prices, say: Callable[[str], None]) -> tuple[Rewriting | None, bool]:
        """Return the rewriting that makes a program cheapest and whose derivation replays, or None; and whether Ctrl-C was pressed.

        After Ctrl-C it is the best rewriting so far.
        """
        if not self.library.entries or self.budget.programs == 0:
            return None, False
        every = improvements(captured.body, captured.differentiated, prices, patterns(self.library.rules), self.budget, say=say)
        reached = UntilInterrupted(every)
        improved = list(reached)
        return self._replaying(captured, prices, improved[1:]), reached.interrupted

    def best_of_loops(
        self, captured: Captured, prices: Prices, seconds: float, say: Callable[[str], None]
    ) -> Iterator[LoopRewriting]:
        """Yield the rules of loops that make a program cheapest, then those of them that need less memory; each result is derived.

        `seconds` are those of a plan of the program.
        """
        if self.budget.programs == 0 or not any(True for _ in scans(captured.body)) or not self.library.loops:
            return
        best = best_of_loops(captured, self.library.loops, prices, seconds, say)
        for rewriting in itertools.chain([best], best.with_less_memory()) if best is not None else ():
            try:
                rewriting.check()
            except DerivationError as problem:
                warn_user(f"rules of loops are not used, because their result is not derived: {problem}")
            else:
                yield rewriting

    def _replaying(self, captured: Captured, prices: Prices, improved: Sequence[Improvement]) -> Rewriting | None:
        """Return the last of some improvements whose derivation replays."""
        for better in reversed(improved):
            rewriting = rewriting_of(captured, better, self.library, prices.bodies)
            try:
                rewriting.check()
                return rewriting
            except DerivationError as problem:
                warn_user(f"a rewritten program is not used, because its derivation does not replay: {problem}")
        return None


def library_of(rules: Any) -> Library:
    """Return the user's rules: unity's own for None, those of a file or of a loaded library, or none for an empty iterable."""
    if rules is None:
        return default_library()
    if isinstance(rules, Library):
        return rules
    if isinstance(rules, (str, Path)):
        return load(rules)
    if isinstance(rules, Iterable) and not list(rules):
        return Library(())
    raise OptionError(
        f"rules={rules!r} is no library: give a path, what unity.substitutions.language.library.load gives, or () for none"
    )
