"""Rules over tensors of any rank: operators mean what JAX computes, proofs hold for every rank, and false rules are refuted."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unity.base.errors import RuleError
from unity.cli import main
from unity.substitutions.language.axioms import folder
from unity.verify.ranks.execution import denotation_by_jax
from unity.verify.ranks.instances import instances, refute
from unity.verify.ranks.prover import prove
from unity.verify.ranks.rule import parse_rank_rules, signature
from unity.verify.ranks.verdict import verdict

XLA = parse_rank_rules((folder() / "xla.ranks").read_text())

OPERATORS = """
slice(G[s:e:k], H[t:f], x[G, H])
pad(G[l:h:k], x[G, H], c[()])
dynamic_slice(G[s:m], x[G, H])
dynamic_update_slice(G[s], x[G, H], y[G:m, H])
reverse(G, x[G, H])
add(transpose(o, x[G, H]), transpose(o, y[G, H]))
broadcast(H[m], transpose(o, x[G]))
squeeze(D, x[G, D:1, H])
concat(C, x[G, C:n], y[G, C:m], x)
iota(C, G[n], C[m])
reduce(add, K, L, x[G, K, H, L])
reduce(max, K, transpose(o, x[G, K]))
reduce(logical_or, K, p[K, G])
dot(K, L, x[B, K, M, L], y[L, B, N, K])
conv(F, S[a, l, h, d, e], x[S:n, B, F], w[O, F, S:m])
select(lt(x, y), min(x, c[()]), abs(sub(y, x)))
rem(iota(C, C[n], G[m]), c[()])
clamp(c[()], div(x, y), max(x, y))
"""


def rule(body):
    (parsed,) = parse_rank_rules(f"rule   {body}")
    return parsed


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(OPERATORS.strip().splitlines()), st.integers(0, 10**6))
def test_operators_mean_what_jax_computes(term, seed):
    same = rule(f"{term} = {term}")
    for instance in instances(same, seed, 1):
        assert denotation_by_jax(same, instance) == ""


UNPROVED = {"conv-exchanges-dilated-operands"}  # open: a quotient by a symbol of what is a multiple of it by another equation


def test_rules_of_xla_are_proved():
    assert {r.name for r in XLA if not r.obstacle and prove(r).status != "proved"} == UNPROVED


def test_rules_of_xla_hold_where_they_are_run():
    runs = {r.name: refute(r, 7, 8) for r in XLA if not r.obstacle}
    assert {name: why for name, (why, number) in runs.items() if why or not number} == {}


FALSE = """
pad(G[s:e], pad(G[l:h], x, c[()]), c) = pad(G[l + s:h + e], x, c)
slice(G[t:f], slice(G[s:e], x)) = slice(G[s + t:s + f + 1], x)
slice(G[s:e:k], pad(G[l:h:i], x, c[()])) = broadcast(G[(e - s + k - 1) // k], c)   where e <= l, G >= 1
dynamic_slice(G[s:m], x) = slice(G[s:s + m], x)   where 0 <= s
dynamic_slice(G[t:k], dynamic_slice(G[s:m], x)) = dynamic_slice(G[s + t:k], x)
max(c[()], min(x, d[()])) = clamp(c, x, d)
rem(add(a[()], c[()]), c) = rem(a, c)
dot(C, concat(C, x[M, C:n], y[M, C:m]), concat(C, z[C:m, N], w[C:n, N])) = add(dot(C, x, w), dot(C, y, z))   where n >= 1
conv(F, S[2, l, h, 1, d], pad(S[t:b], x[F, S:n], 0), w[F, S:m]) = conv(F, S[2, l + t, h, 1, d], x, w)   where t >= 0, b >= 1
reduce(max, K, broadcast(K[k], x[G])) = x
mul(sqrt(x), sqrt(x)) = abs(add(x, 1))
sqrt(mul(x, x)) = x
reverse(G, x) = x   where some(G == 1)
"""


@pytest.mark.parametrize("body", FALSE.strip().splitlines())
def test_a_false_rule_is_refuted(body):
    result = verdict(rule(body))
    assert result.proof.status == "open"
    assert result.status == "refuted"


def test_a_rule_of_one_dimension_is_not_one_of_every_rank():
    assert verdict(rule("reverse(G, x) = x   where some(G == 1), one(G)")).status == "proved"
    assert verdict(rule("reverse(G, x) = x   where some(G == 1)")).status == "refuted"


def test_a_rule_that_is_false_of_scalars_needs_a_dimension():
    body = "pad(G[l:h:k], x[G:0], c[()]) = broadcast(G[l + h], c)"
    assert verdict(rule(body)).status == "refuted"
    assert verdict(rule(f"{body}   where nonempty(G)")).status == "proved"


def test_contradictory_conditions_prove_nothing():
    result = verdict(rule("neg(x) = x   where G < 0, nonempty(G)"))
    assert (result.proof.status, result.status) == ("proved", "open")


@pytest.mark.parametrize("via", ["K = 0 / K = 0", "K = K / K = 0", "K = K + 1 / K = K - 1"])
def test_sums_are_equal_by_bijections_alone(via):
    body = "reduce(add, K, x[K, G]) = reduce(add, K, reverse(K, x))"
    assert prove(rule(f"{body}   via {via}")).status == "open"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a   slice(G[s:e], x[G]) = x = x", "SIDE = SIDE"),
        ("a   add(slice(G[s:e], x[G]), slice(H[s:e], y[H])) = x", "belongs to the groups"),
        ("a   add(x[G], x[H]) = x", "two shapes"),
    ],
)
def test_what_is_no_rule_is_told(text, why):
    def read():
        return [signature(r) for r in parse_rank_rules(text)]

    with pytest.raises(RuleError, match=why):
        read()


def test_the_command_judges_a_text(tmp_path, capsys):
    path = tmp_path / "mine.ranks"
    path.write_text(
        "# Twice is never.\nreverse-twice   reverse(G, reverse(G, x)) = x\nwrong   reverse(G, x) = x\nsort   not expressible: no\n"
    )
    assert main(["rules", "verify", str(path)]) == 1
    out = capsys.readouterr().out
    assert "wrong   reverse(G, x) = x\n    refuted: " in out
    assert "1 of 3 rules proved for every rank and size, 1 not expressible" in out
