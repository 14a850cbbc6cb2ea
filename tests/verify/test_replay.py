"""Replay of derivations: every step of the search passes, and no other."""

import dataclasses
import itertools
import random
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from ci_cases import by_hand
from derivation_cases import PROGRAMS, arguments, attention, biased, both_biased, joins, parted, struct, two_products
from msgspec.structs import replace

from benchmarks.random_programs import computed
from unity.base.documents import encoded, parsed, plain, typed
from unity.base.errors import DerivationError, PlanError
from unity.pcg.ir.dead_code import used
from unity.pcg.ir.program import program_of
from unity.substitutions.language.derivation import Derivation, RewriteStep, ValueReference
from unity.substitutions.language.library import load
from unity.substitutions.language.rearrangement import Rearrangement, reshaped, transposed, unchanged
from unity.substitutions.rewriting.occurrences import occurrences, patterns
from unity.substitutions.rewriting.reading import Reading
from unity.substitutions.rewriting.recording import shared, step_of
from unity.substitutions.rewriting.rewriting import rewritten, tidy
from unity.verify.derivations import replay as replaying
from unity.verify.derivations.canonical_form import canonical_forms
from unity.verify.derivations.nodes import NodeStore
from unity.verify.derivations.replay import replay
from unity.verify.proofs.small_instances import small_instances

LIBRARY = load("rules/library.json")
PATTERNS = patterns(LIBRARY.rules)
# read otherwise (sums of scalars, indices that are joined before they are wrapped), or on the other side only (a padded kernel)
NOT_FOUND = {
    "add-scalars-first (backward)",
    "merge-look-ups-before-concat (backward)",
    "merge-scales-in-a-row (backward)",
    "merge-shared-table",
}


def body_of(fn, *arguments):
    return tidy(used(program_of(jax.make_jaxpr(fn)(*arguments))[0]))


def found(body, store=None):
    """Return all rewrites of a program as (pattern, step, new program)."""
    forms = shared(canonical_forms(body, store))
    for pattern in PATTERNS:
        for occurrence in occurrences(Reading(forms.body), pattern):
            after, step = rewritten(forms.body, occurrence), step_of(forms, occurrence)
            if after is not None and step is not None:
                yield pattern, step, after


def check(before, after, steps, library):
    replaying.check(before, after, Derivation(tuple(steps)), library)


EACH = pytest.mark.parametrize("fn", PROGRAMS, ids=lambda fn: fn.__name__)


@cache
def program(fn):
    return body_of(fn, *arguments(fn))


def filed(step):
    """Return a step after writing it to JSON and reading it."""
    again = typed(parsed(encoded(step)), RewriteStep)
    assert again == step
    return again


@EACH
def test_every_occurrence_replays(fn):
    count = 0
    for _, step, after in found(program(fn)):
        check(program(fn), after, [filed(step)], LIBRARY)
        count += 1
    assert count


def side(terms, types):
    """Return a program that computes terms."""
    return body_of(computed(terms, types), *(struct(t.shape, t.dtype) for t in types.values()))


def test_every_pattern_of_the_library_replays():
    """Each pattern is applied to programs that are one side of its rule, and the rest of what it splits."""
    lacking = set()
    for pattern in PATTERNS:
        lacking.add(str(pattern))
        for instance in small_instances(pattern.rule, (), (2, 4), 6):
            matched = dataclasses.replace(pattern, rule=instance.rule)
            body = side((*matched.left, *(matched.other_parts if matched.dropped else ())), instance.types)
            forms = canonical_forms(body)
            for occurrence in occurrences(Reading(body), pattern):
                after, step = rewritten(body, occurrence), step_of(forms, occurrence)
                assert after is not None
                assert step is not None
                check(body, after, [filed(step)], LIBRARY)
                lacking.discard(str(pattern))
            if str(pattern) not in lacking:
                break
    assert lacking == NOT_FOUND


def walk(fn, seed, length):
    """Return a random derivation: its steps, and the program to which they lead."""
    body, steps, store = program(fn), [], NodeStore()
    canonical_forms(body, store)
    rng = random.Random(seed)
    for _ in range(length):
        if options := list(found(body, store)):
            _, step, body = rng.choice(options)
            steps.append(step)
    return steps, body


@EACH
@pytest.mark.parametrize("seed", [0, *by_hand(1, 2, 3)])
def test_several_steps_replay(fn, seed):
    steps, after = walk(fn, seed, 3)
    check(program(fn), after, list(map(filed, steps)), LIBRARY)


# What is wrong is refused


def one(name, fn=two_products, backward=True):
    """Return the first application of a rule to a program."""
    return next((s, a) for p, s, a in found(program(fn)) if p.rule.name == name and p.backward == backward)


MERGE = "merge-shared-input"
LAST = unchanged((16, 16))
UNKNOWN = ValueReference("f" * 32, LAST)


def refused(step, why, after=None, library=LIBRARY, fn=two_products):
    after = after or one(MERGE)[1]
    with pytest.raises(DerivationError, match=why):
        check(program(fn), after, [step], library)


def with_view(step, name, view):
    return replace(step, tensors={**step.tensors, name: replace(step.tensors[name], view=view)})


CHANGES = {
    "hash": (lambda s: replace(s, hash="0" * 16), "the library's rule has hash"),
    "unknown": (lambda s: replace(s, rule="no-such"), "the library has no such rule"),
    "another rule": (lambda s: replace(s, rule="regroup-products"), "the library's rule has hash"),
    "direction": (lambda s: replace(s, backward=False), "output 0 of the side to be replaced, split"),
    "no variable": (lambda s: replace(s, tensors={}), "binds the variables nothing"),
    "swapped": (lambda s: replace(s, tensors={**s.tensors, "y": s.tensors["z"], "z": s.tensors["y"]}), "output 0 of the side"),
    "value": (lambda s: replace(s, tensors={**s.tensors, "y": s.tensors["z"]}), "output 0 of the side"),
    "no value": (lambda s: replace(s, tensors={**s.tensors, "y": UNKNOWN}), "variable y is f*, and the program has"),
    "view": (lambda s: with_view(s, "x", LAST), "through an invalid rearrangement"),
    "smaller view": (lambda s: with_view(s, "y", Rearrangement((16, 16), (16,), (0,), (16, 16))), "through an invalid rearr"),
    "larger view": (lambda s: with_view(s, "y", Rearrangement((16, 16), (512,), (0,), (16, 32))), "through an invalid rearr"),
    "wrong view": (lambda s: with_view(s, "y", Rearrangement((16, 16), (16, 16), (0, 0), (16, 16))), "through an invalid rearr"),
    "other view": (lambda s: with_view(s, "y", transposed((16, 16), (1, 0))), "output 0 of the side"),
    "type": (lambda s: with_view(s, "y", reshaped((16, 16), (256,))), "it is ill-typed here: concat"),
    "root": (lambda s: replace(s, roots=s.roots[::-1]), "output 0 of the side"),
    "no root": (lambda s: replace(s, roots=s.roots[:1]), "it has 1 outputs, and the rule 2"),
    "one root": (lambda s: replace(s, roots=(s.roots[0], s.roots[0])), "output 1 of the side"),
    "manner": (lambda s: replace(s, manners={"matmul": "precision=high"}), "output 0 of the side"),
    "other manner": (lambda s: replace(s, manners={**s.manners, "concat": ""}), "not all of these are on the side to be replaced"),
    "cut": (lambda s: replace(s, cuts={"y": ((-1, 16),)}), "cannot be cut at 16 of dimension -1"),
    "attribute": (lambda s: replace(s, attributes={"d": -1}), "binds the attributes d, and the rule has nothing"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_step_is_refused(change):
    step, _ = one(MERGE)
    tamper, why = CHANGES[change]
    refused(tamper(step), why)
    with pytest.raises(DerivationError, match=r"^step 1 of the derivation \(rule "):
        check(program(two_products), one(MERGE)[1], [tamper(step)], LIBRARY)


DIMENSIONS = {
    0: "attribute d is not a dim",
    True: "not a dim",
    "d": "not a dim",
    -1: "ill-typed|output 0",
    -3: "ill-typed here: split",
}


@pytest.mark.parametrize("value", DIMENSIONS, ids=repr)
def test_a_changed_dimension_is_refused(value):
    """Even an equal dimension that is counted from the front, by which conditions could be evaded."""
    step, after = one("rejoin-halves", parted, backward=False)
    assert step.attributes == {"d": -2}
    refused(replace(step, attributes={"d": value}), DIMENSIONS[value], after, fn=parted)


def test_conditions_are_checked():
    """A bias that is concatenated with itself along the last dimension is another bias."""
    name = "merge-shared-bias-before-concat"
    step, after = one(name, both_biased, backward=False)
    assert step.attributes == {"d": -2}
    refused(replace(step, attributes={"d": -1}), "two dimensions are equal", after, fn=both_biased)


def test_every_step_is_needed_in_its_order():
    """Derivations are refused without any one step, and with two adjacent steps exchanged."""
    dropped = exchanged = 0
    for fn, seed in itertools.product((attention, two_products, joins, biased), range(3)):
        steps, after = walk(fn, seed, 3)
        start = canonical_forms(program(fn))
        ends = [replay(start, steps[:n], LIBRARY) for n in range(4)]
        if len(set(ends)) < len(ends):  # a step that only commutes operands, or undoes another one
            continue
        for n in range(3):
            with pytest.raises(DerivationError, match=r"does not lead to|then|output \d|ill-typed"):
                check(program(fn), after, [*steps[:n], *steps[n + 1 :]], LIBRARY)
            dropped += 1
        for n in range(2):
            other = [*steps[:n], steps[n + 1], steps[n], *steps[n + 2 :]]
            needed = {steps[n + 1].roots[0].value, *(x.value for x in steps[n + 1].tensors.values())} - start.nodes.keys()
            if n == 0 and needed:
                with pytest.raises(DerivationError, match=r"^step 1 .*(then|output \d)"):
                    check(program(fn), after, other, LIBRARY)
                exchanged += 1
    assert dropped > 9
    assert exchanged > 1


@EACH
def test_a_derivation_of_another_program_is_refused(fn):
    steps, after = walk(fn, 0, 1)
    check(program(fn), after, steps, LIBRARY)
    changed = body_of(lambda *xs: [x + 0.5 for x in jax.tree.leaves(fn(*xs))], *arguments(fn))
    with pytest.raises(DerivationError, match="does not lead to the derived program: output 0"):
        check(program(fn), changed, steps, LIBRARY)
    with pytest.raises(DerivationError, match="has 0 outputs, and the program"):
        check(program(fn), body_of(lambda *xs: (), *arguments(fn)), steps, LIBRARY)
    with pytest.raises(DerivationError, match="the derived program takes "):
        check(program(fn), body_of(lambda *xs: fn(*xs[1:]), struct((2,)), *arguments(fn)), steps, LIBRARY)


@EACH
def test_an_empty_derivation_leads_to_the_program_itself(fn):
    check(program(fn), program(fn), [], LIBRARY)


def test_damaged_files_are_refused():
    step, _ = one(MERGE)
    data = plain(step)
    for key in ("rule", "hash", "backward", "tensors", "roots"):
        with pytest.raises(PlanError, match=rf"damaged at \$\.{key}: it is missing"):
            typed({k: v for k, v in data.items() if k != key}, RewriteStep)


def test_a_step_cannot_replace_a_value_that_is_computed_twice():
    """It can after common values are merged."""
    body = program_of(jax.make_jaxpr(lambda a, b, c: ((a @ b) @ c, jnp.exp(a @ b)))(*[struct((4, 4))] * 3))[0]
    forms = canonical_forms(body)
    (pattern,) = (p for p in PATTERNS if p.rule.name == "scale-left-operand-after-product" and p.backward)
    assert len(body.equations) == 4
    assert len(shared(forms).body.equations) == 3
    assert shared(forms).equation_counts != forms.equation_counts
    doubled = body_of(lambda a, s: (jnp.exp((a @ a) * s), jnp.tanh(s * (a @ a))), struct((4, 4)), struct(()))
    steps = [step_of(canonical_forms(doubled), o) for o in occurrences(Reading(doubled), pattern)]
    assert steps
    assert all(step is None for step in steps)
    assert [p for p, *_ in found(doubled)].count(pattern) == 1
