"""Rules keep what `docs/numerics.md` promises of them, in every type, and the tester of that notices what does not."""

from __future__ import annotations

from collections import Counter

import jax
import pytest

from benchmarks.fuzz.rules import (
    FINITE,
    KINDS,
    TYPES,
    UNPROMISED,
    Mutant,
    Replacement,
    differences,
    in_type,
    judged,
    large,
    library,
    mutants,
    verdict,
)
from unity.substitutions.language.axioms import axioms
from unity.substitutions.language.rule import Rule
from unity.substitutions.language.text import parse_rule, print_body
from unity.substitutions.language.typecheck import TensorType, typecheck
from unity.substitutions.rewriting.occurrences import Pattern, patterns
from unity.verify.proofs.first_order import Prover
from unity.verify.proofs.small_instances import SmallInstance, small_instances

USABLE = {str(p): p for p in patterns(library())}


def rule(text: str) -> Rule:
    return parse_rule(f"it   {text}")


@pytest.mark.parametrize(
    "name",
    [
        "regroup-products",
        "second-columns-before-matmul (backward)",
        "drop-second-relu",
        "factor-out-of-sum",
        "shrink-padded-kernel (backward)",
    ],
)
def test_rules_keep_their_promise_on_hostile_data(name: str) -> None:
    counts = Counter[str]()
    with jax.enable_x64(True):
        assert list(differences(USABLE[name], large(USABLE[name].rule), TYPES, KINDS, counts)) == []
    assert counts["runs"]
    assert not any(key.startswith("does not run") for key in counts)


def test_a_false_rule_is_noticed_in_every_type() -> None:
    false = Pattern(rule("matmul(x, add(y, y)) = matmul(x, y)"), False)
    with jax.enable_x64(True):
        found = list(differences(false, large(false.rule), TYPES[:3], FINITE[:1], Counter()))
    assert {row["type"] for row in found} == set(TYPES[:3])


def test_a_rule_that_overflows_where_the_function_cannot_is_noticed() -> None:
    overflowing = Pattern(rule("add(x, y) = sub(add(add(x, y), mul(x, x)), mul(x, x))"), False)
    counts = Counter[str]()
    with jax.enable_x64(True):
        (first, *_) = differences(overflowing, large(overflowing.rule), ["float32"], ["large"], counts)
    assert "finite or not" in first["words"]


def test_a_product_that_overflows_beside_numbers_of_other_sizes_is_counted() -> None:
    counts, regrouped = Counter[str](), USABLE["regroup-products"]
    with jax.enable_x64(True):
        assert list(differences(regrouped, large(regrouped.rule), ["float32", "float16"], ["large"], counts)) == []
    assert counts[UNPROMISED]
    assert counts["not applied in float16"]


def test_what_nobody_reads_is_noticed_where_a_program_does_not_compute_it() -> None:
    """A rule that computes a whole of which it uses one part applies only beside the other part (`Pattern.dropped`)."""
    dropped = USABLE["second-columns-before-matmul (backward)"]
    instance = large(dropped.rule)[-1]
    alone = Pattern(instance.rule, True)
    with jax.enable_x64(True):
        words, _ = Replacement(alone.left, alone.right, in_type(instance, "float64")).compared("non-finite")
    assert "finite or not" in words


@pytest.mark.parametrize(("text", "wanted"), [("add(x, y) = sub(x, y)", True), ("add(x, y) = add(y, x)", False)])
def test_verdicts_on_mutants_are_held_against_data(text: str, wanted: bool) -> None:
    mutant = Mutant(rule(text), tuple(small_instances(rule(text), (), (1, 2), 2)))
    assert verdict(mutant, Prover(axioms(), cores=False)) == ("refuted" if wanted else "proved")
    with jax.enable_x64(True):
        wrong = {status: any(judged(mutant, status, Counter())) for status in ("proved", "refuted")}
    assert wrong == {"proved": wanted, "refuted": not wanted}


@pytest.mark.parametrize("text", ["sub(add(x, z), z) = x", "sub(add(x, z), z) = sub(x, sub(y, y))"])
def test_a_side_that_rounds_less_or_reads_more_is_no_difference(text: str) -> None:
    """In float8, 1 + 0.1 - 1 is 0, and 0.1 is nearer to the exact result. No rewriting chooses a further variable, such as inf."""
    proved = rule(text)
    types = dict.fromkeys("xyz", TensorType((2, 1, 2)))
    mutant = Mutant(proved, (SmallInstance(proved, {}, types),))
    counts = Counter[str]()
    with jax.enable_x64(True):
        assert list(judged(mutant, "proved", counts)) == []
    assert counts["runs"]


def test_what_a_nan_result_passes_back_is_promised_to_no_element() -> None:
    text = "map(relu, maxpool(2, 2, valid, x)) = maxpool(2, 2, valid, map(relu, x))"
    proved = rule(text)
    mutant = Mutant(proved, (SmallInstance(proved, {}, {"x": TensorType((1, 2, 4, 5))}),))
    with jax.enable_x64(True):
        assert list(judged(mutant, "proved", Counter())) == []
        halved = rule("map(relu, maxpool(2, 2, valid, x)) = maxpool(2, 2, valid, map(relu, add(x, x)))")
        assert list(judged(Mutant(halved, (SmallInstance(halved, {}, mutant.instances[0].types),)), "proved", Counter()))


def test_mutants_are_distinct_and_well_typed() -> None:
    drawn = list(mutants(12, 0))
    assert len({print_body(m.rule) for m in drawn}) == 12
    for mutant in drawn:
        for at in mutant.instances:
            types = typecheck(at.rule.sides, at.types)
            assert [types[t] for t in at.rule.left] == [types[t] for t in at.rule.right]
