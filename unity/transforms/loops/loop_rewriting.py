"""The transformation of a captured program by rules of loops: its form in plan files, its replay, and its check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from unity.base.documents import Record
from unity.base.errors import DerivationError, PlanError
from unity.pcg.capture.capture import Bodies, Captured
from unity.pcg.ir.graph import PCG
from unity.pcg.ir.program import Body
from unity.pcg.parallel.axis_names import AxisNames
from unity.substitutions.language.loop_rules import BATCHED, FEWER_ROUNDS, LOOP_RULES, MAPPED, WRITTEN_OUT, LoopRule
from unity.transforms.loops.application import ChangedScan, applied, changed_scans
from unity.transforms.transformation import RewrittenLines, Transformation, TransformationRecord, TransformationSource
from unity.verify.derivations.batched_loops import check_batched_loops
from unity.verify.derivations.loops import check_loops


class LoopApplication(Record):
    """A rule of loops by name, applied to all scans whose steps have a content hash."""

    rule: str
    step: str


class LoopRewritingRecord(TransformationRecord, tag="loop rules"):
    """A `LoopRewriting` in a document: the hash of the graph after it, and the applications in order."""

    graph: str
    applications: tuple[LoopApplication, ...]

    def apply(self, source: TransformationSource) -> LoopRewriting:
        rules = {rule.name: rule for rule in source.library().loops}
        captured = source.program
        missing = [a.rule for a in self.applications if a.rule not in rules]
        if missing:
            raise PlanError(f"it applies the rule of loops {missing[0]}, which the library does not have")
        bodies = _rewritten(captured.body, self.applications)
        if any(a.body is b.body for a, b in pairwise(bodies)):
            raise PlanError("it applies a rule of loops where it does not apply")
        again = LoopRewriting(captured, captured.of(bodies[-1].body), self.applications)
        if again.after.graph.key != self.graph:
            raise PlanError("its rules of loops lead to another graph: it was made by another version of unity")
        return again


@dataclass(frozen=True, eq=False)
class _RewrittenBody:
    """A program after a rule of loops, and the scans of the program before the rule that it changed; or the captured program."""

    body: Body
    rule: LoopRule | None = None
    scans: tuple[ChangedScan, ...] = ()

    @property
    def written_out(self) -> frozenset[tuple[str, int, int]]:
        """The scans that are written out, as `check_loops` takes them."""
        scans = (scan.parts for scan in self.scans) if self.rule is WRITTEN_OUT else ()
        return frozenset((parts.step.key, parts.length, parts.scan.params["unroll"]) for parts in scans)


@dataclass(frozen=True, eq=False, repr=False)
class LoopRewriting(Transformation):
    """A captured function before and after rules of loops."""

    by_rules = True
    kind = "loop rules"
    title = "Loops rewritten"
    effect = "The program after the rules of loops"

    applications: tuple[LoopApplication, ...]

    @cached_property
    def _rewritten_bodies(self) -> Sequence[_RewrittenBody]:
        return _rewritten(self.before.body, self.applications)

    def check(self) -> None:
        """Derive that each program on the way computes the one before, with none of the code that applies rules."""
        for before, after in pairwise(self._rewritten_bodies):
            if after.rule in (BATCHED, MAPPED):
                check_batched_loops(before.body, after.body)
            else:
                check_loops(before.body, after.body, written_out=after.written_out)
        if self.before.of(self._rewritten_bodies[-1].body).graph.key != self.after.graph.key:
            raise DerivationError("the rules of loops lead to another program than the one after them")

    def with_less_memory(self) -> Iterator[LoopRewriting]:
        """Yield the rewriting without unrolled or written-out loops, then without maps taken at once: all may need more memory.

        Rules that apply to nothing then are left out as well.
        """
        applications = self.applications
        for rules in (FEWER_ROUNDS, [MAPPED]):
            others = tuple(a for a in applications if LOOP_RULES[a.rule] not in rules)
            if others != applications and (others := _that_apply(self.before.body, others)):
                yield loop_rewriting(self.before, others)
            applications = others

    @cached_property
    def applied(self) -> Mapping[LoopRule, int]:
        """The rules that were applied, with the number of scans that each changed."""
        counts: Counter[LoopRule] = Counter()
        for rewritten in self._rewritten_bodies[1:]:
            assert rewritten.rule is not None
            counts[rewritten.rule] += len(rewritten.scans)
        return counts

    @cached_property
    def uses(self) -> tuple[RewrittenLines, ...]:
        """The rules in the order of application, each with the lines of the values that it moves."""
        return tuple(_lines(rewritten) for rewritten in self._rewritten_bodies[1:])

    def graphs(self, most: int) -> Iterator[tuple[PCG, tuple[RewrittenLines, ...]]]:
        """Yield the graph after all rules: each changes a loop as a whole."""
        yield self.after.graph, self.uses

    @property
    def record(self) -> LoopRewritingRecord:
        return LoopRewritingRecord(self.after.graph.key, self.applications)

    def explained(self, names: AxisNames) -> list[str]:
        lines = ["loops rewritten by proved rules:"]
        return lines + [f"    {times} × {rule.name}:  {rule.statement}" for rule, times in self.applied.items()]

    def __str__(self) -> str:
        return f"loops rewritten by {', '.join(f'{times} × {rule.name}' for rule, times in self.applied.items())}"


def loop_rewriting(captured: Captured, applications: Sequence[LoopApplication], known: Bodies | None = None) -> LoopRewriting:
    """Return a function after rules of loops. `known`: see `graph_of`."""
    after = _rewritten(captured.body, applications)[-1].body
    return LoopRewriting(captured, captured.of(after, known), tuple(applications))


def applicable(body: Body, rule: LoopRule) -> list[LoopApplication]:
    """Return the applications of a rule to the scans of a program, those with equal steps together.

    Of two scans with equal steps, a rule may apply to one alone: an input of the step may be a constant there, and a carry here.
    """
    keys = (changed.parts.step.key for changed in changed_scans(body, rule))
    return [LoopApplication(rule.name, key) for key in dict.fromkeys(keys)]


def apply(body: Body, application: LoopApplication) -> Body:
    """Return a program after an application of a rule; the same object if it does not apply."""
    return applied(body, LOOP_RULES[application.rule], application.step)


def _rewritten(body: Body, applications: Sequence[LoopApplication]) -> list[_RewrittenBody]:
    """Return the program before the first application of a rule, and after each."""
    bodies = [_RewrittenBody(body)]
    for application in applications:
        rule = LOOP_RULES[application.rule]
        changed = tuple(scan for scan in changed_scans(body, rule) if scan.parts.step.key == application.step)
        body = apply(body, application)
        bodies.append(_RewrittenBody(body, rule, changed))
    return bodies


def _that_apply(body: Body, applications: Sequence[LoopApplication]) -> tuple[LoopApplication, ...]:
    """Return those of some applications that change a program, one after the other."""
    applying = list[LoopApplication]()
    for application in applications:
        after = apply(body, application)
        applying += [application] if after is not body else []
        body = after
    return tuple(applying)


def _lines(rewritten: _RewrittenBody) -> RewrittenLines:
    """Return a use of a rule with the lines of the values that it moved."""
    assert rewritten.rule is not None
    lines = (e.source for scan in rewritten.scans for e in scan.equations if e.source)
    return RewrittenLines(rewritten.rule.name, rewritten.rule.statement, tuple(dict.fromkeys(lines)), len(rewritten.scans))
