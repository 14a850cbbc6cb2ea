"""What is said of an imported rule: proved, refuted with the smallest counterexample found, or ill-typed and why.

*Proved* is a first-order proof from the axioms, for all sizes, and besides it equal types and equal values at small shapes:
tensors have no shapes in the logic, so that each guards the other. *Refuted* is a counterexample that was executed. *Ill-typed*
names the operator and the operand; *unsupported* an operator or a parameter that the rule language has no word for. *Open*,
neither proved nor refuted, is never taken for either.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from unity.base.errors import IllTypedError
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import UNUSED
from unity.substitutions.importing.sizes import Problem, Shapes, Sizing, Unfit, equal_sizes, fits, sizings
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
SEARCH = 60  # shapes at which a counterexample is looked for
DRAWS = 40  # whole numbers that are tried at each
RESIDUES = Modular()


class Refusal(Exception):
    """A released rule that says nothing: its status ("ill-typed" or "unsupported") and why."""

    def __init__(self, status: str, why: str) -> None:
        super().__init__(why)
        self.status = status


@dataclass(frozen=True)
class Counterexample:
    """Shapes and whole numbers for the variables, and what the two sides give at one output: values, or shapes that differ."""

    shapes: Shapes
    values: Mapping[str, list]
    output: int
    left: list | str
    right: list | str
    groups: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        given = ", ".join(f"{name}{list(shape)} = {self.values[name]}" for name, shape in self.shapes.items())
        return f"{given}: left {self.left}, right {self.right}"


@dataclass(frozen=True)
class Verdict:
    """`status` is proved, refuted, ill-typed, unsupported or open. `seconds` is what the first-order proof took."""

    status: str
    why: str = ""
    counterexample: Counterexample | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Imported:
    """A released rule by its name, the rule that it is in this language (None if it is none), and what was found of it."""

    name: str
    rule: Rule | None
    verdict: Verdict

    @property
    def text(self) -> str:
        """The rule on one line."""
        return print_rule(self.rule) if self.rule else f"{self.name}   (none)"


@dataclass(frozen=True)
class Case:
    """A released rule in this language, still without a verdict, and what is known of its sizes."""

    rule: Rule
    problem: Problem


class Court:
    """One prover, kept for all rules. Random numbers are drawn afresh for each, so that verdicts do not depend on their order."""

    def __init__(self) -> None:
        self.prover = Prover(axioms())

    def judge(self, found: Sequence[Case | Imported]) -> list[Imported]:
        """The verdicts on what is still without one. All proofs come first: they take no longer then than they need."""
        proved = [self._proved(x) if isinstance(x, Case) else x for x in found]
        return [x if isinstance(x, Imported) else self._repaired(x[0], _executed(*x)) for x in proved]

    def _proved(self, case: Case) -> tuple[Case, Proof] | Imported:
        try:
            rule = _grouped(case.rule, list(itertools.islice(sizings(case.problem), INSTANCES)))
        except Unfit as refusal:
            return Imported(case.rule.name, case.rule, Verdict("ill-typed", str(refusal)))
        proof = self.prover.prove(rule)
        if proof.status != "proved":  # what both sides' types imply, and tensors without shapes do not know
            implied = replace(rule, conditions=equal_sizes(case.problem))
            again = self.prover.prove(implied)
            if again.status == "proved":
                return Case(implied, case.problem), again
        return Case(rule, case.problem), proof

    def _repaired(self, case: Case, found: Imported) -> Imported:
        """A refuted rule with the equality of sizes under which it holds, if one that its counterexample breaks is enough."""
        example = found.verdict.counterexample
        if example is None:
            return found
        some = list(itertools.islice(sizings(case.problem), SEARCH))
        always = equal_sizes(case.problem)
        pairs = itertools.combinations(((name, -d) for name, s in example.shapes.items() for d in range(1, len(s) + 1)), 2)
        equal = [EqualSizes(a, d, b, e) for (a, d), (b, e) in pairs if a != b and d == e]
        for c in equal:
            good = [s for s in some if _holds(c, s)][:INSTANCES]
            if c not in always and not _holds(c, Sizing(example.shapes, {})) and good:
                rule = replace(case.rule, conditions=(*always, c))
                if self.prover.prove(rule).status == "proved" and all(_counterexample(rule, s) is None for s in good):
                    why = f"{found.verdict.why}; it holds where {print_condition(c)}"
                    return replace(found, verdict=replace(found.verdict, why=why))
        return found

    def confirms(self, rule: Rule, problem: Problem) -> bool:
        """Whether a rule with axes is one: proved, of equal types, and of equal values on devices that run both sides."""
        sizes = (4, 8, 16)  # so that an axis or two of two devices each divide every dimension
        if not fits(problem, sizes):
            return False
        sizing = next(sizings(problem, sizes))
        axes = tuple(Axis(name, 2, 0) for name in rule.named("axis"))
        known = {name: tensor(shape, (UNUSED,) * len(axes)) for name, shape in sizing.shapes.items()}
        return (
            self.prover.prove(rule).status == "proved"
            and agree(rule, known, axes) is True
            and equal_at(rule, known, axes, np.random.default_rng(0))
        )


def _executed(case: Case, proof: Proof) -> Imported:
    """The verdict on a rule, after a look at small shapes: at few if it is proved, at many if it is not."""
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


def _grouped(rule: Rule, found: list[Sizing]) -> Rule:
    """The groups of convolutions written down, where they are the same at all sizes."""
    same = {g: n for g, n in found[0].groups.items() if all(s.groups[g] == n for s in found)}
    left, right = (substitute(side, {}, same) for side in (rule.left, rule.right))
    return replace(rule, left=left, right=right)


def _counterexample(rule: Rule, sizing: Sizing) -> Counterexample | None:
    """Small whole numbers for which the sides differ at these sizes.

    A field is asked first, because there chance is out of it. But it has no order (`relu(x + x)` is not `relu(x) + relu(x)`
    there), so that only whole numbers refute.
    """
    sides = substitute(rule.sides, {}, sizing.groups)
    known = {name: tensor(shape) for name, shape in sizing.shapes.items()}
    types = typecheck(sides, known)
    if all(_difference(sides, types, values, RESIDUES) is None for values in _residues(known)):
        return None
    for draw in range(DRAWS):
        rng, bound = np.random.default_rng(draw), draw // 8
        values = {name: rng.integers(-bound, 2 + bound, shape).astype(float) for name, shape in sizing.shapes.items()}
        found = _difference(sides, types, values, Plain())
        if found is not None:
            shown = {name: _listed(v) for name, v in values.items()}
            return Counterexample(sizing.shapes, shown, *found, sizing.groups)
    return None


def _residues(known: Mapping[str, TensorType]) -> Iterator[dict[str, np.ndarray]]:
    """Elements of the field: any ones, and small ones of one sign, which no relu takes away."""
    rng = np.random.default_rng(0)
    yield {name: random_pieces(t, (), RESIDUES, rng) for name, t in known.items()}
    yield {name: RESIDUES.constant(rng.integers(1, 64, t.shape)) for name, t in known.items()}


def _difference(
    sides: tuple[Term, ...], types: Mapping[Term, TensorType], values: Mapping[str, np.ndarray], domain: ElementDomain
) -> tuple[int, list | str, list | str] | None:  # fmt: skip
    """The first output in which the sides differ, and what they give there."""
    half = len(sides) // 2
    pairs = list(zip(sides[:half], sides[half:], strict=True))
    for k, (left, right) in enumerate(pairs):
        if types[left].shape != types[right].shape:
            return k, f"has shape {list(types[left].shape)}", f"has shape {list(types[right].shape)}"
    results = evaluate(sides, types, values, (), domain)
    for k, (left, right) in enumerate(pairs):
        one, two = results[left], results[right]
        if not (np.allclose(one, two) if one.dtype.kind == "f" else np.array_equal(one, two)):
            return k, _listed(one), _listed(two)
    return None


def _listed(values: np.ndarray) -> list:
    whole = (values == np.round(values)).all()
    return (values.astype(np.int64) if whole else np.round(values, 4)).tolist()


def _smallest(rule: Rule, problem: Problem, example: Counterexample) -> Counterexample:
    """The smallest counterexample whose sizes are nowhere larger."""
    for sizing in sizings(problem, various=False):
        if all(a <= b for name, shape in sizing.shapes.items() for a, b in zip(shape, example.shapes[name], strict=True)):
            found = _counterexample(rule, sizing)
            if found is not None:
                return found
    return example
