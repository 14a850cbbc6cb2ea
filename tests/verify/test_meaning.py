"""The meaning of terms: interpretation agrees with execution, and types with the pieces on devices."""

import jax
import numpy as np
import pytest
from ci_cases import fewer
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_cases import STATES, A, typed_terms

from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, UNUSED, partitioned
from unity.substitutions.language.rule import Rule
from unity.substitutions.language.term import Apply, subterms
from unity.substitutions.language.text import parse_rule, parse_term
from unity.substitutions.language.typecheck import TensorType, tensor, typecheck
from unity.substitutions.language.vocabulary import VOCABULARY
from unity.verify.proofs.bounded import executed
from unity.verify.proofs.execution import run
from unity.verify.proofs.instances import equal_at
from unity.verify.semantics.domains import Modular, Plain
from unity.verify.semantics.meaning import evaluate, random_pieces
from unity.verify.semantics.pieces import join, spread

STATE = st.sampled_from(STATES)


@given(STATE, STATE, st.integers(0, 1000))
def test_pieces_join_to_the_tensor(first, second, seed):
    axes, rng, domain = (A, Axis("b", 3, 0)), np.random.default_rng(seed), Modular()
    type_ = TensorType((12, 6), (first, second))
    whole = rng.integers(0, 1000, (5, 12, 6))
    parts = rng.integers(0, 1000, (2, 3, 5, 12, 6))
    pieces = spread(whole, 2, type_.states, axes, domain, parts)
    assert (join(pieces, type_.shape, type_.states, axes, domain) == whole).all()


def test_devices_that_disagree_are_found():
    pieces = np.arange(8.0).reshape(2, 4)
    with pytest.raises(ValueError, match="devices along a disagree"):
        join(pieces, (4,), (UNUSED,), (A,), Plain())


def serial(term):
    """Return a term without parallelization operators."""
    if isinstance(term, Apply):
        operands = tuple(map(serial, term.operands))
        return operands[0] if VOCABULARY[term.operator].parallel else Apply(term.operator, term.attributes, operands, term.result)
    return term


@settings(max_examples=fewer(25))
@given(typed_terms())
def test_parallelization_preserves_the_value(case):
    """A well-typed term has the value of the term without parallelization operators, as proofs of parallel rules assume."""
    term, known = case
    domain, rng = Modular(), np.random.default_rng(0)
    types = typecheck([term], known, (A,))
    pieces = {name: random_pieces(t, (A,), domain, rng) for name, t in known.items()}
    values = evaluate([term], types, pieces, (A,), domain)
    whole = {name: join(pieces[name], t.shape, t.states, (A,), domain) for name, t in known.items()}
    plain = serial(term)
    alone = typecheck([plain], {name: tensor(t.shape) for name, t in known.items()})
    expected = evaluate([plain], alone, whole, (), domain)[plain]
    found = join(values[term], types[term].shape, types[term].states, (A,), domain)
    assert (found == expected).all()


@settings(max_examples=fewer(8))
@given(typed_terms(operators=3))
def test_interpretation_agrees_with_execution(case):
    """`t` and `t` without parallelization operators agree in JAX, on two devices, in values and gradients."""
    term, known = case
    if any(isinstance(t, Apply) and t.operator in ("identity_kernel", "map") for t in subterms([term])):
        return  # a kink of a rectifier, or a function of unbounded growth, is no test of rounding
    used = {t.name for t in subterms([term]) if not isinstance(t, Apply)}
    rule = Rule("same", (term,), (term,))
    assert run(rule, {n: t for n, t in known.items() if n in used}, (A,)).equal


TRUE = "r matmul(reduce(a, x), y) = reduce(a, matmul(x, replicate(a, y)))   where x: partial@a"
FALSE = "r map(relu, reduce(a, matmul(x, y))) = reduce(a, matmul(x, y))   where x: -1@a, y: -2@a"


def test_a_rule_holds_on_symbols_on_numbers_and_in_jax():
    rule = parse_rule(TRUE)
    types = {"x": tensor((4, 6), (PARTIAL,)), "y": tensor((6, 8), (UNUSED,))}
    assert executed(rule).status == "proved"
    assert equal_at(rule, types, (A,), np.random.default_rng(0))
    assert run(rule, types, (A,)).equal


def test_a_false_rule_is_refuted_with_numbers():
    rule = parse_rule(FALSE)
    check = executed(rule)
    assert check.status == "refuted"
    assert "map(relu" in str(check.counterexample)
    types = {"x": tensor((4, 6), (partitioned(1),)), "y": tensor((6, 8), (partitioned(0),))}
    assert not equal_at(rule, types, (A,), np.random.default_rng(0))
    assert not run(rule, types, (A,)).equal


def test_a_rule_without_instances_is_ill_typed():
    assert executed(parse_rule("r map(relu, partition(-1, a, x)) = replicate(a, x)")).status == "ill-typed"


def test_gradients_distinguish_unused_from_replicated():
    """Two users of one Replicate reduce the gradient once; values alone would not show that it is missing."""
    x = {"x": tensor((4, 4), (REPLICATED,))}
    assert run(parse_rule("r add(x, x) = add(x, x)"), x, (A,)).equal


def test_every_operator_has_a_meaning():
    shapes = {"conv2d": [(2, 4, 4, 4), (4, 4, 3, 3)], "embedding": [(4, 4), (3,)], "scale": [(4, 4), ()], "bias": [(4, 4), (4,)]}
    shapes |= {"within": [(4, 4), (3,)], "behind": [(4, 4), (3,)]}
    attributes = {"dim": -1, "size": 1, "groups": 1, "padding": "same", "function": "relu"}
    images = {"maxpool", "avgpool", "identity_kernel", "mean_kernel"}
    shapes |= {name: [(2, 4, 3, 3)] for name in images} | {"enlarge": [(2, 4, 1, 1)]}
    for operator in VOCABULARY.values():
        if operator.parallel:
            continue
        own = shapes.get(operator.name, [(4, 4)] * operator.operands)
        given_ = [3 if operator.name == "enlarge" else attributes[k] for k in operator.attributes]
        names = "xyz"[: operator.operands]
        text = f"{operator.name}({', '.join([*map(str, given_), *names])})" + (".0" if operator.results > 1 else "")
        term = parse_term(text)
        dtypes = {"y": "int32"} if operator.name in ("embedding", "within", "behind") else {}
        known = {n: tensor(s, (), dtypes.get(n, "float32")) for n, s in zip(names, own, strict=True)}
        domain = Modular()
        pieces = {n: random_pieces(t, (), domain, np.random.default_rng(0)) for n, t in known.items()}
        values = evaluate([term], typecheck([term], known), pieces, (), domain)
        assert values[term].shape == typecheck([term], known)[term].shape


def test_eight_devices_are_there():
    assert len(jax.devices()) == 8
