"""The operator table is proved: every choice, on symbols, on all devices, by the local program that runs.

`test_table` checks the same with numbers. Here floating values are symbols, so a verdict holds for all of them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models
from ci_cases import CI, in_turn, one_in
from operator_cases import CASES, KINDS
from parallel_cases import is_key
from test_table import MUTATIONS

from unity.pcg.capture.capture import capture
from unity.pcg.ir.graph import PCG
from unity.pcg.ir.program import Body, close
from unity.pcg.local import interpreter as walker
from unity.pcg.operators.table import TABLE
from unity.pcg.propagation.choice import Choice
from unity.pcg.propagation.choices import choices
from unity.pcg.types.factors import Entry
from unity.pcg.types.parallel_type import REPLICATED
from unity.verify.proofs.operators import GradientProof, OperatorProof, check_body, check_operator, fits

# An older JAX has other primitives and derivatives, which every kind of case meets; the variants of a kind follow from the table.
DERIVED = KINDS if CI or jax.__version_info__ < (0, 12) else CASES
LARGE = {"batch norm", "group norm"}  # their derivatives: proved on smaller ones
# They take seconds, and others say the same.
AGAIN = {"conv, 2-D", "conv, other dimension numbers", "dot product attention"} | ({"conv in a scan"} if CI else set())
PAIRED = (
    "dot_general",
    "dot_general, batch",
    "matmul with bias and relu",
    "function of a sum",
    "functions of two sums",
    "conv, groups",
    "softmax",
    "layer norm",
    "embedding",
    "embedding, filled",
    "gather of pairs",
    "scatter-add",
    "reshape, [2, 12] to [6, 4]",
    "rotate half",
    "split",
    "slice, third",
    "custom_vjp, reduction",
    "scan",
    "dropout",
)


@pytest.fixture(autouse=True)
def exact():
    with jax.enable_x64(True):
        yield


def operator(name: str) -> tuple[Body, list]:
    fn, args = CASES[name]
    args = [a() if callable(a) else a for a in args]
    return close(jax.make_jaxpr(lambda *a: jax.tree.leaves(fn(*a)))(*args)), args


def faults(verdicts) -> list[str]:
    return [str(v) for v in verdicts if v.answer != "proved"]


@pytest.mark.parametrize("name", CASES)
def test_every_choice_is_proved(name):
    body, args = operator(name)
    verdicts = check_body(body, (2,), args)
    assert len(verdicts) > 0
    assert not beyond(name, verdicts)


FOUND = {"random permutation": "replicated,0→partial", "solve by factors": "replicated,1→partial"}  # pieces, by unknown places


def beyond(name: str, verdicts) -> list[str]:
    """Return the verdicts that are not proved, without those on pieces of rows at symbolic places, which are beyond the proofs."""
    wrong = faults(verdicts)
    if name not in FOUND:
        return wrong
    assert [v.choices[0].name for v in verdicts if v.answer == "unknown"] == [FOUND[name]]
    return wrong[1:]


@pytest.mark.parametrize("name", in_turn(sorted({*DERIVED} - LARGE - AGAIN)))
def test_derivatives_are_proved(name):
    body, args = operator(name)
    proof = GradientProof(body, args)
    assert not beyond(name, [proof.check((c,), (2,)) for c in choices(body) if fits(body, (c,), (2,))])


@pytest.mark.parametrize(("name", "shapes"), [("batch norm", ((2, 1, 2, 2), (2,), (2,))), ("group norm", ((2, 1, 4), (4,)))])
def test_the_derivative_of_a_small_norm_is_proved(name, shapes):
    fn, _ = CASES[name]
    sizes = [jax.ShapeDtypeStruct(s, jnp.float64) for s in shapes]
    assert not faults(check_operator(fn, *sizes))


@pytest.mark.parametrize("name", one_in(2, PAIRED))
def test_pairs_of_choices_are_proved(name):
    body, args = operator(name)
    verdicts = check_body(body, (), args) + check_body(body, (2,), args, pairs=True)
    assert any(len(v.choices) == 2 for v in verdicts)
    assert not faults(verdicts)


@pytest.mark.parametrize("name", ["dot_general", "softmax", "embedding, clipped", "reshape, heads to rows"])
def test_other_degrees_are_proved(name):
    body, args = operator(name)
    verdicts = check_body(body, (3,), args)
    assert any("P" in {s.kind for s in v.choices[0].states} for v in verdicts)
    assert not faults(verdicts)


# Errors are refuted


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_wrong_entry_is_refuted(mutation, monkeypatch):
    case, name, spec, local = MUTATIONS[mutation]
    entry = TABLE[name]
    monkeypatch.setitem(TABLE, name, Entry(name, spec or entry.spec, local or entry.local))
    body, args = operator(case)
    verdicts = check_body(body, (2,), args)
    assert "refuted" in {v.answer for v in verdicts}
    assert "unknown" not in {v.answer for v in verdicts}


def test_a_forgotten_all_reduce_is_refuted(monkeypatch):
    monkeypatch.setattr(walker, "REDUCERS", {**walker.REDUCERS, "sum": lambda x, names: jax.lax.pmax(x, names)})
    body, args = operator("softmax")
    assert "refuted" in {v.answer for v in check_body(body, (2,), args)}


def test_a_wrong_derivative_is_refuted():
    @jax.custom_vjp
    def double(x):
        return 2 * x

    double.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * jnp.abs(g),))
    body = close(jax.make_jaxpr(lambda x: [double(x)])(np.ones((4, 6))))
    cut = next(c for c in choices(body) if c.operands[0].kind == "P")
    assert GradientProof(body).check((cut,), (2,)).answer == "proved"
    copied = Choice("replicated", (REPLICATED,), (REPLICATED,), 0, 0.0)  # its cotangent is a partial sum, and its rule not linear
    assert GradientProof(body).check((copied,), (2,)).answer == "refuted"
    assert copied.states not in {c.states for c in choices(body)}


def test_a_counterexample_is_small_and_true(monkeypatch):
    case, name, spec, _ = MUTATIONS["a sum is linear in each of its terms"]
    monkeypatch.setitem(TABLE, name, Entry(name, spec, TABLE[name].local))
    body, args = operator(case)
    wrong = next(v.counterexample for v in check_body(body, (2,), args) if v.answer == "refuted")
    assert wrong is not None
    (value,) = (v for v in wrong.values.values() if v)  # one number that is not zero is enough
    assert (wrong.whole, wrong.pieces) == (value, 2 * value)
    assert "(4, 6)" in str(wrong)


# What users call


def test_a_users_own_operator():
    def swiglu(x, w, v):
        return jax.nn.silu(x @ w) * (x @ v)

    verdicts = check_operator(swiglu, np.ones((4, 6)), np.ones((6, 2)), np.ones((6, 2)))
    assert {v.of for v in verdicts} == {"values", "gradients"}
    assert {c.name for v in verdicts for c in v.choices} >= {"unused", "replicated"}
    assert not faults(verdicts)


def test_an_operator_without_a_derivative():
    """Its values are proved, and its gradients unknown."""

    def powers(x):
        return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * x), (0, x))[1]

    verdicts = check_operator(powers, jax.ShapeDtypeStruct((4,), np.float32))
    assert {v.answer for v in verdicts if v.of == "values"} == {"proved"}
    gradients = [v for v in verdicts if v.of == "gradients"]
    assert {v.answer for v in gradients} == {"unknown"}
    assert all(v.why.startswith("there are no gradients to prove: Reverse-mode") for v in gradients)


def test_one_choice():
    body, _ = operator("dot_general")
    for choice in choices(body):
        assert OperatorProof(body).check((choice,), (2,)).answer == "proved"
        assert OperatorProof(body).check((choice,), (5,)).answer == ("proved" if choice.size == 0 else "unknown")


def test_an_operator_that_is_too_large_is_unknown():
    x = jax.ShapeDtypeStruct((300, 300), jnp.float64)
    assert all("smaller sizes" in v.why for v in check_operator(lambda x: x + 1, x))
    proof = OperatorProof(operator("dot_general")[0])
    proof.domain.budget = 10
    assert all("smaller sizes" in proof.check((c,), (2,)).why for c in choices(proof.body))


def test_keys_are_symbols():
    body, args = operator("dropout")
    assert any(is_key(a) for a in args)
    verdicts = check_body(body, (2,))
    assert not faults(verdicts)
    assert {v.why for v in verdicts} == {""}


def test_a_proof_notes_that_integers_are_concrete():
    body, args = operator("embedding")
    assert {v.why for v in check_body(body, (2,), args)} == {"for these integers and truth values"}


def bodies(graph: PCG) -> dict[str, Body]:
    """Return all bodies of a graph, including nested graphs."""
    found: dict[str, Body] = {}
    for node in graph.nodes:
        if node.body is not None:
            found[node.body.key] = node.body
        if node.inside is not None:
            found |= bodies(node.inside)
    return found


COMPOSITES = {"gpt": lambda: small_models.gpt(1, 8, 6, 2, 4), "lstm": lambda: small_models.lstm(2, 3, 4, 6)}
COMPOSITES |= {"cnn": lambda: small_models.cnn(2, 2), "joint attention": small_models.joint_attention}


@pytest.mark.parametrize("name", COMPOSITES)
def test_captured_operators_are_proved(name):
    """Layer norms, soft-maxes, losses, batch norms and parts of attention are composites without an entry in the table."""
    small = COMPOSITES[name]()
    found = bodies(capture(small.loss, small.params, small.batch).graph)
    assert len(found) >= 5
    for body in found.values():
        verdicts = check_body(body)
        assert len(verdicts) > 1 or len(body.inputs) == 0
        assert all(v.answer == "proved" for v in verdicts), body.primitives
