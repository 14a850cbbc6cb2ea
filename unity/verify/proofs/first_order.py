"""First-order proofs that a rule follows from axioms, for all sizes and degrees (TASO section 4, Unity section 4.2).

A tensor is an element of one sort, an operator an uninterpreted function of its attributes and operands. Parallelization
operators do not change the value, so they are left out: the type checker is responsible for what each device holds, and a proof
counts only where both sides are well-typed. Proofs take milliseconds because of how Z3 is used: one solver, axioms asserted once
with the patterns that instantiate them, no other instantiation, and each goal between push and pop.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import z3

from unity.substitutions.language.rule import Different, EqualSizes, Rule
from unity.substitutions.language.term import (
    Apply,
    Attribute,
    Term,
    Variable,
    applications,
    attribute_variables,
    subterms,
    variables,
)
from unity.substitutions.language.vocabulary import VOCABULARY, WORDS

# Axioms whose sides may differ in their seams: their values are equal, but a `split` of these need not be.
LOSE_SEAMS = frozenset({"matmul-by-identity", "conv-by-identity"})
STEPS = 100_000  # of Z3 for each goal, in its own count of work
MILLISECONDS, MEGABYTES = 5_000, 1_500


@dataclass(frozen=True)
class Proof:
    """The outcome of a goal: "proved" (from the axioms named) or "open" (never a disproof)."""

    status: str
    axioms: tuple[str, ...] = ()
    seconds: float = 0.0
    work: int = 0  # in Z3's own count, the same on every machine with the same Z3


class Logic:
    """The sort of tensors, and a function for every result of every operator. Words among attributes are numbered."""

    def __init__(self, values: bool) -> None:
        self.values = values  # whether parallelization operators are left out, rather than operators like others
        self.context = z3.Context()
        self.tensor = z3.DeclareSort("Tensor", self.context)
        self.integers = z3.IntSort(self.context)
        self.size = z3.Function("size", self.tensor, self.integers, self.integers)
        self.functions: dict[tuple[str, int], z3.FuncDeclRef] = {}
        self.words = {word: k for k, word in enumerate(w for words in WORDS.values() for w in words)}

    def function(self, name: str, result: int) -> z3.FuncDeclRef:
        """Return the function of one result of an operator."""
        if (name, result) not in self.functions:
            operator = VOCABULARY[name]
            sorts = [self.integers] * len(operator.attributes) + [self.tensor] * operator.operands
            self.functions[name, result] = z3.Function(f"{name}.{result}", *sorts, self.tensor)
        return self.functions[name, result]

    def attribute(self, value: Attribute, names: dict[str, z3.ExprRef]) -> z3.ExprRef:
        """Return an attribute as an integer: a variable, a number, or the number of a word."""
        if isinstance(value, int):
            return z3.IntVal(value, self.context)
        return names[value] if value in names else z3.IntVal(self.words[value], self.context)

    def expression(self, term: Term, names: dict[str, z3.ExprRef], done: dict[Term, z3.ExprRef]) -> z3.ExprRef:
        """Return the value of a term.

        Args:
            term: of the rule language.
            names: the values of variables.
            done: expressions of terms, to which those built here are added.
        """
        if term in done:
            return done[term]
        if isinstance(term, Variable):
            value = names[term.name]
        elif self.values and VOCABULARY[term.operator].parallel:
            value = self.expression(term.operands[0], names, done)
        else:
            attributes = [self.attribute(v, names) for v in term.attributes]
            operands = [self.expression(x, names, done) for x in term.operands]
            function = self.function(term.operator, term.result)
            value = function(*attributes, *operands) if attributes or operands else function()
        done[term] = value
        return value

    def fresh(self, rule_terms: Sequence[Term], prefix: str = "") -> dict[str, z3.ExprRef]:
        """Return constants for the variables of terms."""
        tensors = {v: z3.Const(prefix + v, self.tensor) for v in variables(rule_terms)}
        numbers = {v: z3.Const(f"{prefix}#{v}", self.integers) for v in self.attributes(rule_terms)}
        return tensors | numbers

    def attributes(self, terms: Sequence[Term]) -> list[str]:
        """Return the attribute variables of terms; without axes, if parallelization operators are left out."""
        return [name for name, kind in attribute_variables(terms).items() if not (self.values and kind == "axis")]

    def bare(self, term: Term) -> Term:
        """Strip the parallelization operators around a term, if they are left out."""
        while self.values and isinstance(term, Apply) and VOCABULARY[term.operator].parallel:
            term = term.operands[0]
        return term

    def guard(self, rule: Rule, names: dict[str, z3.ExprRef]) -> list[Any]:
        """Return a rule's conditions on attributes and sizes; the logic has no others."""
        formulas: list[Any] = []
        for c in rule.conditions:
            if isinstance(c, Different):
                formulas.append(names[c.left] != self.attribute(c.right, names))
            if isinstance(c, EqualSizes):
                left, right = (z3.IntVal(d, self.context) for d in (c.dim, c.other_dim))
                formulas.append(self.size(names[c.tensor], left) == self.size(names[c.other], right))
        return formulas


class Prover:
    """Proves goals from a set of rules. Not thread-safe: use one process for each."""

    def __init__(
        self, axioms: Iterable[Rule] = (), steps: int = STEPS, cores: bool = False, values: bool = True, switches: bool = False
    ) -> None:
        """Assume some axioms.

        Args:
            axioms: the rules.
            steps: Z3's limit on work for each goal.
            cores: whether proofs name the axioms that they use.
            values: whether rules are about values, which parallelization operators do not change, or about the terms themselves.
            switches: whether `prove` can leave axioms out.
        """
        self.logic, self.cores, self.steps = Logic(values), cores, steps
        self.axioms: list[Rule] = []
        self.weaker: dict[frozenset[str], Prover] = {}  # by the axioms that they lack
        self.switches: dict[str, z3.BoolRef] | None = {} if switches else None
        self.solver = z3.SimpleSolver(ctx=self.logic.context)
        self.solver.set("auto_config", False, "mbqi", False, "timeout", MILLISECONDS, "max_memory", MEGABYTES, "rlimit", steps)
        if cores:
            self.solver.set("unsat_core", True)
        self.unary: list[tuple[str, Term]] = []
        for axiom in axioms:
            self.add(axiom)

    def add(self, axiom: Rule) -> None:
        """Assume a rule, output by output."""
        self.axioms.append(axiom)
        self.weaker.clear()
        for k, (left, right) in enumerate(zip(axiom.left, axiom.right, strict=True)):
            self._assume(axiom, k, left, right)

    def _assume(self, axiom: Rule, k: int, left: Term, right: Term) -> None:
        names = self.logic.fresh((left, right), f"{axiom.name}!")
        done: dict[Term, z3.ExprRef] = {}
        equation = self.logic.expression(left, names, done) == self.logic.expression(right, names, done)
        guard = self.logic.guard(axiom, names)
        formula = z3.Implies(z3.And(*guard), equation) if guard else equation
        bound = list(names.values())
        patterns = [self._pattern(t, names, done) for t in self._triggers(left, right)]
        if bound and patterns:
            formula = z3.ForAll(bound, formula, patterns=patterns)
        elif bound:
            return  # no term could instantiate it
        if self.switches is not None:
            switch = self.switches.setdefault(axiom.name, z3.Bool(f"use {axiom.name}", self.logic.context))
            self.solver.add(z3.Implies(switch, formula))
        elif self.cores:
            self.solver.assert_and_track(formula, f"{axiom.name}.{k}")
        else:
            self.solver.add(formula)
        for bare, other in ((left, right), (right, left)):
            if isinstance(bare, Variable) and len(variables((other,))) == 1 and not attribute_variables((other,)):
                self.unary.append((axiom.name, other))

    def _pattern(self, trigger: tuple[Term, ...], names: dict, done: dict) -> z3.PatternRef:
        return z3.MultiPattern(*(self.logic.expression(t, names, done) for t in trigger))

    def _triggers(self, left: Term, right: Term) -> list[tuple[Term, ...]]:
        """Return the terms that instantiate an equation: its sides, and the subterms of a side whose other side is a variable."""
        left, right = self.logic.bare(left), self.logic.bare(right)
        needed = {*variables((left, right)), *self.logic.attributes((left, right))}
        triggers: list[tuple[Term, ...]] = []
        for side, other in ((left, right), (right, left)):
            if isinstance(side, Apply) and needed <= _names(side):
                triggers.append((side,))
                if isinstance(other, Variable):
                    triggers += [(t,) for t in subterms(side.operands) if isinstance(t, Apply) and needed <= _names(t)]
        return triggers

    def prove(self, goal: Rule, without: frozenset[str] = frozenset()) -> Proof:
        """Try to prove a rule, without some of the axioms if they have switches.

        A rule about values with a `split` must also follow without the axioms that lose seams.
        """
        proof = self._prove(goal, without)
        splits = self.logic.values and any(t.operator == "split" for t in applications(goal.sides))
        used = frozenset(proof.axioms) if self.cores else frozenset(a.name for a in self.axioms)
        if proof.status == "proved" and splits and used & LOSE_SEAMS:
            return replace(proof, status=self._without(LOSE_SEAMS | without)._prove(goal, frozenset()).status)
        return proof

    def _without(self, names: frozenset[str]) -> Prover:
        """Return a prover that lacks some axioms."""
        if names not in self.weaker:
            self.weaker[names] = Prover((a for a in self.axioms if a.name not in names), self.steps)
        return self.weaker[names]

    def _prove(self, goal: Rule, without: frozenset[str]) -> Proof:
        start, before = time.perf_counter(), self._work()
        self.solver.push()
        try:
            names, done = self.logic.fresh(goal.sides), {}
            pairs = [
                (self.logic.expression(left, names, done), self.logic.expression(right, names, done))
                for left, right in zip(goal.left, goal.right, strict=True)
            ]
            self.solver.add(*self.logic.guard(goal, names))
            self._instantiate(goal, names, done, without)
            self.solver.add(z3.Or(*(left != right for left, right in pairs)))
            switches = self.switches or {}
            status = self.solver.check(*(z3.Not(b) if name in without else b for name, b in switches.items()))
            used = self._used() if status == z3.unsat and self.cores else ()
        except z3.Z3Exception:
            status, used = z3.unknown, ()
        finally:
            self.solver.pop()
        return Proof("proved" if status == z3.unsat else "open", used, time.perf_counter() - start, self._work() - before)

    def _work(self) -> int:
        statistics = self.solver.statistics()
        return int(statistics.get_key_value("rlimit count")) if "rlimit count" in statistics.keys() else 0  # noqa: SIM118

    def _instantiate(self, goal: Rule, names: dict, done: dict, without: frozenset[str]) -> None:
        """Assert axioms `f(x) = x` of one variable for every subterm of the goal: no pattern fires on a bare x."""
        operators = {t.operator for t in applications(goal.sides)}
        unary = [(n, t) for n, t in self.unary if n not in without and {x.operator for x in applications((t,))} <= operators]
        for number, term in enumerate(subterms(goal.sides)):
            for axiom, other in unary:
                (name,) = variables((other,))
                value = self.logic.expression(term, names, done)
                equation = self.logic.expression(other, {name: value}, {}) == value
                if self.cores:
                    self.solver.assert_and_track(equation, f"{axiom}.at {number}")
                else:
                    self.solver.add(equation)

    def _used(self) -> tuple[str, ...]:
        """Return the axioms in the unsatisfiable core."""
        return tuple(sorted({str(c).rsplit(".", 1)[0] for c in self.solver.unsat_core()}))


def _names(term: Term) -> set[str]:
    """Return the names of all variables in a term."""
    return {*variables((term,)), *attribute_variables((term,))}
