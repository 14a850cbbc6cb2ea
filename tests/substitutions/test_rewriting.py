"""Rules applied to captured programs: what is found, and that every rewriting keeps values and gradients."""

import itertools
import random
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import by_hand, one_in
from derivation_cases import scanned

from benchmarks.random_rewritings import results_and_gradients
from unity.base.errors import RuleError
from unity.pcg.ir.dead_code import used
from unity.pcg.ir.program import Body, program_of
from unity.pcg.operators.pointwise import pointwise
from unity.substitutions.language.library import load
from unity.substitutions.language.text import parse_rule
from unity.substitutions.rewriting.forms import planning_form, search_form
from unity.substitutions.rewriting.occurrences import Pattern, occurrences, patterns
from unity.substitutions.rewriting.reading import Reading
from unity.substitutions.rewriting.rewriting import content_key, rewritten, tidy

LIBRARY = load("rules/library.json")


def attention(x, q, k, v, o):
    q, k, v = (jnp.einsum("bsd,dhk->bshk", x, w) for w in (q, k, v))
    p = jax.nn.softmax(jnp.einsum("bqhk,bshk->bhqs", q, k))
    return x + jnp.einsum("bqhk,hkd->bqd", jnp.einsum("bhqs,bshk->bqhk", p, v), o)


def gated(x, a, b, c):
    return (jax.nn.silu(x @ a) * (x @ b)) @ c


def two_products(x, y, a, b, c):
    return jnp.tanh(x @ a + y @ b) @ c


def low_rank(x, a, b):
    return (x @ a) @ b + x


def joins(x, y, z):
    s = jnp.concatenate([x, y], -1)
    a, b = jnp.split(jnp.exp(s * 2.0), 2, axis=-1)
    return jnp.concatenate([a + z, b - z], -1)[..., :3] + z


def clipped(x, y):
    return jnp.split(jnp.maximum(jnp.concatenate([x, y], -1), 0.5) / 3, 2, axis=-1)


def biases(x, y, b, c, w):
    return jax.nn.relu(x @ w + b) + (jax.nn.relu(y @ w + b) + c)


def convolutions(x, k, m):
    def conv(x, k):
        return jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    return jnp.concatenate([conv(x, k), conv(x, m)], -1), conv(conv(x, k), k) + conv(conv(x, m), k)


def tables(t, u, i, j):
    return jnp.concatenate([t[i], u[i]], -1), t[i] + u[i], jnp.concatenate([t[i], t[j]], 0)


def batches(x, y, z, w):
    return jnp.einsum("bij,bjk->bik", x, y) + jnp.einsum("bji,bjk->bik", z, w), jnp.concatenate([x @ y, z @ w], 0)


def many_parts(x, y, z):
    a, b, c = jnp.split(jnp.concatenate([x, y, z], -1), [2, 3], axis=-1)
    return jnp.concatenate([jnp.exp(c), jnp.exp(b), jnp.exp(a), x], -1)[:, 1:][:, :5], a, b


F, I = np.float64, np.int32  # noqa: E741
PROGRAMS = {
    attention: [(2, 4, 6), (6, 2, 3), (6, 2, 3), (6, 2, 3), (2, 3, 6)],
    gated: [(2, 3, 4), (4, 5), (4, 5), (5, 4)],
    two_products: [(2, 3, 4), (2, 3, 4), (4, 5), (4, 5), (5, 2)],
    low_rank: [(3, 4), (4, 2), (2, 4)],
    joins: [(2, 3), (2, 3), (2, 3)],
    clipped: [(2, 3), (2, 3)],
    biases: [(2, 3, 4), (2, 3, 4), (5,), (5,), (4, 5)],
    convolutions: [(2, 4, 4, 3), (3, 3, 3, 3), (3, 3, 3, 3)],
    many_parts: [(2, 2), (2, 1), (2, 3)],
    tables: [(5, 3), (5, 3), (4,), (4,)],
    batches: [(2, 3, 3), (2, 3, 3), (2, 3, 3), (2, 3, 3)],
    scanned: [(2, 4), (4, 3), (3, 3)],
}
EACH = pytest.mark.parametrize("fn", one_in(2, PROGRAMS), ids=lambda fn: fn.__name__)


@cache
def arguments(fn):
    rng = np.random.default_rng(0)
    return [
        jnp.asarray(rng.integers(0, 5, s), I) if fn is tables and k > 1 else jnp.asarray(rng.normal(size=s), F)
        for k, s in enumerate(PROGRAMS[fn])
    ]


def captured(fn) -> Body:
    return search_form(used(program_of(jax.make_jaxpr(fn)(*arguments(fn)))[0]))


def steps(body: Body, chosen=None):
    reading = Reading(body)
    for pattern in chosen or patterns(LIBRARY.rules):
        for occurrence in occurrences(reading, pattern):
            yield occurrence, rewritten(body, occurrence)


def agrees(body: Body, fn, expected) -> None:
    for a, b in zip(results_and_gradients(body, arguments(fn)), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


@EACH
def test_every_step_keeps_values_and_gradients(fn):
    with jax.enable_x64(True):
        body = captured(fn)
        expected = results_and_gradients(body, arguments(fn))
        found = list(steps(body))
        assert found
        for _, new in found:
            if new is not None:
                agrees(new, fn, expected)
                agrees(planning_form(new), fn, expected)


@EACH
def test_random_steps_keep_values_and_gradients(fn):
    with jax.enable_x64(True):
        first = captured(fn)
        expected = results_and_gradients(first, arguments(fn))
        rng, body = random.Random(0), first
        for _ in range(6):
            ways = [new for _, new in steps(body) if new is not None and len(new.equations) < 40]
            if not ways:
                break
            body = rng.choice(ways)
        agrees(body, fn, expected)


@EACH
def test_every_step_keeps_other_precisions(fn):
    """Of bfloat16 nothing becomes wider on the way, constants included."""
    with jax.enable_x64(True):
        given = arguments(fn)
    kinds = [jnp.bfloat16 if jnp.issubdtype(a.dtype, jnp.floating) else a.dtype for a in given]
    structs = [jax.ShapeDtypeStruct(a.shape, kind) for a, kind in zip(given, kinds, strict=True)]
    body = search_form(used(program_of(jax.make_jaxpr(fn)(*structs))[0]))
    known = {body.tensors[v].dtype for e in body.equations for v in e.results}
    for occurrence, new in steps(body):
        if new is not None:
            assert {new.tensors[v].dtype for e in new.equations for v in e.results} <= known, occurrence.pattern


def of_joined(x, y, v, w):
    return jnp.concatenate([x, y], -1) @ jnp.concatenate([v, w], 0)


def of_parts(x, y, z, w):
    return jnp.einsum("bij,bjk->bik", jnp.concatenate([x, z], 0), jnp.concatenate([y, w], 0)) * 2.0


SIDES = {of_joined: "ij ik jl kl", of_parts: "bij bjk cij cjk"}


@pytest.mark.parametrize("fn", SIDES, ids=lambda fn: fn.__name__)
def test_every_step_where_some_dimensions_are_empty(fn):
    """As heads that are all rotated have them: parts of size zero are joined to others, and products taken over them."""
    letters, found = sorted(set(SIDES[fn]) - {" "}), 0
    for empty in (set(chosen) for n in (0, 1, *by_hand(2)) for chosen in itertools.combinations(letters, n)):
        sizes = {letter: 0 if letter in empty else 2 + k for k, letter in enumerate(letters)}
        rng = np.random.default_rng(0)
        with jax.enable_x64(True):
            given = [jnp.asarray(rng.normal(size=[sizes[letter] for letter in side]), F) for side in SIDES[fn].split()]
            body = search_form(used(program_of(jax.make_jaxpr(fn)(*given))[0]))
            wanted = results_and_gradients(body, given)
            for _, new in steps(body):
                if new is not None:
                    found += 1
                    for one in (new, planning_form(new)):
                        for a, b in zip(results_and_gradients(one, given), wanted, strict=True):
                            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)
    assert found


def rules_found(fn) -> set[str]:
    with jax.enable_x64(True):
        return {str(o.pattern) for o, _ in steps(captured(fn))}


MERGED = "split(-1, matmul(x, concat(-1, y, z)))"
HALVES = f"(matmul(x, y), matmul(x, z)) = ({MERGED}.0, {MERGED}.1)"


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (attention, HALVES),
        (two_products, "add(matmul(x, y), matmul(z, w)) = matmul(concat(-1, x, z), concat(-2, y, w))"),
        (low_rank, "matmul(matmul(x, y), z) = matmul(x, matmul(y, z))"),
        (joins, "split(d, map(f, x)).0 = map(f, split(d, x).0)"),
        (convolutions, "concat(-3, conv2d(1, k, p, x, y), conv2d(1, k, p, x, z)) = conv2d(1, k, p, x, concat(-4, y, z))"),
        (tables, "concat(-1, embedding(x, y), embedding(z, y)) = embedding(concat(-1, x, z), y)"),
        (batches, "concat(-3, matmul(x, y), matmul(z, w)) = matmul(concat(-3, x, z), concat(-3, y, w))"),
        (biases, "add(x, bias(y, z)) = bias(add(x, y), z)"),
    ],
)
def test_rules_of_matrices_are_found_in_any_layout(fn, text):
    with jax.enable_x64(True):
        assert list(steps(captured(fn), [Pattern(parse_rule(f"it {text}"), False)]))


def products(body: Body) -> int:
    return sum(e.name == "dot_general" for e in body.equations)


def test_three_products_of_one_operand_become_one():
    """Query, key and value: two steps, after which one product is left of three."""
    with jax.enable_x64(True):
        body = captured(attention)
        merge = [p for p in patterns(LIBRARY.rules) if p.rule.name in ("merge-shared-input", "merge-shared-weight")]
        before = products(body)
        for _ in range(2):
            body = min((new for _, new in steps(body, merge) if new), key=products)
        assert products(body) == before - 2


def test_joins_and_splits_are_of_two_parts_while_searched_and_of_all_in_the_end():
    with jax.enable_x64(True):
        first = tidy(used(program_of(jax.make_jaxpr(many_parts)(*arguments(many_parts)))[0]))
        body = search_form(first)
        parts = [
            len(e.operands) if e.name == "concatenate" else len(e.results)
            for e in body.equations
            if e.name in ("concatenate", "split")
        ]
        assert set(parts) == {2}
        again = planning_form(body)
        assert [e.name for e in again.equations].count("concatenate") == 2
        assert [len(e.results) for e in again.equations if e.name == "split"] == [3]
        expected = results_and_gradients(first, arguments(many_parts))
        for program in (body, again):
            agrees(program, many_parts, expected)


def test_where_a_result_would_need_itself_nothing_is_rewritten():
    def chained(x, a, b):
        y = x @ a
        return x @ (y @ b)

    with jax.enable_x64(True):
        structs = [jax.ShapeDtypeStruct((3, 3), F)] * 3
        body = tidy(used(program_of(jax.make_jaxpr(chained)(*structs))[0]))
        merge = [p for p in patterns(LIBRARY.rules) if len(p.left) == 2]
        assert any(new is None for _, new in steps(body, merge))


def test_functions_of_elements_are_told_apart_by_their_derivatives_too():
    """Values of all three are equal; derivatives at 0 are not, or nowhere."""

    @jax.custom_jvp
    def straight_through(x):
        return jnp.maximum(x, 0)

    straight_through.defjvps(lambda t, out, x: t)
    s = jax.ShapeDtypeStruct((2, 3), np.float32)
    names = []
    for fn in (lambda x: jnp.maximum(x, 0), jax.nn.relu, straight_through):
        (e,) = program_of(jax.make_jaxpr(fn)(s))[0].equations
        names.append(pointwise(e))
    assert names == ["max(x, 0.0)", "relu", None]


def test_the_content_key_ignores_order():
    def one(x, y):
        a, b = jnp.exp(x), jnp.sin(y)
        return a + b

    def other(x, y):
        b, a = jnp.sin(y), jnp.exp(x)
        return b + a

    def different(x, y):
        return jnp.exp(y) + jnp.sin(x)

    s = jax.ShapeDtypeStruct((3,), np.float32)
    keys = [content_key(used(program_of(jax.make_jaxpr(f)(s, s))[0])) for f in (one, other, different)]
    assert keys[0] == keys[1] != keys[2]


def test_conditions_of_a_rule_are_asked():
    """What is joined along the last dimension is not found by a rule that leaves it out."""
    with jax.enable_x64(True):
        rule = parse_rule("it concat(d, scale(x, z), scale(y, z)) = scale(concat(d, x, y), z)   where d != -1")
        assert not list(steps(captured(joins), [Pattern(rule, True)]))
        free = parse_rule("it concat(d, scale(x, z), scale(y, z)) = scale(concat(d, x, y), z)")
        assert list(steps(captured(joins), [Pattern(free, True)]))


def test_a_rule_that_invents_values_is_not_looked_for():
    assert not Pattern(parse_rule("it sub(x, x) = sub(y, y)"), False).usable
    assert not Pattern(parse_rule("it mul(x, ones(x)) = x"), True).usable
    with pytest.raises(RuleError):
        parse_rule("it add(x, y = x")
