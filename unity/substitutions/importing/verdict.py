"""Verdicts on imported rules.

- *Proved*: a first-order proof from the axioms, for all sizes, and equal types and values at small shapes. Tensors have no shapes
  in the logic, so each check covers for the other.
- *Refuted*: a counterexample was executed; the smallest one is reported.
- *Ill-typed*: names the operator and the operand.
- *Unsupported*: names an operator or a parameter that the rule language lacks.
- *Open*: neither proved nor refuted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from unity.base.errors import IllTypedError
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import UNUSED
from unity.substitutions.importing.sizes import Shapes, SizeProblem, Sizing, Unfit, equal_sizes, fits, sizings
from unity.substitutions.language.axioms import axioms
from unity.substitutions.language.rule import EqualSizes, Rule
from unity.substitutions.language.term import Term, substitute
from unity.substitutions.language.text import print_condition, print_rule
from unity.substitutions.language.typecheck import TensorType, tensor, typecheck
from unity.verify.proofs.first_order import Proof, Prover
from unity.verify.proofs.instances import agree, equal_at
from unity.verify.semantics.domains import ElementDomain, Modular, Plain
from unity.verify.semantics.meaning import evaluate, random_pieces

INSTANCES = 3  # shapes at which a proved rule is executed
SEARCH = 60  # shapes that are searched for a counterexample
DRAWS = 40  # assignments of whole numbers that are tried at each
RESIDUES = Modular()


class Refusal(Exception):
    """A released rule cannot be translated: its status ("ill-typed" or "unsupported") and the reason."""

    def __init__(self, status: str, why: str) -> None:
        super().__init__(why)
        self.status = status


@dataclass(frozen=True)
class Counterexample:
    """Shapes and whole numbers for the variables, and both sides of one output: different values, or different shapes."""

    shapes: Shapes
    values: Mapping[str, list]
    output: int
    left: list | str
    right: list | str
    groups: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        variables = ", ".join(f"{name}{list(shape)} = {self.values[name]}" for name, shape in self.shapes.items())
        return f"{variables}: left {self.left}, right {self.right}"


@dataclass(frozen=True)
class Verdict:
    """A verdict: `status` is proved, refuted, ill-typed, unsupported or open; the first-order proof took `seconds`."""

    status: str
    why: str = ""
    counterexample: Counterexample | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Imported:
    """A released rule: its name, its translation into this language (None if it has no translation), and the verdict."""

    name: str
    rule: Rule | None
    verdict: Verdict

    @property
    def text(self) -> str:
        """The rule on one line."""
        return print_rule(self.rule) if self.rule else f"{self.name}   (none)"


@dataclass(frozen=True)
class Case:
    """A translated rule without a verdict, and the constraints on its sizes."""

    rule: Rule
    problem: SizeProblem


class Judge:
    """A judge of rules, with one prover. Random numbers start anew for each rule, so verdicts do not depend on their order."""

    def __init__(self) -> None:
        self.prover = Prover(axioms())

    def decide(self, rules: Sequence[Case | Imported]) -> list[Imported]:
        """Return the verdicts on all rules. All proofs come first, so that nothing else disturbs their measured times."""
        proofs = [self._prove(rule) if isinstance(rule, Case) else rule for rule in rules]
        return [x if isinstance(x, Imported) else self._with_repair(x[0], _execute(*x)) for x in proofs]

    def _prove(self, case: Case) -> tuple[Case, Proof] | Imported:
        """Try to prove a rule, if need be with the equalities of sizes that its types imply."""
        try:
            rule = _with_groups(case.rule, list(itertools.islice(sizings(case.problem), INSTANCES)))
        except Unfit as refusal:
            return Imported(case.rule.name, case.rule, Verdict("ill-typed", str(refusal)))
        proof = self.prover.prove(rule)
        if proof.status != "proved":  # the logic, in which tensors have no shapes, lacks these equalities
            implied = replace(rule, conditions=equal_sizes(case.problem))
            second_proof = self.prover.prove(implied)
            if second_proof.status == "proved":
                return Case(implied, case.problem), second_proof
        return Case(rule, case.problem), proof

    def _with_repair(self, case: Case, rule: Imported) -> Imported:
        """Name an equality of sizes under which a refuted rule holds, if a single one that its counterexample violates suffices."""
        example = rule.verdict.counterexample
        if example is None:
            return rule
        candidates = list(itertools.islice(sizings(case.problem), SEARCH))
        always = equal_sizes(case.problem)
        pairs = itertools.combinations(((name, -d) for name, s in example.shapes.items() for d in range(1, len(s) + 1)), 2)
        equal = [EqualSizes(a, d, b, e) for (a, d), (b, e) in pairs if a != b and d == e]
        for c in equal:
            satisfying = [s for s in candidates if _holds(c, s)][:INSTANCES]
            if c not in always and not _holds(c, Sizing(example.shapes, {})) and satisfying:
                repaired = replace(case.rule, conditions=(*always, c))
                if self.prover.prove(repaired).status == "proved" and all(_counterexample(repaired, s) is None for s in satisfying):
                    why = f"{rule.verdict.why}; it holds where {print_condition(c)}"
                    return replace(rule, verdict=replace(rule.verdict, why=why))
        return rule

    def confirms(self, rule: Rule, problem: SizeProblem) -> bool:
        """Return whether a rule with axes is proved, with equal types and equal values on all devices."""
        sizes = (4, 8, 16)  # which one or two axes of two devices divide
        if not fits(problem, sizes):
            return False
        sizing = next(sizings(problem, sizes))
        axes = tuple(Axis(name, 2, 0) for name in rule.of_kind("axis"))
        variables = {name: tensor(shape, (UNUSED,) * len(axes)) for name, shape in sizing.shapes.items()}
        return (
            self.prover.prove(rule).status == "proved"
            and agree(rule, variables, axes) is True
            and equal_at(rule, variables, axes, np.random.default_rng(0))
        )


def _execute(case: Case, proof: Proof) -> Imported:
    """Return the verdict on a rule after executing it at small shapes: a few if it is proved, many if it is not."""
    rule, problem = case.rule, case.problem
    try:
        for sizing in itertools.islice(sizings(problem), INSTANCES if proof.status == "proved" else SEARCH):
            example = _counterexample(rule, sizing)
            if example is not None:
                smallest = _smallest(rule, problem, example)
                return Imported(rule.name, rule, Verdict("refuted", f"output {smallest.output} differs: {smallest}", smallest))
    except IllTypedError as refusal:
        return Imported(rule.name, rule, Verdict("ill-typed", refusal.reason))
    why = "" if proof.status == "proved" else "neither a proof nor a counterexample was found"
    return Imported(rule.name, rule, Verdict(proof.status, why, None, proof.seconds))


def _holds(condition: EqualSizes, sizing: Sizing) -> bool:
    one, two = sizing.shapes[condition.tensor], sizing.shapes[condition.other]
    return one[condition.dim] == two[condition.other_dim]


def _with_groups(rule: Rule, instances: list[Sizing]) -> Rule:
    """Return the rule with numbers for those groups of convolutions that are the same at all sizes."""
    same = {g: n for g, n in instances[0].groups.items() if all(s.groups[g] == n for s in instances)}
    left, right = (substitute(side, {}, same) for side in (rule.left, rule.right))
    return replace(rule, left=left, right=right)


def _counterexample(rule: Rule, sizing: Sizing) -> Counterexample | None:
    """Return small whole numbers for which the sides differ at these sizes.

    Values over a finite field come first: equality there is hardly ever chance. But a field has no order (`relu(x + x)` is not
    `relu(x) + relu(x)`), so that only whole numbers refute.
    """
    sides = substitute(rule.sides, {}, sizing.groups)
    variables = {name: tensor(shape) for name, shape in sizing.shapes.items()}
    types = typecheck(sides, variables)
    if all(_difference(sides, types, values, RESIDUES) is None for values in _residues(variables)):
        return None
    for draw in range(DRAWS):
        rng, bound = np.random.default_rng(draw), draw // 8
        values = {name: rng.integers(-bound, 2 + bound, shape).astype(float) for name, shape in sizing.shapes.items()}
        difference = _difference(sides, types, values, Plain())
        if difference is not None:
            lists = {name: _as_list(v) for name, v in values.items()}
            return Counterexample(sizing.shapes, lists, *difference, sizing.groups)
    return None


def _residues(variables: Mapping[str, TensorType]) -> Iterator[dict[str, np.ndarray]]:
    """Yield elements of the field: arbitrary ones, and small positive ones, which a relu does not change."""
    rng = np.random.default_rng(0)
    yield {name: random_pieces(t, (), RESIDUES, rng) for name, t in variables.items()}
    yield {name: RESIDUES.constant(rng.integers(1, 64, t.shape)) for name, t in variables.items()}


def _difference(
    sides: tuple[Term, ...], types: Mapping[Term, TensorType], values: Mapping[str, np.ndarray], domain: ElementDomain
) -> tuple[int, list | str, list | str] | None:  # fmt: skip
    """Return the first output in which the sides differ, and both sides there."""
    half = len(sides) // 2
    pairs = list(zip(sides[:half], sides[half:], strict=True))
    for k, (left, right) in enumerate(pairs):
        if types[left].shape != types[right].shape:
            return k, f"has shape {list(types[left].shape)}", f"has shape {list(types[right].shape)}"
    results = evaluate(sides, types, values, (), domain)
    for k, (left, right) in enumerate(pairs):
        one, two = results[left], results[right]
        if not (np.allclose(one, two) if one.dtype.kind == "f" else np.array_equal(one, two)):
            return k, _as_list(one), _as_list(two)
    return None


def _as_list(values: np.ndarray) -> list:
    whole = (values == np.round(values)).all()
    return (values.astype(np.int64) if whole else np.round(values, 4)).tolist()


def _smallest(rule: Rule, problem: SizeProblem, example: Counterexample) -> Counterexample:
    """Return the smallest counterexample whose sizes are nowhere larger."""
    for sizing in sizings(problem, various=False):
        if all(a <= b for name, shape in sizing.shapes.items() for a, b in zip(shape, example.shapes[name], strict=True)):
            smaller = _counterexample(rule, sizing)
            if smaller is not None:
                return smaller
    return example
