"""Proofs of rules for every rank and size.

Both sides are evaluated at one generic index. A condition such as "inside of the padding" quantifies over all dimensions of a
group; it becomes an opaque atom, and a group's part of an index an opaque number. Z3 looks for values of atoms and numbers by
which the sides differ. Whatever it proposes is tested against what the symbols stand for, by *lemmas about one dimension*:

- if the true conditions of a group, at a dimension, imply another, it is true;
- if they imply that two integers are equal, the parts of the two indices are;
- if they are contradictory, and the group has a dimension, they are not all true.

A lemma holds of every dimension, hence of groups of any number of dimensions. If Z3 finds no values in the end, the sides are
equal for every rank and every size. Conversely, conditions that no lemma excludes are met by some rank: take a dimension for each
false condition and each pair of different parts. That is the bound on ranks of TensorRight (POPL 2025); here it need not be
computed, as no lemma is about more than one dimension. The converse is not relied on.

Sums are equal if a bijection leads from the non-zero terms of one to equal terms of the other. The bijection is part of the
rule's text."""

from __future__ import annotations

import ast
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import z3

from unity.base.errors import RuleError
from unity.verify.ranks.algebra import plus, scaled
from unity.verify.ranks.denotation import Reader
from unity.verify.ranks.forms import OutOfReach
from unity.verify.ranks.operators import RankTensor, Vector
from unity.verify.ranks.rule import Pairing, RankRule, signature
from unity.verify.ranks.symbolic import Summand, Sums, SymbolicDomain
from unity.verify.ranks.totals import constants, nodes

ROUNDS = 25  # of proposals and lemmas, for one obligation
MILLISECONDS = 3_000  # for one question to Z3
UNDECIDED = 8  # questions that Z3 may leave undecided, for one rule
STEPS = 200_000  # Z3's limit on work for one question


@dataclass(frozen=True)
class RankProof:
    """The result of a proof.

    Attributes:
        status: "proved", "open" or "ill-typed".
        why: the obligation that was not proved.
        seconds: of the processor.
        lemmas: the number of lemmas about one dimension.
    """

    status: str
    why: str = ""
    seconds: float = 0.0
    lemmas: int = 0


class Obligations:
    """Proves formulas over atoms, under hypotheses that hold of every dimension of a group."""

    def __init__(self, domain: SymbolicDomain) -> None:
        self.domain, self.lemmas, self.undecided = domain, 0, 0
        self.hypotheses: list[tuple[str, Any]] = []
        self._learned: list[Any] = []
        domain.follows = self.at_dimension

    def assume(self, group: str, condition: Any) -> None:
        """Assume a condition on every dimension of a group."""
        self.hypotheses.append((group, condition))

    def _solver(self, group: str = "") -> z3.Solver:
        """Return a solver that knows the hypotheses about scalars, groups of one dimension, and one further group."""
        solver = z3.Solver(ctx=self.domain.context)
        solver.set("timeout", MILLISECONDS, "rlimit", STEPS)
        known = {"", group} | self.domain.signature.single
        solver.add(*(c for g, c in self.hypotheses if g in known))
        if group or known != {""} or self.domain.signature.integers:
            solver.add(*self.domain.divisions)
        return solver

    def at_dimension(self, group: str, condition: Any) -> bool:
        """Return whether a condition follows at any dimension of a group."""
        solver = self._solver(group)
        solver.add(z3.Not(condition))
        return solver.check() == z3.unsat

    def valid(self, premises: Sequence[Any], goal: Any) -> bool:
        """Return whether a goal over atoms follows from premises, for every rank."""
        solver = self._solver()
        solver.add(*self.domain.facts, *self.domain.laws(), *premises, z3.Not(self.domain.truth(goal)), *self._learned)
        for _ in range(ROUNDS):
            result = solver.check()
            if result != z3.sat:
                return result == z3.unsat
            lemmas = self._lemmas(solver.model())
            if not lemmas or self.undecided > UNDECIDED:
                return False
            self.lemmas += len(lemmas)
            self._learned += lemmas
            solver.add(*lemmas)
        return False

    def _lemmas(self, model: z3.ModelRef) -> list[Any]:
        """Return lemmas that a proposal violates."""
        lemmas = []
        signature = self.domain.signature
        for group in signature.groups:
            if group in signature.single:
                continue
            atoms = [a for a in self.domain.atoms.values() if a.group == group]
            parts = [p for p in self.domain.parts.values() if p.group == group]
            proposed = [(a, z3.is_true(model.eval(a.symbol, model_completion=True))) for a in atoms]
            true, false = [a for a, holds in proposed if holds], [a for a, holds in proposed if not holds]
            differ = [
                (p, q)
                for p, q in combinations(parts, 2)
                if not model.eval(p.symbol == q.symbol, model_completion=True).eq(self.domain.truth(True))
            ]
            claims = [(a.formula, a.symbol) for a in false] + [(p.number == q.number, p.symbol == q.symbol) for p, q in differ]
            if group in signature.nonempty:
                claims.append((self.domain.truth(False), self.domain.truth(False)))
            if not claims:
                continue
            solver = self._solver(group)
            solver.add(*(z3.Implies(a.symbol, a.formula) for a in true))
            for formula, conclusion in claims:
                solver.push()
                solver.add(z3.Not(formula))
                result = solver.check(*(a.symbol for a in true)) if self.undecided <= UNDECIDED else z3.unknown
                self.undecided += result == z3.unknown
                if result == z3.unsat:
                    lemmas.append(z3.Or([z3.Not(b) for b in solver.unsat_core()] + [conclusion]))
                solver.pop()
        return lemmas


def prove(rule: RankRule) -> RankProof:
    """Try to prove a rule for every rank and every size."""
    start = time.process_time()
    try:
        domain = SymbolicDomain(signature(rule))
        obligations = Obligations(domain)
        status, why = _attempt(rule, domain, obligations)
    except RuleError as error:
        return RankProof("ill-typed", error.reason, time.process_time() - start)
    except OutOfReach as error:
        return RankProof("open", str(error), time.process_time() - start)
    except z3.Z3Exception as error:
        return RankProof("open", f"Z3 failed: {error}", time.process_time() - start)
    return RankProof(status, why, time.process_time() - start, obligations.lemmas)


def _attempt(rule: RankRule, domain: SymbolicDomain, obligations: Obligations) -> tuple[str, str]:
    reader = Reader(domain, domain.signature)
    left = reader.tensor(rule.left)
    for group, condition in domain.requirements:
        obligations.assume(group, condition)
    for shape in domain.signature.tensors.values():
        for group, size in shape:
            obligations.assume(group, domain.truth(reader.integers(size, group)[0] >= 0))
    premises = [p for c in rule.conditions for p in _condition(c, reader, obligations)]
    domain.requirements.clear()
    right = reader.tensor(rule.right)
    if set(left.sizes) != set(right.sizes) or left.order != right.order:
        return "ill-typed", "the sides have different dimensions, or another order of them"
    for group, condition in domain.requirements:
        if not obligations.at_dimension(group, condition):
            return "open", f"the right side may not be defined: {z3.simplify(condition)} of {group or 'scalars'}"
    for group, sizes in left.sizes.items():
        if not obligations.at_dimension(group, domain.truth(sizes[0] == right.sizes[group][0])):
            return "open", f"the sizes of {group} may differ"
    return _equal_elements(rule, left, right, premises, reader, obligations)


def _condition(node: ast.expr, reader: Reader, obligations: Obligations) -> list[Any]:
    """Assume a condition; return the premise that it is, if it is about some dimension."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id in ("one", "nonempty", "positive"):
            return []
        if node.func.id == "some":
            group = reader.condition_group(node)
            opposite = tuple(z3.Not(obligations.domain.truth(c)) for c in reader.condition(node.args[0], group))
            return [z3.Not(reader.domain.every(group, opposite))]
    group = reader.condition_group(node)
    condition = reader.condition(node, group)[0]
    obligations.assume(group, obligations.domain.truth(condition))
    return []


def _equal_elements(
    rule: RankRule, left: RankTensor, right: RankTensor, premises: list[Any], reader: Reader, obligations: Obligations
) -> tuple[str, str]:
    domain = obligations.domain
    index = {g: domain.integer_symbol(f"index {g}") for g in left.sizes}
    for group, sizes in left.sizes.items():
        obligations.assume(group, z3.And(index[group][0] >= 0, index[group][0] < sizes[0]))
    a = left.at(index)
    premises = [*premises, domain.defined(a)]
    b = right.at(index)
    if not z3.is_true(domain.defined(b)):
        if not domain.signature.integers:
            learn_normal_forms((domain.defined(a), domain.defined(b)), domain)
        learn_where_defined(domain.defined(b), premises, obligations)
        if not obligations.valid(premises, domain.defined(b)):
            return "open", "an element of the right side may not be defined"
    if domain.signature.integers:
        return _equal_terms(rule, a, b, premises, reader, obligations)
    composed = bool(domain.totals.named)
    if not composed:
        try:
            status, why = _equal_terms(rule, a, b, premises, reader, obligations)
        except OutOfReach as error:
            status, why = "open", str(error)
        if status != "open" or rule.pairings:
            return status, why
    elements = [domain.totals.instance(domain.lifted((domain.single(e),))[0], {}) for e in (a, b)]
    if not all(z3.is_real(e) for e in elements):
        return ("proved", "") if obligations.valid(premises, elements[0] == elements[1]) else ("open", "elements may differ")
    return equal_by_algebra(rule, elements[0], elements[1], premises, reader, obligations)


def _equal_terms(rule: RankRule, a: Any, b: Any, premises: list[Any], reader: Reader, obligations: Obligations) -> tuple[str, str]:
    domain = obligations.domain
    if not isinstance(a, Sums) and not isinstance(b, Sums):
        if rule.pairings:
            return "ill-typed", "via pairs the indices of sums, and there are none"
        return ("proved", "") if obligations.valid(premises, a == b) else ("open", "elements may differ")
    monoid = a.monoid if isinstance(a, Sums) else b.monoid
    first, second = domain.summands(a, monoid), domain.summands(b, monoid)
    if len(first) == len(second):
        pairs = [(s, (t,), False) for s, t in zip(first, second, strict=True)]
    elif len(first) == 1 or not second:
        pairs = [(s, second, False) for s in first]
    elif len(second) == 1 or not first:
        pairs = [(s, first, True) for s in second]
    else:
        return "open", f"{len(first)} sums against {len(second)}"
    hints = iter((*rule.pairings, *[Pairing()] * (len(first) + len(second))))
    for whole, parts, swapped in pairs:
        chosen = [next(hints) for _ in parts]
        if swapped:
            chosen = [Pairing(h.backward, h.forward) for h in chosen]
        if not _same_sum(whole, parts, chosen, monoid, premises, reader, obligations):
            return "open", "the terms of the sums may differ"
    if next(hints, None) in rule.pairings:
        return "open", "via has more pairings than there are sums"
    return "proved", ""


def _named(summand: Summand) -> list[tuple[str, str]]:
    """Return the name and the group of each binder of a summand: `C`, `C2`, ..."""
    seen: dict[str, int] = {}
    names = []
    for group, _ in summand.boxes:
        seen[group] = seen.get(group, 0) + 1
        names.append((group if seen[group] == 1 else f"{group}{seen[group]}", group))
    return names


def _image(
    target: Summand,
    source: Summand,
    index: tuple[Vector, ...],
    assignments: dict[str, ast.expr],
    reader: Reader,
    domain: SymbolicDomain,
) -> tuple[Vector, ...]:
    """Return the index of a summand that corresponds to another's.

    An index depends only on indices and numbers of the same group, since other groups may have other ranks.
    """
    image = []
    known = dict(zip(_named(source), index, strict=True))
    for name, group in _named(target):
        if name in assignments:
            own = {n: v for (n, g), v in known.items() if g == group} | {f"i{group}": domain.integer_symbol(f"index {group}")}
            image.append(domain.lifted(reader.integers(assignments[name], group, own)))
        elif (name, group) in known:
            image.append(known[name, group])
        else:
            raise OutOfReach(f"the index {name} of a sum has no counterpart; give it with via")
    return tuple(image)


def _inside(summand: Summand, index: tuple[Vector, ...], domain: SymbolicDomain) -> Any:
    inside = [domain.every(g, (z3.And(k >= 0, k < n),)) for (g, (n,)), (k,) in zip(summand.boxes, index, strict=True)]
    return z3.And([domain.truth(c) for c in inside] + [domain.truth(True)])


def _equal_indices(summand: Summand, left: tuple[Vector, ...], right: tuple[Vector, ...], domain: SymbolicDomain) -> Any:
    equal = [domain.every(g, (domain.truth(a == b),)) for (g, _), (a,), (b,) in zip(summand.boxes, left, right, strict=True)]
    return z3.And([domain.truth(c) for c in equal] + [domain.truth(True)])


def _same_sum(
    whole: Summand,
    parts: Sequence[Summand],
    hints: list[Pairing],
    monoid: str,
    premises: list[Any],
    reader: Reader,
    obligations: Obligations,
) -> bool:
    """Return whether the terms of one sum that are not the unit correspond, one to one, to equal ones of several sums."""
    domain = obligations.domain
    unit = domain.unit(monoid)
    own = _named(whole)
    for part, hint in zip(parts, hints, strict=True):
        known = {n for n, _ in _named(part)}, {n for n, _ in own}
        if unknown := {*(set(hint.forward) - known[0]), *(set(hint.backward) - known[1])}:
            raise OutOfReach(f"via gives {', '.join(sorted(unknown))}, which is no index of the sum")

    def index(summand: Summand, names: list[tuple[str, str]], side: str) -> tuple[Vector, ...]:
        return tuple(domain.integer_symbol(f"{side} {name}") for name, _ in names)

    def forward(k: int, j: tuple[Vector, ...]) -> tuple[Vector, ...]:
        return _image(parts[k], whole, j, hints[k].forward, reader, domain)

    def backward(k: int, j: tuple[Vector, ...]) -> tuple[Vector, ...]:
        return _image(whole, parts[k], j, hints[k].backward, reader, domain)

    def others(k: int, j: tuple[Vector, ...]) -> list[Any]:
        return [z3.Not(_inside(parts[m], forward(m, j), domain)) for m in range(len(parts)) if m != k]

    def covered() -> bool:
        """Return whether each term of the whole has an equal one in one part."""
        j = index(whole, own, "whole")
        value = whole.body(j)
        cases = []
        for k, part in enumerate(parts):
            image = forward(k, j)
            back = _equal_indices(whole, backward(k, image), j, domain)
            cases.append(z3.And(_inside(part, image, domain), part.body(image) == value, back, *others(k, j)))
        return obligations.valid([*premises, _inside(whole, j, domain), value != unit], z3.Or([*cases, domain.truth(False)]))

    def covers(k: int, part: Summand) -> bool:
        """Return whether each term of a part has an equal one in the whole, which no other part has."""
        j = index(part, _named(part), f"part {k}")
        image, value = backward(k, j), part.body(j)
        back = _equal_indices(part, forward(k, image), j, domain)
        goal = z3.And(_inside(whole, image, domain), whole.body(image) == value, back, *others(k, image))
        return obligations.valid([*premises, _inside(part, j, domain), value != unit], goal)

    with domain.forgetting():
        if not covered():
            return False
    for k, part in enumerate(parts):
        with domain.forgetting():
            if not covers(k, part):
                return False
    return True


def learn_where_defined(condition: Any, premises: list[Any], obligations: Obligations) -> None:
    """Note which reductions in a condition are defined at every index."""
    domain = obligations.domain
    for name, symbol in constants(condition).items():
        total = domain.totals.named.get(name)
        if total is None or total.monoid != "logical_and":
            continue
        learn_where_defined(total.body, premises, obligations)
        with domain.forgetting():
            body = domain.totals.instance(total.body, {})
            inside = [domain.every(g, (c,)) for g, c in domain.totals.inside(total.ranges)]
            if obligations.valid([*premises, *inside], body):
                domain.facts.append(symbol)


def learn_normal_forms(conditions: Sequence[Any], domain: SymbolicDomain) -> None:
    """Note what totals in conditions are by their normal forms, where they are defined for certain."""
    totals = domain.totals
    for name in {n for c in conditions for n in constants(c)}:
        total = totals.named.get(name)
        if total is not None and total.monoid == "add" and z3.is_true(z3.simplify(total.defined)):
            form = totals.algebra.expression(totals.algebra.normal(total.symbol))
            domain.facts.append(total.symbol == form)
            domain.facts += [e > 0 for e in nodes(form) if z3.is_app(e) and e.decl().name() == "exp"]


def equal_by_algebra(
    rule: RankRule, a: Any, b: Any, premises: list[Any], reader: Reader, obligations: Obligations
) -> tuple[str, str]:
    """Compare normal forms of elements; totals that differ are compared as sums."""
    domain = obligations.domain
    algebra = domain.totals.algebra

    def impossible(conditions: list[Any]) -> bool:
        exponentials = [e for c in conditions for e in nodes(c) if z3.is_app(e) and e.decl().name() == "exp"]
        laws = [z3.And(e > 0, z3.Implies(e.arg(0) == 0, e == 1)) for e in exponentials]
        return obligations.valid([*premises, *laws, *conditions], False)

    tried: set[tuple[str, str]] = set()
    while True:
        algebra.forget()
        first, second = algebra.normal(a), algebra.normal(b)
        if algebra.vanishes(plus(first, scaled(second, -1)), impossible):
            return "proved", ""
        if not _equal_totals(algebra.expression(first), algebra.expression(second), rule, tried, premises, reader, obligations):
            return "open", "elements may differ"


def _equal_totals(
    a: Any, b: Any, rule: RankRule, tried: set[tuple[str, str]], premises: list[Any], reader: Reader, obligations: Obligations
) -> bool:
    """Prove that two totals are equal, one of each side, and note it; return whether there are such."""
    totals = obligations.domain.totals
    left, right = (totals.totals_in(e) for e in (a, b))
    hints = [Pairing(), *(h for p in rule.pairings for h in (p, Pairing(p.backward, p.forward)))]
    for x, y in sorted(product(left - right, right - left), key=lambda pair: totals.named[pair[0]].height):
        first, second = totals.named[x], totals.named[y]
        if (x, y) in tried or first.monoid != second.monoid:
            continue
        tried.add((x, y))
        whole, part = (
            Summand(tuple((g, (n,)) for g, _, n in t.ranges), lambda j, t=t: totals.at(t, [k for (k,) in j]))
            for t in (first, second)
        )
        for hint in hints:
            try:
                if _same_sum(whole, (part,), [hint], first.monoid, premises, reader, obligations):
                    totals.equal[x] = totals.symbol(y)
                    return True
            except OutOfReach:
                continue
    return False
