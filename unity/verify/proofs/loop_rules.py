"""Proofs of the rules of loops: equal steps make equal loops, by induction, and each lemma about a primitive's step.

A rule of loops is proved if the induction is, and every lemma that it rests on. The lemma of reshapes is not expressible in the
rule language: it is checked by execution alone, as are the readers of `verify.derivations.single_steps`, which apply the lemmas.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import z3

from unity.substitutions.language.axioms import folder
from unity.verify.ranks.rule import RankRule, parse_rank_rules
from unity.verify.ranks.verdict import RankVerdict, verdict

WORK = 200_000  # for each goal of the induction, in Z3's own count, which does not depend on the machine


@cache
def step_lemmas() -> tuple[RankRule, ...]:
    """Return the lemmas about one step of each primitive, of `rules/loops.ranks`."""
    return tuple(parse_rank_rules((folder() / "loops.ranks").read_text()))


def lemma_verdicts() -> list[RankVerdict]:
    """Judge every lemma."""
    return [verdict(lemma) for lemma in step_lemmas()]


def loop_faults() -> list[str]:
    """Return the parts of the proof of all rules of loops that are not proved, and not stated as inexpressible."""
    goals = [f"{words}: {answer}" for words, answer in induction() if answer != "proved"]
    return goals + [f"{v.rule.name}: {v.status}, {v.why}" for v in lemma_verdicts() if not v.expected]


def induction() -> list[tuple[str, str]]:
    """Prove that equal steps make equal loops. Returns each goal in words, and "proved" or the answer of Z3.

    A loop over slices `x(0), x(1), …` takes steps `carry, slice → carry, result`. Another reads `before(x(n))` in the place of
    `x(n)`. A step of it on `before(x)` is one of the first on `x`, for every carry and slice. Both carry the same at first. So they
    do after any step if they did before it, and then the results of the step are the same. A batched loop takes steps of several
    loops, each a lane of its carry and of its slices.
    """
    loops = EqualSteps()
    goals = {
        "both loops carry the same after a step if they did before it": loops.c(loops.k + 1) == loops.c2(loops.k + 1),
        "the results of a step are the same if both loops carry the same before it": loops.result == loops.result2,
    }
    sums, lanes, reverse = SumOfSteps(), LanesOfSteps(), ReversedSteps()
    answers = [(words, proves(goal, loops.assumptions)) for words, goal in goals.items()]
    answers.append(("a carry that only adds is its first value and the sum over the steps", proves(sums.goal, sums.assumptions)))
    answers.append(("a lane of a batched loop carries and results in what its loop does", proves(lanes.goal, lanes.assumptions)))
    words = "a loop over reversed slices carries what the loop in the other direction does, and its results are reversed"
    return [*answers, (words, proves(reverse.goal, reverse.assumptions))]


class EqualSteps:
    """Two loops with equal steps that carry the same before step `k`."""

    def __init__(self) -> None:
        carry, slices, other, result = (z3.DeclareSort(name) for name in ("Carry", "Slice", "Other", "Result"))
        step, value = z3.Function("step", carry, slices, carry), z3.Function("value", carry, slices, result)
        step2, value2 = z3.Function("step'", carry, other, carry), z3.Function("value'", carry, other, result)
        before, x = z3.Function("before", slices, other), z3.Function("x", z3.IntSort(), slices)
        self.c, self.c2 = z3.Function("c", z3.IntSort(), carry), z3.Function("c'", z3.IntSort(), carry)
        a, s, n, self.k = z3.Const("a", carry), z3.Const("s", slices), z3.Int("n"), z3.Int("k")
        self.assumptions = [
            z3.ForAll([a, s], z3.And(step(a, s) == step2(a, before(s)), value(a, s) == value2(a, before(s)))),
            z3.ForAll([n], z3.Implies(n >= 0, self.c(n + 1) == step(self.c(n), x(n)))),
            z3.ForAll([n], z3.Implies(n >= 0, self.c2(n + 1) == step2(self.c2(n), before(x(n))))),
            self.k >= 0,
            self.c(self.k) == self.c2(self.k),
        ]
        self.result, self.result2 = value(self.c(self.k), x(self.k)), value2(self.c2(self.k), before(x(self.k)))


class SumOfSteps:
    """A loop that carries a sum, which was the first value and the sum over the steps before step `k`."""

    def __init__(self) -> None:
        integers, reals = z3.IntSort(), z3.RealSort()
        functions: list[Any] = [z3.Function(name, integers, reals) for name in ("carry", "total", "value")]
        carry, total, value = functions
        n, k = z3.Int("n"), z3.Int("k")
        self.assumptions = [
            z3.ForAll([n], z3.Implies(n >= 0, carry(n + 1) == carry(n) + value(n))),
            z3.ForAll([n], z3.Implies(n >= 0, total(n + 1) == total(n) + value(n))),
            total(0) == 0,
            k >= 0,
            carry(k) == carry(0) + total(k),
        ]
        self.goal = carry(k + 1) == carry(0) + total(k + 1)


class LanesOfSteps:
    """Loops with equal steps, and one whose lanes carried what they did before step `k`. Lane `j` of its step is their step."""

    def __init__(self) -> None:
        sorts = [z3.DeclareSort(name) for name in ("Constant", "Carry", "Slice", "Result", "Carries", "Slices", "Results")]
        constant, carry, slices, result, carries, stacks, results = sorts
        integers = z3.IntSort()
        step, value = (z3.Function(name, constant, carry, slices, to) for name, to in (("step", carry), ("value", result)))
        steps, values = (z3.Function(name, carries, stacks, to) for name, to in (("steps", carries), ("values", results)))
        of_carries, of_slices, of_results = (
            z3.Function(f"lane of {whole}", integers, whole, part)
            for whole, part in ((carries, carry), (stacks, slices), (results, result))
        )
        w, c, x = (z3.Function(name, *of) for name, of in (
            ("w", (integers, constant)), ("c", (integers, integers, carry)), ("x", (integers, integers, slices)),
        ))  # fmt: skip
        c2, x2 = z3.Function("c'", integers, carries), z3.Function("x'", integers, stacks)
        a, s, j, k = z3.Const("a", carries), z3.Const("s", stacks), *z3.Ints("j k")
        one, other = (z3.Function(name, *of) for name, of in (("r", (integers, integers, result)), ("r'", (integers, results))))
        self.assumptions = [
            z3.ForAll([a, s, j], of_carries(j, steps(a, s)) == step(w(j), of_carries(j, a), of_slices(j, s))),
            z3.ForAll([a, s, j], of_results(j, values(a, s)) == value(w(j), of_carries(j, a), of_slices(j, s))),
            # Of step k only: about all steps, Z3 instantiates one by the other without end.
            z3.ForAll([j], of_slices(j, x2(k)) == x(j, k)),
            z3.ForAll([j], z3.And(c(j, k + 1) == step(w(j), c(j, k), x(j, k)), one(j, k) == value(w(j), c(j, k), x(j, k)))),
            z3.And(c2(k + 1) == steps(c2(k), x2(k)), other(k) == values(c2(k), x2(k))),
            z3.ForAll([j], of_carries(j, c2(k)) == c(j, k)),
        ]
        self.goal: Any = z3.And(of_carries(j, c2(k + 1)) == c(j, k + 1), of_results(j, other(k)) == one(j, k))


class ReversedSteps:
    """A loop that takes the last of `length` slices first, and one over reversed slices that carried the same before step `k`."""

    def __init__(self) -> None:
        integers, (carry, slices, result) = z3.IntSort(), (z3.DeclareSort(name) for name in ("Carry", "Slice", "Result"))
        step, value = z3.Function("step", carry, slices, carry), z3.Function("value", carry, slices, result)
        (c, c2), (x, x2), (r, r2) = (
            (z3.Function(name, integers, to), z3.Function(f"{name}'", integers, to))
            for name, to in (("c", carry), ("x", slices), ("r", result))
        )
        n, k, length = z3.Ints("n k length")
        last = length - 1
        self.assumptions = [
            z3.ForAll([n], x2(n) == x(last - n)),
            z3.ForAll([n], z3.And(c(n + 1) == step(c(n), x(last - n)), r(last - n) == value(c(n), x(last - n)))),
            z3.ForAll([n], z3.And(c2(n + 1) == step(c2(n), x2(n)), r2(n) == value(c2(n), x2(n)))),
            c(k) == c2(k),
        ]
        self.goal: Any = z3.And(c(k + 1) == c2(k + 1), r(last - k) == r2(k))


def proves(goal: z3.BoolRef | bool, assumptions: Sequence[z3.BoolRef | bool]) -> str:
    """Return "proved" if assumptions imply a goal, or the answer of Z3."""
    solver = z3.Solver()
    solver.set("rlimit", WORK)
    solver.add(*assumptions, z3.Not(goal))
    answer = solver.check()
    return "proved" if answer == z3.unsat else str(answer)
