"""Composite operators of rules: their programs mean what JAX computes, and a rule about them is proved only if it is true."""

import ast
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import fewer, one_in
from hypothesis import given, settings
from hypothesis import strategies as st

from unity.substitutions.language.axioms import folder
from unity.verify.ranks import execution
from unity.verify.ranks.composite_execution import FUNCTIONS, run_composite
from unity.verify.ranks.composites import COMPOSITES, expanded
from unity.verify.ranks.execution import Runner, denotation_by_jax, difference_by_jax
from unity.verify.ranks.instances import Instance, instances, refute
from unity.verify.ranks.prover import prove
from unity.verify.ranks.rule import parse_rank_rules
from unity.verify.ranks.verdict import verdict

RULES = parse_rank_rules((folder() / "composites.ranks").read_text())

OPERATORS = """
mean(K, x[K, G])
variance(K, x[K, G])
logsumexp(K, x[K, G])
softmax(K, x[K, G])
log_softmax(K, x[G, K])
masked_softmax(K, p[K, G], x[K, G])
masked_logsumexp(K, p[K, G], x[K, G])
attention(D, T, c[()], a[B, S, D], k[B, T, D], v[T, B, E])
masked_attention(D, T, p[S, T], c[()], a[B, R, S, D], k[B, T, D], v[B, T, E])
rms_norm(K, x[K, G], w[K], e[()])   where positive(e)
standardize(K, x[K, G], e[()])   where positive(e)
layer_norm(K, x[K, G], w[K], b[K], e[()])   where positive(e)
batch_norm(N, x[N, F], w[F], b[F], e[()])   where positive(e)
trained_batch_norm(x[F, G], m[F], v[F], w[F], b[F], e[()])   where positive(v), positive(e)
over_sum(K, x[K, G])
less_logarithm(K, x[K, G])
sigmoid(x)
silu(x)
tanh(x)
gelu(x)
gelu_tanh(x)
softplus(x)
cross_entropy(V, x[V, B], i[B])
soft_cross_entropy(V, x[V, B], y[V, B])
lookup(V, x[V, D, B], i[E, B])
select(is_at(V[n], i[B]), 1, 0)
largest(K, x[K, G])
like(x[G, H], y[H])
"""


def rule(body):
    (parsed,) = parse_rank_rules(f"rule   {body}")
    return parsed


def test_every_composite_is_compared_with_jax():
    assert {ast.unparse(c.func) for c in ast.walk(ast.parse(OPERATORS.replace("   where", ";"))) if isinstance(c, ast.Call)} >= {
        *COMPOSITES
    }


def differences_from_jax(term, seed, number):
    term, where, condition = term.partition("   where ")
    same = rule(f"{term} = {term}{where}{condition}")
    return [denotation_by_jax(same, instance) for instance in instances(same, seed, number)]


@pytest.mark.parametrize("term", OPERATORS.strip().splitlines())
def test_programs_mean_what_jax_computes(monkeypatch, term):
    ran = []
    monkeypatch.setattr(execution, "run_composite", lambda *call: ran.append(run_composite(*call)) or ran[-1])
    assert {*differences_from_jax(term, 1, 2)} == {""}
    assert None not in ran  # a function of JAX ran, not the program


@settings(max_examples=fewer(6), deadline=None)
@given(st.sampled_from(OPERATORS.strip().splitlines()), st.integers(0, 10**6))
def test_programs_mean_what_jax_computes_at_other_sizes(term, seed):
    assert {*differences_from_jax(term, seed, 1)} <= {""}


def test_a_definition_that_is_finite_where_jax_is_not_is_told(monkeypatch):
    same = rule("mean(K, x[K]) = mean(K, x)")
    instance = Instance({"K": 1}, {"K": (2,)}, {"x": np.asarray([1.0, 2.0])})
    assert denotation_by_jax(same, instance) == ""
    monkeypatch.setitem(FUNCTIONS, "mean", lambda axes, x: jnp.sum(x, axes) / 0)
    assert "is not inf" in denotation_by_jax(same, instance)


def test_only_an_exponential_overflows_in_one_side_of_a_rule():
    large = Instance({"G": 0}, {"G": ()}, {"x": np.asarray(101.0)})
    assert difference_by_jax(rule("x = log(exp(x))"), large) == ""
    assert "is not inf" in difference_by_jax(rule("x = div(x, 0)"), large)


def test_grouped_queries_are_those_of_jax():
    generator = np.random.default_rng(0)
    a, k, v = (generator.normal(size=s) for s in ((1, 2, 3, 2, 3), (1, 2, 4, 3), (1, 2, 4, 3)))  # batch, heads, queries to each
    attention = "attention(D, T, c[()], a[B, H, R, S, D], k[B, H, T, D], v[B, H, T, E])"
    term = rule(f"{attention} = {attention}")
    sizes = {"B": 1, "H": 2, "R": 3, "S": 2, "T": 4, "D": 3, "E": 3}
    numbers = {name: (n,) for name, n in sizes.items()}
    instance = Instance(dict.fromkeys(sizes, 1), numbers, {"a": a, "k": k, "v": v, "c": np.asarray(0.3)})
    value, defined, dims = Runner(term, instance).denoted(term.left)
    assert defined.all()
    queries = a.transpose(0, 3, 1, 2, 4).reshape(1, 2, 6, 3)  # JAX's head n reads the keys' head n // 3
    expected = jax.nn.dot_product_attention(queries, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), scale=0.3)
    got = value.transpose([dims.index((g, 0)) for g in "BSHRE"]).reshape(1, 2, 6, 3)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stated", one_in(2, [r for r in RULES if not r.obstacle]), ids=lambda r: r.name)
def test_rules_of_composites_are_proved_and_hold_where_they_are_run(stated):
    assert prove(stated).status == ("open" if stated.unproved else "proved")
    assert refute(stated, 3, 3).counterexample == ""


FALSE = """
softmax(K, mul(x[K, G], like(x, c[G]))) = softmax(K, x)
softmax(K, add(x[K, G], y[K, G])) = softmax(K, x)
logsumexp(K, add(x[K, G], like(x, c[G]))) = logsumexp(K, x)
logsumexp(C, concat(C, x[C:n, G], y[C:m, G])) = add(logsumexp(C, x), logsumexp(C, y))   where n >= 1, m >= 1
softmax(C, concat(C, x[C:n, G], y[C:m, G])) = concat(C, softmax(C, x), softmax(C, y))   where n >= 1, m >= 1
masked_softmax(K, p[K, G], x[K, G]) = softmax(K, x)
masked_softmax(K, p[K, G], x[K, G]) = softmax(K, select(p, x, -9))
attention(D, T, c[()], a[B, S, D], k[B, T, D], v[B, T, E]) = attention(D, T, 1, mul(a, c), k, mul(v, c))
attention(D, T, c[()], a[B, S, D], add(k[B, T, D], like(k, b[T])), v[B, T, E]) = attention(D, T, c, a, k, v)
rms_norm(K, mul(x[K, G], like(x, a[G])), w[K], 0) = rms_norm(K, x, w, 0)
rms_norm(K, mul(x[K, G], like(x, a[G])), w[K], e[()]) = rms_norm(K, x, w, e)   where positive(a), positive(e)
rms_norm(K, add(x[K, G], like(x, c[G])), w[K], e[()]) = rms_norm(K, x, w, e)   where positive(e)
variance(K, x[K, G]) = mean(K, mul(x, x))
silu(concat(C, x[C:n, G], y[C:m, G])) = concat(C, silu(y), silu(x))
dot(V, select(is_at(V[n], i[B]), 1, 0), x[V:n, D]) = lookup(V, broadcast(B[B], x), i)
lookup(V, concat(V, x[V:n, D], y[V:m, D]), i[B]) = lookup(V, x, i)
lookup(V, p[V:n], i[B]) = lookup(V, logical_not(p), i)
lookup(W, x[W:m], ii[()]) = lookup(W, x, lookup(V, i[V:n], ii))
mul(reduce(add, K, x[K, G]), reduce(add, K, x)) = reduce(add, K, mul(x, x))
largest(K, mul(x[K, G], like(x, c[G]))) = mul(largest(K, x), c)
reduce(max, K, like(x[K, G], c[G])) = c
reduce(add, K, over_sum(K, x[K, G])) = broadcast(G[G], 1)
reduce(add, K, select(p[K, G], div(x[K, G], like(x, reduce(add, K, select(p, x, 0)))), 0)) = broadcast(G[G], 1)
reduce(add, K, like(x[K, G], c[G])) = c
log(mul(x, x)) = mul(2, log(x))
log(mul(x, y)) = add(log(x), log(y))
sqrt(mul(mul(x, x), abs(y))) = mul(x, sqrt(abs(y)))
x = exp(log(x))
broadcast(G[G], 0) = mul(0, log(reduce(add, K, x[K, G])))
x = mul(y, div(x, y))
select(p, div(1, x), 0) = div(select(p, 1, 0), x)
reduce(add, K, mul(x[K, G], div(y[K, G], like(y, c[G])))) = div(reduce(add, K, mul(x, y)), sub(c, 0))
pow(reduce(add, K, mul(x[K], like(x, sqrt(div(1, mul(reduce(add, K, x), reduce(add, K, x))))))), 2) = 1
"""


@pytest.mark.parametrize("body", one_in(2, FALSE.strip().splitlines()))
def test_a_false_rule_is_refuted(body):
    result = verdict(rule(body))
    assert result.proof.status == "open"
    assert result.status == "refuted"


@pytest.mark.parametrize(
    "body",
    [
        "exp(reduce(add, K, add(x[K, G], like(x, c[G])))) = mul(exp(reduce(add, K, x)), exp(mul(c, reduce(add, K, like(x, 1)))))",
        "exp(neg(reduce(add, K, mul(x[K, G], like(x, c[G]))))) = div(1, exp(mul(c, reduce(add, K, x))))",
        "reduce(add, K, div(x[K, G], y[K, G])) = reduce(add, K, mul(x, div(1, y)))",
        "reduce(mul, K, reduce(add, L, x[K, L])) = reduce(mul, K, reduce(add, L, neg(neg(x))))",
        "div(reduce(add, K, x[K, G]), c[G]) = reduce(add, K, div(x, like(x, c)))",
        "reduce(add, K, div(x[K, G], like(x, c[G]))) = div(reduce(add, K, x), c)   where K >= 1",
        "largest(K, add(x[K, G], like(x, c[G]))) = add(largest(K, x), c)",
        "exp(log(mul(x, x))) = mul(x, x)",
        "lookup(W, x[W:m], lookup(V, i[V:n], ii[()])) = lookup(V, lookup(W, x, i), ii)",
        "logical_not(lookup(V, p[V:n], i[B])) = lookup(V, logical_not(p), i)",
    ],
)
def test_functions_of_sums_are_compared(body):
    assert verdict(rule(body), execute=True).status == "proved"


def test_terms_that_cancel_are_zero_under_a_root():
    total = "abs(reduce(add, K, x[K]))"
    assert prove(rule(f"sqrt(sub(sqrt({total}), div({total}, sqrt({total})))) = 0")).status == "proved"


def test_a_sum_of_nothing_says_nothing_of_its_divisor():
    body = "reduce(add, K, div(x[K, G], like(x, c[G]))) = div(reduce(add, K, x), c)"
    assert prove(rule(body)).status == "open"
    empty = Instance({"K": 1, "G": 0}, {"K": (0,), "G": ()}, {"x": np.zeros(0), "c": np.asarray(0.0)})
    divided, plain = (Runner(rule(body), empty).denoted(side)[:2] for side in (rule(body).left, rule(body).right))
    assert (divided[0], divided[1], plain[1]) == (0, True, False)


@pytest.mark.parametrize(("operator", "program"), [("over_sum", "x"), ("less_logarithm", "x"), ("mean", "reduce(add, K, x)")])
def test_a_proof_rests_on_the_program(monkeypatch, operator, program):
    rules = {"over_sum": "softmax-of-shift", "less_logarithm": "log-softmax-by-logsumexp", "mean": "layer-norm-of-shift"}
    (stated,) = (r for r in RULES if r.name == rules[operator])
    assert prove(stated).status == "proved"
    monkeypatch.setitem(COMPOSITES, operator, replace(COMPOSITES[operator], body=ast.parse(program, mode="eval").body))
    unproved = prove(stated).status == "open"
    assert unproved == bool(refute(stated).counterexample)
    assert unproved == (operator != "over_sum")


def test_composites_are_written_as_programs():
    term = ast.parse("softmax(K, logsumexp(L, x[K, L]))", mode="eval").body
    assert not {n.id for n in ast.walk(expanded(term)) if isinstance(n, ast.Name)} & {*COMPOSITES}


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("softmax(x) = x", "softmax.K, x.: 0 bare groups, expected 1"),
        ("softmax(K, x[K], y[K]) = x", "2 operands, expected 1"),
        ("masked_softmax(K, x[K], x) = x", "an operand is a number; expected a truth value"),
        ("lookup(V, x[V], y[B]) = y", "an operand is a number; expected an index"),
        ("add(i, 1) = i", "add of an index; expected a number"),
        ("slice(G[i[()]:e], x) = x", "no expression of sizes"),
        ("softmax(K, x[G]) = x", "lacks the dimensions K"),
        ("like(x[G], y[H]) = x", "like.x, y. repeats y"),
        ("reduce(add, V, lookup(V, x[V], i[V])) = x", "have the dimension V already"),
    ],
)
def test_a_text_without_meaning_is_told(body, why):
    result = verdict(rule(body))
    assert result.status == "ill-typed"
    assert re.search(why, result.why)
