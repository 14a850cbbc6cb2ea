"""How a captured program was rewritten: found by the joint search, kept in plan files, and done again when a plan is loaded."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from unity.base.errors import DerivationError, OptionError, PlanError
from unity.base.interruption import UntilInterrupted
from unity.pcg.capture.capture import Bodies, Captured
from unity.pcg.ir.program import Body
from unity.pcg.propagation.scan_programs import with_inside
from unity.search.joint.joint import Budget, Improvement, improvements
from unity.search.joint.nested import Program, program
from unity.search.joint.pricing import Prices
from unity.substitutions.language.axioms import default_digest, default_library
from unity.substitutions.language.derivation import Derivation, Inside, Step
from unity.substitutions.language.library import Library, load
from unity.substitutions.rewriting.forms import distinct
from unity.substitutions.rewriting.occurrences import Occurrence, Pattern, occurrences, patterns
from unity.substitutions.rewriting.reading import Reading
from unity.substitutions.rewriting.recording import step_of
from unity.substitutions.rewriting.rewriting import rewritten
from unity.verify.derivations.canonical_form import apply_body, canonical_forms
from unity.verify.derivations.replay import check


@dataclass(frozen=True)
class Applied:
    """A rule in one direction."""

    rule: str
    backward: bool

    def __str__(self) -> str:
        return f"{self.rule}{' (backward)' if self.backward else ''}"


@dataclass(frozen=True)
class Way:
    """A rule applied to the occurrence of this number."""

    applied: Applied
    number: int


@dataclass(frozen=True)
class Use:
    """A rule, the user's lines that it rewrote, and in how many equal places."""

    applied: Applied
    lines: tuple[str, ...]
    times: int


Taken = tuple[tuple[Body, Occurrence], ...]  # of each step, the program that it is taken in, and where


@dataclass(frozen=True, eq=False)
class Rewriting:
    """A captured function before and after. `ways` has for every different segment that was changed, by key, what was done.

    A rewriting in which no rule was applied is false.
    """

    before: Captured
    after: Captured
    ways: dict[str, tuple[Way, ...]]
    library: Library

    @classmethod
    def none(cls, captured: Captured) -> Rewriting:
        """The rewriting that leaves a captured function as it is."""
        return cls(captured, captured, {}, Library(()))

    def __bool__(self) -> bool:
        return bool(self.ways)

    @cached_property
    def derivation(self) -> Derivation:
        """Every application of a rule, from the captured program to the rewritten one."""
        if not self:
            return Derivation()
        whole = program(self.before.body, self.before.differentiated)
        found = {key: path_of(part, self.ways[key], self.library) for key, part in programs_of(whole, self.ways).items()}
        ends = {key: end_of(part, found[key]) for key, part in programs_of(whole, self.ways).items()}
        return _derivation(whole, found, ends)

    def check(self, derivation: Derivation) -> None:
        """Replays a derivation with none of the search's code. Raises DerivationError where it does not lead to this program."""
        check(self.before.body, self.after.body, derivation, self.library)

    @cached_property
    def applied(self) -> tuple[tuple[Applied, int], ...]:
        """The rules that were applied, and in how many places: equal segments count each, what runs several times counts once."""
        if not self:
            return ()
        often: dict[Applied, int] = {}
        for one, _ in program(self.before.body, self.before.differentiated).walk():
            for part in one.segments:
                for way in self.ways.get(part.key, ()):
                    often[way.applied] = often.get(way.applied, 0) + 1
        return tuple(often.items())

    @cached_property
    def uses(self) -> tuple[Use, ...]:
        """The rules in the order in which they were applied, segment by segment. Of equal segments, one's lines."""
        if not self:
            return ()
        found: list[Use] = []
        whole = program(self.before.body, self.before.differentiated)
        often = Counter(part.key for one, _ in whole.walk() for part in one.segments)
        for key, part in programs_of(whole, self.ways).items():
            taken = zip(self.ways[key], path_of(part, self.ways[key], self.library), strict=True)
            found += [Use(way.applied, _lines(*where), often[key]) for way, where in taken]
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        ways = {key: [[w.applied.rule, w.applied.backward, w.number] for w in ways] for key, ways in self.ways.items()}
        return {"graph": self.after.graph.key, "segments": ways, "derivation": self.derivation.to_json()}


def rewriting_of(captured: Captured, found: Improvement, library: Library, known: Bodies | None = None) -> Rewriting:
    """What the joint search found, as a rewriting. `known`: see `graph_of`."""
    ways = {key: tuple(_way(w.occurrence.pattern, w.number) for w in chosen.path) for key, chosen in found.chosen.items()}
    return Rewriting(captured, captured.of(found.body, known), ways, library)


def _way(pattern: Pattern, number: int) -> Way:
    return Way(Applied(pattern.rule.name, pattern.backward), number)


def from_json(captured: Captured, data: Any, library: Library) -> Rewriting:
    """Does again what `to_json` wrote down. Raises PlanError if the rules are others, or something else comes out."""
    try:
        ways = {str(k): tuple(Way(Applied(str(r), bool(b)), int(n)) for r, b, n in steps) for k, steps in data["segments"].items()}
        wanted = str(data["graph"])
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise PlanError(f"its rewriting is damaged: {type(problem).__name__}: {problem}") from None
    whole = program(captured.body, captured.differentiated)
    changed = {key: end_of(part, path_of(part, ways[key], library)) for key, part in programs_of(whole, ways).items()}
    after = captured.of(whole.with_segments(changed))
    if after.graph.key != wanted or changed.keys() != ways.keys():
        raise PlanError("its rewriting leads to another graph: it was made by another version of unity, or by other rules")
    return Rewriting(captured, after, ways, library)


def derivation_of(data: Any) -> Derivation:
    """The derivation that `to_json` wrote down. Raises PlanError if it is something else."""
    return Derivation.from_json(data.get("derivation") if isinstance(data, dict) else None)


def _derivation(whole: Program, paths: Mapping[str, Taken], ends: Mapping[str, Body]) -> Derivation:
    """How a program's segments were changed, and those of the programs inside of it.

    Segments are taken from the last one to the first, so that what a step names is still computed as it was captured; but inside of
    scans and remats it is as it was changed, as those come first.
    """
    changed = {key: one for key, one in whole.inside.items() if one.has(ends)}
    instead = {key: one.with_segments(ends) for key, one in changed.items()}
    forms, steps = canonical_forms(with_inside(whole.body, instead)), list[Step]()
    for part in reversed(whole.segments):
        inputs = [forms.values[v] for v in part.inputs]
        for body, occurrence in paths.get(part.key, ()):
            step = step_of(apply_body(forms.store, with_inside(body, instead), inputs), occurrence)
            if step is None:
                raise DerivationError(f"the rule {occurrence.pattern} was applied where no step can say so")
            steps.append(step)
    inside = {key: Inside(instead[key].key, _derivation(one, paths, ends)) for key, one in changed.items()}
    return Derivation(tuple(steps), inside)


def programs_of(whole: Program, wanted: Container[str]) -> dict[str, Body]:
    """The programs of the segments that are wanted, one for all that are equal."""
    return {part.key: part.body for one, _ in whole.walk() for part in one.segments if part.key in wanted}


def _lines(body: Body, occurrence: Occurrence) -> tuple[str, ...]:
    """The user's lines behind an occurrence, in the program's order."""
    made = {*occurrence.inner, *(root.atom for root in occurrence.roots)}
    return tuple(dict.fromkeys(e.source for e in body.equations if e.source and not made.isdisjoint(e.results)))


def end_of(body: Body, path: Taken) -> Body:
    """What a segment is after its steps."""
    if not path:
        return distinct(body)
    new = rewritten(*path[-1])
    assert new is not None
    return distinct(new)


def path_of(body: Body, ways: Sequence[Way], library: Library) -> Taken:
    """A segment's steps, taken again."""
    taken = []
    body = distinct(body)
    for way in ways:
        name, backward = way.applied.rule, way.applied.backward
        rule = next((e.rule for e in library.entries if e.rule.name == name), None)
        if rule is None:
            raise PlanError(f"its rewriting uses the rule {name}, which the library does not have")
        found = next(itertools.islice(occurrences(Reading(body), Pattern(rule, backward)), way.number, None), None)
        new = rewritten(body, found) if found is not None else None
        if found is None or new is None:
            raise PlanError(f"its rewriting uses the rule {name} where it does not apply")
        taken.append((body, found))
        body = distinct(new)
    return tuple(taken)


PROGRAMS = 200  # that are priced, where no budget is given


def budget_of(budget: Any) -> Budget:
    """What a user asks for: programs if it is an integer, seconds otherwise. Raises ValueError if it is neither."""
    if budget is None:
        return Budget(PROGRAMS)
    if isinstance(budget, bool) or not isinstance(budget, (int, float)) or budget < 0:
        raise OptionError(f"budget={budget!r} is neither a number of programs (an int) nor of seconds (a float)")
    return Budget(programs=budget) if isinstance(budget, int) else Budget(seconds=budget)


@dataclass(frozen=True, eq=False)
class Rewriter:
    """Looks for rewritings with the rules of a library.

    None is the library that comes with unity, which is read when it is needed: a plan from the cache may need no rule.
    """

    rules: Library | None
    budget: Budget

    @property
    def library(self) -> Library:
        """The rules that may be used."""
        return default_library() if self.rules is None else self.rules

    @property
    def settings(self) -> dict[str, Any]:
        """What a result depends on, as JSON data."""
        rules = default_digest() if self.rules is None else [e.hash for e in self.rules.entries]
        return {"rules": rules, "budget": [self.budget.programs, self.budget.seconds]}

    def best(self, captured: Captured, prices: Prices, say: Callable[[str], None]) -> tuple[Rewriting | None, bool]:
        """The rewriting that makes a program cheapest and whose derivation replays, if any makes it cheaper, of what was found
        until Ctrl-C; and whether that was pressed."""
        if not self.library.entries or self.budget.programs == 0:
            return None, False
        every = improvements(captured.body, captured.differentiated, prices, patterns(self.library.rules), self.budget, say=say)
        reached = UntilInterrupted(every)
        found = list(reached)
        return self._replaying(captured, prices, found[1:]), reached.interrupted

    def _replaying(self, captured: Captured, prices: Prices, found: Sequence[Improvement]) -> Rewriting | None:
        """The last of some improvements whose derivation replays."""
        for better in reversed(found):
            rewriting = rewriting_of(captured, better, self.library, prices.bodies)
            try:
                rewriting.check(rewriting.derivation)
                return rewriting
            except DerivationError as problem:
                warnings.warn(f"a rewritten program is not used, because its derivation does not replay: {problem}", stacklevel=2)
        return None


def library_of(rules: Any) -> Library:
    """The rules that a user asks for: those that come with unity (None), a file, a library that was loaded; () is none."""
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
