"""Rules over tensors of any rank: operators mean what JAX computes, proofs hold for every rank, and false rules are refuted."""

import re

import pytest
from ci_cases import fewer
from hypothesis import given, settings
from hypothesis import strategies as st

from unity.base.errors import RuleError
from unity.cli import main
from unity.substitutions.language.axioms import folder
from unity.verify.ranks.execution import denotation_by_jax
from unity.verify.ranks.instances import instances, refute
from unity.verify.ranks.prover import prove
from unity.verify.ranks.rule import parse_rank_rules
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
reduce(max, K, iota(K, K[n], G[m]))
min(rem(x, y), reduce(min, K, z[K]))
max(f(x, rem(x, 5)), least)
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


@settings(max_examples=fewer(20), deadline=None)
@given(st.sampled_from(OPERATORS.strip().splitlines()), st.integers(0, 10**6))
def test_operators_mean_what_jax_computes(term, seed):
    same = rule(f"{term} = {term}")
    for instance in instances(same, seed, 1):
        assert denotation_by_jax(same, instance) == ""


def test_rules_of_xla_are_proved():
    unproved = {r.name for r in XLA if not r.obstacle and prove(r).status != "proved"}
    assert unproved == {r.name for r in XLA if r.unproved} == {"conv-exchanges-dilated-operands"}


def test_rules_of_xla_hold_where_they_are_run():
    runs = {r.name: refute(r, 7, 8) for r in XLA if not r.obstacle}
    assert {name: r for name, r in runs.items() if r.counterexample or not r.number} == {}


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


SQUEEZED = """
reduce(add, K, dynamic_update_slice(K[0], reduce(add, L, x[K:2, L]), reduce(add, L, y[K:2, L])))
    = reduce(add, L, squeeze(K, slice(K[0:1], y)))   via L = L / K = 0, L = L; L = L / K = 0, L = L
"""


def test_a_sum_at_a_known_index_has_the_summands_of_any_index():
    assert verdict(rule(SQUEEZED.strip())).status == "refuted"


@pytest.mark.parametrize("body", FALSE.strip().splitlines())
def test_a_false_rule_is_refuted(body):
    result = verdict(rule(body))
    assert result.proof.status == "open"
    assert result.status == "refuted"


DISGUISED = """
reduce(add, K, broadcast(K[2], max(sub(c[()], 7), 0))) = reduce(add, L, broadcast(L[2], max(sub(c, 7), 0))) via L = K%2 / K = L%2
reduce(add, K, broadcast(K[2], c[()])) = reduce(add, K, broadcast(K[2], c))   via K = (K + iG) % 2 / K = (K + iG) % 2
x = add(x, mul(0, pow(add(x, 50), 0.5)))
broadcast(G[G], 0) = mul(0, pow(add(x, 100), y))
x = mul(x, pow(log(sub(x, 100)), 0))
select(ge(add(x, 100), 0), sqrt(add(x, 100)), 0) = sqrt(add(x, 100))
select(gt(x, 50), add(x, div(1, sub(x, 100))), x) = add(x, select(gt(x, 50), 0, div(1, sub(x, 7))))
select(gt(x, 50), select(gt(x, 60), x, log(sub(x, 55))), x) = select(gt(x, 60), x, add(x, mul(0, log(sub(60, x)))))
broadcast(G[G], 0) = mul(0, div(reduce(add, K, x[K, G]), sub(y[G], 100)))
select(p[G], div(reduce(add, K, x[K, G]), y[G]), 0) = div(select(p, reduce(add, K, x), 0), y)
mul(max(sub(c[()], 7), 0), f(iota(C, C[n]))) = mul(max(sub(c, 7), 0), f[C:n])
"""


@pytest.mark.parametrize("body", DISGUISED.strip().splitlines())
def test_a_false_rule_is_not_proved(body):
    assert prove(rule(body)).status in ("open", "ill-typed")


OUT_OF_REACH = """
abs(reduce(add, K, x[K, G])) = abs(reduce(add, K, neg(neg(x))))
log(mul(exp(reduce(add, K, x[K, G])), mul(y[G], y))) = add(reduce(add, K, x), mul(2, log(abs(y))))
"""


@pytest.mark.parametrize("body", OUT_OF_REACH.strip().splitlines())
def test_a_term_that_is_not_reasoned_about_is_open_and_run(body):
    assert verdict(rule(body)).status == "open"
    left, _, right = body.partition(" = ")
    assert verdict(rule(f"{left} = add({right}, 1)")).status == "refuted"


ILL_TYPED = [
    (
        "mul(reduce(add, K, x[K:2]), reduce(add, K, K2, mul(broadcast(K2[2], iota(K, K[2])), w[K:2, K2:2])))"
        " = mul(reduce(add, K, x), reduce(add, K, K2, mul(broadcast(K[2], iota(K2, K2[2])), w)))",
        "K2 is the second index of K",
    ),
    ("slice(G[iG:e], x) = slice(G[iG:e], x)", "iG means something else"),
    ("add(mul(d[()], 0), select(gt(c[()], 7), x[C:n], x)) = x   where c // d + n >= 0, d == 1", "c is a real number"),
    ("slice(C[c[()]:e], x[C]) = slice(C[c:e], x)", "no expression of sizes"),
    ("slice(C[least:e], x) = slice(C[least:e], x)", "least means something else"),
    ("reduce(add, K, x[K:K2]) = reduce(add, K, x)", "K2 means something else"),
    (f"add(x, {10**400}) = x", "0 is no term"),
    (f"slice(G[0:{2**31}], x) = x", "no expression of sizes"),
    ("slice(G[max:min], x) = slice(G[max:min], x)", "means something else"),
    ("eq(add(p, q), 2) = logical_and(p, q)", "add of a truth value; expected a number"),
    ("max(p, q) = logical_or(p, q)", "max of a truth value"),
    ("reduce(add, K, p[K, G]) = reduce(logical_or, K, p)", "add of a truth value"),
    ("select(x, y, y) = y", "select of a number"),
    ("eq(p, 1) = p", "operands of different kinds"),
    ("broadcast(G[G], 0) = mul(sub(x, x), least)", "mul of a bound; expected a number"),
    ("gt(x, add(greatest, 1)) = broadcast(G[G], False)", "add of a bound"),
    ("add(reduce(max, K, x[K, G]), 0) = reduce(max, K, x)", "add of a bound"),
    ("sum(broadcast(G[n], c[()])) = broadcast(G[n], sum(c))", "sum is an unknown operator"),
    ("slise(G[0:1], x) = x", "slise is an unknown operator; near it are slice"),
    ("gh(x) = gh(x)", "gh is an unknown operator"),
    ("concat() = x", r"concat\(\) is not of the form concat\(C, x, y\)"),
    ("slice(G, x) = x", r"of the form slice\(G\[start:end:stride\], x\): 1 bare groups, expected 0"),
    ("pad(G, x, c[()]) = x", "bare groups"),
    ("conv(F, S[1, 0, 0, 1, 1], x[F, S], w[F]) = x", "lacks the dimensions S"),
    ("conv(F, S[1, 0, 0, 1, 1], x[F, S], w[S]) = x", "lacks the dimensions F"),
    ("conv(S, S[1, 0, 0, 1, 1], x[S], w[S:m]) = x", "S is summed and windowed"),
    ("conv(F, S[1, 0, 0, 1, 1], x[B, F, S], w[B, F, S:m]) = x", "a convolution in groups"),
    ("dynamic_update_slice(G[s], x, c[()]) = x", "an update has other dimensions"),
    ("pad(G[0:1], x, y) = x", "the value of a padding is a scalar"),
    ("broadcast(H, x[G]) = x", "bare groups"),
    ("dynamic_slice(G, x) = x", "bare groups"),
    ("reverse(G[1:2], x) = x", "bare groups"),
    ("squeeze(G[0], x) = x", "bare groups"),
    ("reduce(add, K[n], x[K, G]) = x", "bare groups"),
    ("reduce(add, x) = x", "bare groups"),
    ("reduce(sub, K, x[K, G]) = x", "sub is no commutative monoid"),
    ("dynamic_slice(G[s:m:2], x) = dynamic_slice(G[s:m], x)", "3 fields of G, expected 2"),
    ("slice(G[s, e, 1, 7], x) = slice(G[s:e], x)", "4 fields of G, expected 2 to 3"),
    ("slice(G[0:1], G[s:e], x) = slice(G[s:e], x)", "a group is repeated"),
    ("reverse(G, G, x) = reverse(G, x)", "a group is repeated"),
    ("reduce(add, K, K, x[K, G]) = reduce(add, K, x)", "a group is repeated"),
    ("mul(x[G, G], 1) = x", "twice"),
    ("add(x, 0, foo=3) = x", "no keywords"),
    ("slice(G[+s:e], x) = slice(G[-s:e], x)", "no expression of sizes"),
    ("slice(G[~s:e], x) = slice(G[-s:e], x)", "no expression of sizes"),
    ("slice(G[not s:e], x) = slice(G[-s:e], x)", "no expression of sizes"),
    ("concat(x[C], C, y[C]) = concat(C, x, y)", "bare groups come first"),
    ("iota(C[n], C) = iota(C[n], C)", "bare groups come first"),
    ("concat(C) = x", "0 operands, expected at least 1"),
    ("add(x) = x", "add has 2 operands, not 1"),
    ("-x = neg(x)", "-x is no term"),
    ("x + y = add(x, y)", "no term"),
    ("x.y = x", "no term"),
    ("(x, y) = x", "no term"),
    ('add(x, "a") = x', "no term"),
    ("x = x   where x >= 0", "x is neither a size"),
    ("x = x   where zz >= 0", "zz is neither a size"),
    ("x = x   where some()", "expected some"),
    ("x = x   where nonempty(Z)", "no group of dimensions Z"),
    ("x = x   where positive(y)", "no tensor of numbers y"),
    ("select(p, x, y) = x   where positive(p)", "no tensor of numbers p"),
]


@pytest.mark.parametrize(("body", "why"), ILL_TYPED)
def test_a_text_without_meaning_is_told(body, why):
    result = verdict(rule(body))
    assert result.status == "ill-typed"
    assert re.search(why, result.why)


def test_a_rule_of_one_dimension_is_not_one_of_every_rank():
    assert verdict(rule("reverse(G, x) = x   where some(G == 1), one(G)")).status == "proved"
    assert verdict(rule("reverse(G, x) = x   where some(G == 1)")).status == "refuted"


def test_a_rule_that_is_false_of_scalars_needs_a_dimension():
    body = "pad(G[l:h:k], x[G:0], c[()]) = broadcast(G[l + h], c)"
    assert verdict(rule(body)).status == "refuted"
    assert verdict(rule(f"{body}   where nonempty(G)")).status == "proved"


@pytest.mark.parametrize(
    "body",
    [
        "neg(x) = x   where G < 0, nonempty(G)",
        "neg(neg(x)) = x   where G < 0",
        "slice(G[3:2], x) = slice(G[3:2], reverse(G, x))",
        "slice(G[2:2], x) = slice(G[2:2], reverse(G, x))",
        "x[G:-1] = neg(x)   where nonempty(G)",
        "rem(x, 0) = x",
        "sqrt(sub(-1, abs(x))) = x",
        "div(x, sub(y, y)) = mul(x, 7)",
    ],
)
def test_what_holds_of_no_elements_is_not_proved(body):
    result = verdict(rule(body))
    assert (result.proof.status, result.status) == ("proved", "open")
    assert "no instance" in result.why


@pytest.mark.parametrize(
    "body",
    [
        "max(sub(x, 7), 0) = broadcast(G[G], 0)",
        "mul(c[()], max(sub(x, 100), 0)) = broadcast(G[G], 0)",
        "slice(G[s:e], x) = slice(G[s:min(e, 5)], x)",
        "reduce(add, K, x[K, L]) = reduce(add, K, reverse(L, x))",
        "select(ge(add(x, 100), 0), sqrt(add(x, 100)), 0) = sqrt(add(x, 100))",
    ],
)
def test_what_differs_far_away_is_refuted(body):
    assert refute(rule(body)).counterexample


@pytest.mark.parametrize(
    "body",
    [
        "div(1, x) = div(x, mul(x, x))",
        "select(p, div(x, y), z) = select(p, mul(x, div(1, y)), z)",
        "pad(G[l:h], log(x), c[()]) = pad(G[l:h], log(x), c)",
        "logical_or(p, gt(div(1, x), 5)) = logical_or(gt(div(1, x), 5), p)",
        "reduce(add, K, mul(div(x[K, G], 2), 2)) = reduce(add, K, x)",
    ],
)
def test_partial_functions_are_proved_where_they_are_evaluated(body):
    assert verdict(rule(body), execute=True).status == "proved"


@pytest.mark.parametrize("body", ["reduce(max, K, iota(K, K[n], G[m])) = reduce(max, K, neg(neg(iota(K, K[n], G[m]))))",
                                  "max(rem(x, 3), least) = max(least, rem(x, 3))"])  # fmt: skip
def test_extrema_of_integers_are_run_by_jax(body):
    assert verdict(rule(body), execute=True).status == "proved"


def test_a_rule_that_only_rounding_breaks_is_told():
    result = verdict(rule("eq(div(x, 3), mul(x, div(1, 3))) = broadcast(G[G], True)"))
    assert (result.proof.status, result.status) == ("proved", "refuted")
    assert result.why.endswith("rounding")


@pytest.mark.parametrize("via", ["K = 0 / K = 0", "K = K / K = 0", "K = K + 1 / K = K - 1"])
def test_sums_are_equal_by_bijections_alone(via):
    body = "reduce(add, K, x[K, G]) = reduce(add, K, reverse(K, x))"
    assert prove(rule(f"{body}   via {via}")).status == "open"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("slice(G[s:e], x[G]) = x = x", "2 equals signs between sides, expected one; expected NAME SIDE = SIDE"),
        ("x", "0 equals signs"),
        ("", "0 equals signs"),
        ("add(x, 0 = x", "never closed"),
        ("add(x, 0) = ", "an expression is missing|0 equals signs"),
        ("x = add(x, 0)   # where G >= 0", "a comment is a line before the rule"),
        ("x = x   where G >= 0,", "an expression is missing"),
        ("reduce(add, K, x[K]) = reduce(add, K, x)   via K = K", "there and back"),
        ("reduce(add, K, x[K]) = reduce(add, K, x)   via K / K = K", "expected INDEX = EXPRESSION"),
        ("add(slice(G[s:e], x[G]), slice(H[s:e], y[H])) = x", "belongs to the groups"),
        ("add(x[G], x[H]) = x", "two shapes"),
    ],
)
def test_what_is_no_rule_is_told(text, why):
    broken, whole = parse_rank_rules(f"# Broken.\na   {text}\nb   x = x\n")
    assert re.search(why, broken.fault)
    assert (broken.line, whole.line, whole.fault) == (2, 3, "")
    assert verdict(broken).status == "ill-typed"


def test_a_text_without_rules_is_an_error():
    with pytest.raises(RuleError, match="no rule"):
        parse_rank_rules("# Nothing.\n")


def test_a_rule_is_printed_with_its_pairings():
    body = "reduce(add, K, x[K:n]) = reduce(add, K, reverse(K, x))   via K = max(0, n - 1 - K) / K = n - 1 - K"
    assert str(rule(body)) == f"rule   {body}"
    assert verdict(rule(body)).status == "proved"


@pytest.mark.parametrize("via", ["L = 0 / K = K", "K = K / K = K; K = K / K = K"])
def test_pairings_of_no_sum_are_refused(via):
    assert prove(rule(f"reduce(add, K, x[K]) = reduce(add, K, x)   via {via}")).status == "open"


def test_the_command_judges_a_text(tmp_path, capsys):
    path = tmp_path / "mine.ranks"
    path.write_text(
        "# Twice is never.\nreverse-twice   reverse(G, reverse(G, x)) = x\nwrong   reverse(G, x) = x\nsort   not expressible: no\n"
    )
    assert main(["rules", "verify", str(path)]) == 1
    out = capsys.readouterr().out
    assert f"{path}:3: wrong   reverse(G, x) = x\n    refuted: " in out
    assert "1 of 3 rules proved for every rank and size, 1 not expressible" in out


def test_the_command_accepts_an_open_rule_with_a_reason(tmp_path, capsys):
    body = "abs(reduce(add, K, x[K, G])) = abs(reduce(add, K, neg(neg(x))))"
    path = tmp_path / "mine.ranks"
    path.write_text(f"sums   {body}   open: a function of a sum\n")
    assert main(["rules", "verify", str(path)]) == 0
    assert "0 of 1 rules proved for every rank and size, 0 not expressible, 1 open for" in capsys.readouterr().out
    path.write_text(f"sums   {body}\nwrong   reverse(G, x) = x   open: it is false\n")
    assert main(["rules", "verify", str(path)]) == 1
    out = capsys.readouterr().out
    assert "1: sums" in out
    assert "open: it is false\n    refuted: " in out


def test_a_broken_rule_does_not_hide_the_others(tmp_path, capsys):
    path = tmp_path / "mine.ranks"
    path.write_text("good   neg(neg(x)) = x\nbad   addd(x, y) = addd(y, x)\nworse   add(x, 0 = x\ngood   x = x\n")
    assert main(["rules", "verify", str(path)]) == 1
    out = capsys.readouterr().out
    assert (
        f"{path}:2: bad   addd(x, y) = addd(y, x)\n    ill-typed: addd is an unknown operator; near it are add (docs: rules#" in out
    )
    assert f"{path}:3: worse   add(x, 0 = x\n    ill-typed: '(' was never closed" in out
    assert "two rules are called good; the first is in line 1" in out
    assert "1 of 4 rules proved" in out
