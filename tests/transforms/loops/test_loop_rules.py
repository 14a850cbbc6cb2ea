"""Rules of loops on programs of many kinds: values and gradients stay, results are derived, and some values stay in the loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import one_in
from jax import lax

from unity.pcg.capture.capture import capture
from unity.pcg.local.interpreter import run_body
from unity.substitutions.language.loop_rules import FEWER_ROUNDS, INVARIANTS, JOINED, LOOK_UPS, LOOP_RULES, PRODUCTS, RESULTS, SUMS
from unity.transforms.loops import applicable, loop_rewriting, scans
from unity.transforms.loops.choose import everywhere
from unity.transforms.loops.dependences import ScanParts

T, B, D = 5, 4, 3
OTHER_RULES = tuple(rule for rule in LOOP_RULES.values() if rule not in FEWER_ROUNDS)
W = ((D, D), (D, D), (T, B, D))
"""The shapes of two weights, `x` and `h`, and of a sequence."""


def arrays(shapes, dtype="float64"):
    rng = np.random.default_rng(1)
    return [jnp.asarray(rng.normal(size=s), dtype) for s in shapes]


def recurrent(**options):
    def run(x, h, xs):
        def step(state, row):
            state = jnp.tanh(row @ x + state @ h)
            return state, state * 2

        return lax.scan(step, xs[0], xs, **options)

    return run


def invariant(x, h, xs):
    return lax.scan(lambda state, row: (jnp.tanh(state @ (x @ h) + row), None), xs[0], xs)


def without_slices(x, h, xs):
    return lax.scan(lambda state, _: (jnp.tanh(state @ jnp.exp(x)), state), xs[0], None, length=4)


def several_slices(x, h, xs):
    def step(state, rows):
        one, two = rows
        return jnp.tanh(jnp.tanh(one) @ x + (two * 2) @ h.T + state + one), (two @ x).T

    return lax.scan(step, xs[0], (xs, xs + 1))


def right_operand(x, h, xs):
    return lax.scan(lambda state, row: (state + x @ row.T, row @ row.T), jnp.zeros((D, B)), xs)


def chained(x, h, xs):
    def step(state, row):
        hidden = jnp.maximum(row @ x, 0) @ h
        hidden = hidden - hidden.max(-1, keepdims=True)
        return jnp.tanh(state + jnp.concatenate([hidden, hidden], 1)[:, 1 : D + 1] @ x), hidden.sum()

    return lax.scan(step, xs[0], xs)


def nested(x, h, xs):
    def outer(state, row):
        def inner(state, column):
            return jnp.tanh(column @ x + state), column.sum()

        state, sums = lax.scan(inner, state, row[:, None] * jnp.ones((B, 2, 1)))
        return jnp.tanh(state @ h + row[:2] @ x), sums

    return lax.scan(outer, jnp.zeros((2, D)), xs)


def in_checkpoint(x, h, xs):
    return jax.checkpoint(recurrent())(x, h, xs)


def checkpointed_beside(x, h, xs):
    def step(state, row):
        return jax.checkpoint(lambda s: jnp.tanh(s @ h))(state) + row @ x, None

    return lax.scan(step, xs[0], xs)


def mapped(x, h, xs):
    return lax.map(lambda row: jnp.tanh(row @ x) @ h, xs)


def with_keys(x, h, xs):
    keys = jax.random.split(jax.random.key(0), T)

    def step(state, slices):
        row, key = slices
        return jnp.tanh(row @ x + state + jax.random.normal(key, (B, D), state.dtype)), None

    return lax.scan(step, xs[0], (xs, keys))


def covariance(x, h, xs):
    """Sums of two products, of slices and of what the loop computes, beside a recurrence."""

    def step(state, row):
        total, carry, moments = state
        carry = jnp.tanh(row @ x + carry @ h)
        moments = moments + jnp.einsum("bd,be->de", row, row)
        return (jnp.einsum("bd,be->ed", carry, row) + total, carry, moments), carry.sum()

    return lax.scan(step, (x, xs[0], jnp.zeros((D, D))), xs, reverse=True)


def batched_sum(x, h, xs):
    def step(total, slices):
        one, two = slices
        return total + jnp.einsum("bd,bd->b", jnp.sin(one), two), None

    return lax.scan(step, xs[0, :, 0], (xs, xs + 1))


def sums_of_one_operand(x, h, xs):
    """Both sums transpose the same state, and the loop returns it, too."""

    def step(state, row):
        carry, one, two = state
        new = jnp.tanh(carry @ x + row)
        return (new, one + carry.T @ new, two + carry.T @ row), carry

    return lax.scan(step, (xs[0], x, h), xs)


def joined(x, h, xs):
    """Haiku's way: input and state are joined, and multiplied by one weight."""

    def step(state, row):
        gates = jnp.concatenate([jnp.sin(row), state, row], -1) @ jnp.concatenate([x, h, x - 1])
        return jnp.tanh(gates + (jnp.concatenate([x, h], 1) @ jnp.concatenate([row, state], 1).T).T), None

    return lax.scan(step, xs[0], xs)


def output_layer(x, h, xs):
    """Results from the carry: a product, and all that is computed from it; the state and slices are results, too."""

    def step(state, row):
        state = jnp.tanh(row + state @ h)
        logits = jnp.tanh(state) @ x + row
        return state, (jax.nn.log_softmax(logits), logits.sum(), row * 2, state)

    return lax.scan(step, xs[0], xs, reverse=True)


def nested_output_layers(x, h, xs):
    """The inner loop's results leave the outer one, too: a product, and a look-up in each row of it."""

    def outer(state, row):
        def inner(state, column):
            state = jnp.tanh(state @ h + column)
            return state, jnp.take_along_axis((state * 2) @ x, jnp.array([[0, 2, 5], [-1, 0, 0]]), 1, mode="clip")

        state, results = lax.scan(inner, state, row[:, None] * jnp.ones((B, 2, 1)))
        return state, results @ h

    return lax.scan(outer, jnp.zeros((2, D)), xs)


LABELS = np.random.default_rng(0).integers(-5, 6, (T, B), "int32")  # some lie outside of D


def decoder(x, h, xs):
    """Every step embeds tokens, looks up labels' logits, and adds up a loss by one-hot rows."""

    def step(carry, slices):
        (state, total), (row, label) = carry, slices
        state = jnp.tanh(row + state @ h + x.at[label].get(mode="promise_in_bounds"))
        logits = state @ x
        total = jax.nn.logsumexp(logits) - (logits * jax.nn.one_hot(label, D)).sum() + total
        return (state, total), jnp.take_along_axis(logits, label[:, None], 1, mode="fill")

    return lax.scan(step, (xs[0], x[0, 0]), (xs, jnp.asarray(LABELS)))


def embedded_and_joined(x, h, xs):
    """Rows of a table that every step joins, and joins with the state."""

    def step(state, labels):
        weight = jnp.concatenate([x, h])
        rows = jnp.take(weight, labels, 0, mode="clip")
        return jnp.tanh(jnp.concatenate([rows, state], 1) @ weight), None

    return lax.scan(step, xs[0], jnp.asarray(LABELS))


CASES = {
    "recurrent": (recurrent(), {PRODUCTS.name: 1}),
    "reverse": (recurrent(reverse=True), {PRODUCTS.name: 1}),
    "unrolled by a factor": (recurrent(unroll=2), {PRODUCTS.name: 1}),
    "invariant": (invariant, {INVARIANTS.name: 1}),
    "without slices": (without_slices, {INVARIANTS.name: 1}),
    "several slices": (several_slices, {PRODUCTS.name: 1}),
    "right operand": (right_operand, {PRODUCTS.name: 1}),
    "chained": (chained, {PRODUCTS.name: 1}),
    "nested": (nested, {PRODUCTS.name: 3}),
    "in a checkpoint": (in_checkpoint, {PRODUCTS.name: 1}),
    "a checkpoint beside": (checkpointed_beside, {PRODUCTS.name: 1}),
    "mapped": (mapped, {PRODUCTS.name: 1}),
    "sums of products": (covariance, {PRODUCTS.name: 1, SUMS.name: 1}),
    "sum of batched products": (batched_sum, {SUMS.name: 1}),
    "sums of one operand": (sums_of_one_operand, {SUMS.name: 1}),
    "joined": (joined, {JOINED.name: 1, PRODUCTS.name: 1, INVARIANTS.name: 1}),
    "with keys": (with_keys, {PRODUCTS.name: 1}),
    "output layer": (output_layer, {RESULTS.name: 1}),
    "nested output layers": (nested_output_layers, {RESULTS.name: 3, INVARIANTS.name: 2}),
    "look-ups": (decoder, {LOOK_UPS.name: 1, RESULTS.name: 1}),
    "embedded and joined": (embedded_and_joined, {INVARIANTS.name: 1, LOOK_UPS.name: 1, JOINED.name: 1, PRODUCTS.name: 1}),
}


def together(captured):
    """Return the rewriting by all rules wherever they apply."""
    path, _ = everywhere(captured.body, OTHER_RULES)
    assert path
    return loop_rewriting(captured, path)


def run(body, arguments):
    return run_body(body, arguments, [()] * len(body.inputs), [()] * len(body.outputs), ())


def total(body):
    """Return the sum of sines of all floating results of a program, as a function."""
    return lambda *a: sum(jnp.sin(y).sum() for y in run(body, a) if jnp.issubdtype(y.dtype, jnp.floating))


@pytest.mark.parametrize("name", one_in(2, CASES))
def test_values_and_gradients_are_the_same_and_the_result_is_derived(name):
    fn, counts = CASES[name]
    with jax.enable_x64(True):
        arguments = arrays(W)
        captured = capture(fn, *arguments, argnums=(0, 1, 2))
        rewriting = together(captured)
        assert {rule.name: n for rule, n in rewriting.applied.items()} == counts
        rewriting.check()
        before, after = captured.body, rewriting.after.body
        for a, b in zip(run(after, arguments), run(before, arguments), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-13, atol=1e-14)
        gradients = (jax.grad(total(body), argnums=(0, 1, 2))(*arguments) for body in (after, before))
        for a, b in zip(*gradients, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("fn", [recurrent(), recurrent(reverse=True), several_slices, chained, nested])
def test_no_rule_applies_after_all_that_do(fn):
    captured = capture(fn, *arrays(W, "float32"))
    after = together(captured).after
    assert not any(applicable(after.body, rule) for rule in OTHER_RULES)


@pytest.mark.parametrize("reverse", [False, True], ids=["constant first", "carry first"])
def test_of_scans_with_equal_steps_those_change_to_which_a_rule_applies(reverse):
    """Both steps multiply their two inputs; the first one is a constant of one loop, and the carry of the other."""

    def constant(x, xs):
        return lax.map(lambda row: x @ row, xs)

    def carried(x, xs):
        return lax.scan(lambda state, row: (state @ row, None), x, xs)[0]

    order = [constant, carried][:: -1 if reverse else 1]
    captured = capture(lambda x, xs: [loop(x, xs) for loop in order], *arrays([(D, D), (T, D, D)], "float32"))
    assert len({ScanParts.of(scan).step.key for scan in scans(captured.body)}) == 1
    rewriting = together(captured)
    rewriting.check()
    assert {rule.name: n for rule, n in rewriting.applied.items()} == {PRODUCTS.name: 1}


def test_the_loop_reads_neither_the_slices_nor_the_weight_of_the_product():
    captured = capture(recurrent(), *arrays(W, "float32"))
    (scan,) = scans(together(captured).after.body)
    parts = ScanParts.of(scan)
    assert [e.name for e in parts.step.equations].count("dot_general") == 1
    assert len(parts.fixed) == len(parts.slices) == 1
    assert [n.kind for n in together(captured).after.graph.nodes if n.kind in ("dot_general", "scan")] == ["dot_general", "scan"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_bias_leaves_the_loop_with_its_product_unless_it_is_rounded(dtype):
    def fn(x, bias, xs):
        def step(state, row):
            return jnp.tanh(state + (row @ x.astype(dtype) + bias.astype(dtype)).astype(state.dtype)), None

        return lax.scan(step, jnp.zeros((B, D)), xs)

    captured = capture(fn, *arrays([(D, D), (D,)], "float32"), *arrays([(T, B, D)], dtype))
    rewriting = together(captured)
    rewriting.check()
    (scan,) = scans(rewriting.after.body)
    parts = ScanParts.of(scan)
    assert len(parts.slices) == 1
    assert len(parts.fixed) == (dtype == "bfloat16")


def test_an_output_layer_runs_once_for_all_steps():
    captured = capture(output_layer, *arrays(W, "float32"))
    (scan,) = scans(together(captured).after.body)
    parts = ScanParts.of(scan)
    assert [e.name for e in parts.step.equations].count("dot_general") == 1
    assert len(parts.fixed) == 1
    assert len(scan.results) == 1 + 2 + 1  # the carry, two results, and the product's operand; the slices are there already


def test_factors_of_sums_are_emitted_once_and_not_beside_an_equal_result():
    """Both sums transpose the state, which is a result already. The loop emits its transpose, and the new state."""
    captured = capture(sums_of_one_operand, *arrays(W, "float32"))
    rewriting = together(captured)
    rewriting.check()
    (scan,) = scans(rewriting.after.body)
    assert len(scan.results) == 1 + 1 + 2  # the carry, the result, and both factors
    assert [e.name for e in ScanParts.of(scan).step.equations].count("transpose") == 1

    def returned(x, xs):
        """A factor is a result of the loop."""

        def step(total, row):
            factor = jnp.sin(row)
            return total + factor.T @ row, factor

        return lax.scan(step, x, xs)

    captured = capture(returned, *arrays([(D, D), (T, B, D)], "float32"))
    rewriting = together(captured)
    rewriting.check()
    (scan,) = scans(rewriting.after.body)
    assert len(scan.results) == 2  # the result, and the transposed factor


def test_products_of_bfloat16_round_as_in_the_loop():
    def fn(x, xs):
        def step(state, row):
            return state + lax.dot(row, x.astype("bfloat16"), preferred_element_type="float32"), row @ x.astype("bfloat16")

        return lax.scan(step, jnp.zeros((B, D)), xs)

    arguments = arrays([(D, D)], "float32") + arrays([(T, B, D)], "bfloat16")
    captured = capture(fn, *arguments)
    rewriting = together(captured)
    rewriting.check()
    for a, b in zip(run(rewriting.after.body, arguments), run(captured.body, arguments), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a, "float32"), np.asarray(b, "float32"))


def carried_product(x, h, xs):
    return lax.scan(lambda state, row: (jnp.tanh(state @ row.T) @ row, None), xs[0], xs)


def read_sum(x, h, xs):
    """The sum of products is read in every step: state of a linear attention."""
    return lax.scan(lambda s, row: (s + jnp.tanh(row @ s).T @ row, None), jnp.zeros((D, D)), xs)


def narrow_joined(x, h, xs):
    """In bfloat16, the two products would be rounded each."""

    def step(state, row):
        return jnp.tanh(jnp.concatenate([row, state], 1) @ x.astype("bfloat16").repeat(2, 0)), None

    return lax.scan(step, xs[0].astype("bfloat16"), xs.astype("bfloat16"))


def half_precision(x, h, xs):
    xs = xs.astype("float16")
    return lax.scan(lambda state, row: (state + row @ x.astype("float16"), None), xs[0], xs)


def rounded_weight(x, h, xs):
    """The gradient of a product of weights would be summed over the steps in bfloat16."""
    return lax.scan(lambda s, _: ((s + s @ (x @ h).astype("bfloat16").astype(s.dtype)), None), xs[0], None, length=2)


def rounded_product(x, h, xs):
    def step(state, _):
        return state + (state.astype("bfloat16") @ (x.astype("bfloat16") * 2)).astype(state.dtype), None

    return lax.scan(step, xs[0], None, length=2)


def random_in_the_loop(x, h, xs):
    def step(state, key):
        return state + jax.random.normal(key, (B, D)) @ x, None

    return lax.scan(step, xs[0], jax.random.split(jax.random.key(0), T))


def in_remat(x, h, xs):
    return lax.scan(jax.checkpoint(lambda state, row: (jnp.tanh(row @ x + state @ h), None)), xs[0], xs)


def of_one_position(x, h, xs):
    """A product that XLA fuses like a sum."""
    return lax.scan(lambda state, row: (jnp.sin(state) + row[0] @ row[1], None), jnp.zeros(()), xs)


def no_steps(x, h, xs):
    """The gradient of `log(0)`, which no step computes, is zero."""
    return lax.scan(lambda state, row: (state @ jnp.log(x - x) + row @ h, None), xs[0], xs[:0])


def sorted_results(x, h, xs):
    """A product waits for no step, but no lemma is about what is computed from it."""
    return lax.scan(lambda state, row: (jnp.tanh(state + row), jnp.sort(jnp.tanh(state) @ x)), xs[0], xs)


def result_twice(x, h, xs):
    """A result is the next carry."""

    def step(state, row):
        state = jnp.tanh(state @ x) + row
        return state, state

    return lax.scan(step, xs[0], xs)


def rounded_table(x, h, xs):
    """The gradient of the table would be summed over the steps in bfloat16."""
    return lax.scan(lambda s, t: (s + x.astype("bfloat16")[t].astype(s.dtype), None), xs[0], jnp.asarray(LABELS))


def rounded_table_at_results(x, h, xs):
    """No step waits for the look-up, whose indices follow from a product; the gradient of the table would be summed likewise."""

    def step(state, row):
        state = jnp.tanh(state + row)
        chosen = (state @ h > 0).astype("int32")[:, 0]
        return state, x.astype("bfloat16")[chosen]

    return lax.scan(step, xs[0], xs)


def rounded_bias_before_a_product(x, h, xs):
    def step(state, row):
        product = (row.astype("bfloat16") + h.astype("bfloat16")[0]) @ x.astype("bfloat16")
        return jnp.tanh(state + product.astype(state.dtype)), None

    return lax.scan(step, xs[0], xs)


def rounded_bias_of_an_output_layer(x, h, xs):
    def step(state, row):
        state = jnp.tanh(state / 2 + row)
        return state, state.astype("bfloat16") @ x.astype("bfloat16") + h.astype("bfloat16")[0]

    return lax.scan(step, xs[0], xs)


def sorted_look_up(x, h, xs):
    """Indices are sorted in each step alone."""
    indices = jnp.asarray(np.sort(LABELS, 1))
    return lax.scan(lambda s, t: (s + x.at[t].get(mode="clip", indices_are_sorted=True), None), xs[0], indices)


def carried_table(x, h, xs):
    return lax.scan(lambda s, t: (jnp.tanh(s[t] @ x), None), xs[0], jnp.asarray(LABELS))


def narrow_total(x, h, xs):
    """Each step rounds the sum."""

    def step(carry, row):
        state, total = carry
        return (jnp.tanh(state + row), total + (state @ x).sum().astype("bfloat16")), None

    return lax.scan(step, (xs[0], jnp.bfloat16(0)), xs)


STAYING = [carried_product, read_sum, narrow_joined, half_precision, rounded_product, random_in_the_loop, in_remat, of_one_position]
STAYING += [
    no_steps,
    sorted_results,
    result_twice,
    rounded_table,
    rounded_table_at_results,
    rounded_bias_before_a_product,
    rounded_bias_of_an_output_layer,
    sorted_look_up,
    carried_table,
    narrow_total,
]


@pytest.mark.parametrize("fn", STAYING, ids=lambda fn: fn.__name__)
def test_what_may_not_be_moved_stays_in_the_loop(fn):
    captured = capture(fn, *arrays(W, "float32"))
    assert everywhere(captured.body, OTHER_RULES) == ((), captured.body)


@pytest.mark.parametrize("fn", [rounded_bias_before_a_product, rounded_bias_of_an_output_layer])
def test_the_gradient_of_a_rounded_bias_is_not_summed_over_the_steps_in_its_type(fn):
    """Every step's contribution is rounded, but their sum is not: 1/256 is the distance of 1 to the next number of bfloat16."""
    arguments = arrays([(D, D), (D, D), (300, B, D)], "float32")
    captured = capture(fn, *arguments, argnums=(0, 1))
    _, after = everywhere(captured.body, OTHER_RULES)

    def loss(body):
        return lambda *a: sum((y.astype("float32") * (1 + jnp.arange(D) / 64)).sum() for y in run(body, a))

    new, old = (jax.grad(loss(body), argnums=1)(*arguments)[0] for body in (after, captured.body))
    np.testing.assert_allclose(new, old, rtol=1 / 256)


def test_a_product_of_weights_moves_and_its_conversion_stays():
    captured = capture(rounded_weight, *arrays(W, "float32"))
    (scan,) = scans(together(captured).after.body)
    assert [e.name for e in ScanParts.of(scan).step.equations].count("convert_element_type") == 2


def test_what_a_callback_observes_stays_the_same():
    def fn(x, xs):
        def step(state, row):
            y = row @ x
            jax.debug.print("{}", y[0, 0])
            return state + y, None

        return lax.scan(step, jnp.zeros((B, D)), xs)[0]

    arguments = arrays([(D, D), (T, B, D)], "float32")
    captured = capture(fn, *arguments)
    result, *observed = run(together(captured).after.body, arguments)
    assert len(observed) == 1  # the captured program returns what is printed
    for a, b in zip([result, *observed], run(captured.body, arguments), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
