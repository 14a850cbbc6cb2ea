"""The proof of rules of loops: the induction, the lemmas about single steps, and the check of derived programs."""

from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import one_in
from jax import lax

from unity.base.errors import DerivationError
from unity.pcg.capture.capture import capture
from unity.pcg.ir.program import close
from unity.substitutions.language.loop_rules import FUNCTIONS, LANES, PRODUCT_OF_JOINED, STEPPED, SUM_OVER_STEPS
from unity.verify.derivations.loops import check_loops
from unity.verify.derivations.nodes import NodeStore
from unity.verify.derivations.single_steps import READERS, SAME, single_step
from unity.verify.proofs.loop_rules import EqualSteps, induction, lemma_verdicts, proves, step_lemmas

T, B, D = 5, 4, 3
ARGUMENTS = jnp.ones((D, D)), jnp.ones((D, D)), jnp.ones((T, B, D))


def test_equal_steps_make_equal_loops_by_induction():
    assert [answer for _, answer in induction()] == ["proved"] * 5


def test_the_assumptions_of_the_induction_prove_nothing_false():
    loops = EqualSteps()
    assert proves(loops.c(loops.k) == loops.c(loops.k + 1), loops.assumptions) == "unknown"


def test_every_lemma_is_proved_or_not_expressible_and_every_moved_primitive_has_one():
    statuses = {v.rule.name: v.status for v in lemma_verdicts()}
    assert {name for name, status in statuses.items() if status != "proved"} == {"step-of-reshape"}
    assert statuses["step-of-reshape"] == "not expressible"
    named = {*FUNCTIONS, *(lemma for lemmas in STEPPED.values() for lemma in lemmas), SUM_OVER_STEPS, PRODUCT_OF_JOINED, *LANES}
    assert named == {rule.name for rule in step_lemmas()}


def test_every_moved_primitive_has_a_reader_of_its_own():
    assert STEPPED.keys() <= READERS.keys() | SAME


X, Y = (4, 3, 2), (4, 2, 5)


def indices(*shape):
    return jax.ShapeDtypeStruct(shape, "int32")


APPLICATIONS = {
    "function": (jnp.sin, X),
    "functions of two": (lambda x, y: x * y - x, X, X),
    "repeated rows": (lambda x, y: lax.max(x, lax.broadcast_in_dim(y, X, (1, 2))), X, (3, 2)),
    "dimension of size 1": (lambda x, y: x + lax.broadcast_in_dim(y, (1, 3, 2), (1, 2)), X, (3, 2)),
    "select": (lambda x, y: jnp.where(x > 0, x, y), X, X),
    "select by a scalar": (lambda x, y: lax.select(y > 0, x, -x), X, ()),
    "clamp": (lambda x: lax.clamp(-0.5, x, 0.5), X),
    "convert": (lambda x: x.astype("float16"), X),
    "stopped gradient": (lax.stop_gradient, X),
    "broadcast": (lambda x: lax.broadcast_in_dim(x, (4, 7, 3, 2), (0, 2, 3)), X),
    "transpose": (lambda x: jnp.transpose(x, (2, 0, 1)), X),
    "reshape": (lambda x: x.reshape(4, 6), X),
    "reshape of inner dimensions": (lambda x: x.reshape(2, 2, 3, 2), X),
    "new dimension": (lambda x: x.reshape(4, 1, 3, 2), X),
    "squeeze": (lambda x: lax.squeeze(x, (1,)), (4, 1, 3)),
    "dot": (lambda x, y: jnp.einsum("abc,cd->abd", x, y), X, (2, 3)),
    "dot on the right": (lambda x, y: jnp.einsum("cd,abc->dab", y, x), X, (2, 3)),
    "batched dot": (lambda x, y: jnp.einsum("abc,acd->abd", x, y), X, Y),
    "batched dot of inner dimensions": (lambda x, y: jnp.einsum("abc,bdc->bad", x, y), X, (3, 5, 2)),
    "sum": (lambda x: x.sum(1), X),
    "maximum": (lambda x: x.max((0, 2)), X),
    "minimum": (lambda x: x.min(0), X),
    "concatenation": (lambda x, y: lax.concatenate([x, y], 2), X, (4, 3, 5)),
    "split": (lambda x: lax.split(x, (1, 2), 1)[1], X),
    "slice": (lambda x: x[:, 1:, ::2], X),
    "stack": (lambda x, y: jnp.stack([x, y], 1), X, X),
    "unstack": (lambda x: jnp.unstack(x, axis=1)[1], X),
    "comparison": (lambda x, y: x < y, X, X),
    "columns of a table": (lambda x, i: jnp.take(x, i, 1, mode="clip"), (4, 3, 2), indices(5)),
    "labels": (jax.vmap(lambda x, i: jnp.take(x, i, 0, mode="clip"), (1, 0), 1), (4, 3), indices(3, 5)),
    "windows": (lambda x, i: jax.vmap(lambda i: lax.dynamic_slice(x, (i, i), (2, 1)))(i), (4, 3), indices(2)),
}


@pytest.mark.parametrize("name", one_in(2, APPLICATIONS))
def test_a_single_step_is_that_of_all_steps(name):
    """Runs every equation, and its single step along every dimension that has one, on random numbers."""
    fn, *shapes = APPLICATIONS[name]
    rng, dims = np.random.default_rng(2), 0
    body = close(jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(s, "float32") if isinstance(s, tuple) else s for s in shapes)))
    values = {v: jnp.asarray(3 * rng.normal(size=body.tensors[v].shape), body.tensors[v].dtype) for v in body.inputs}

    def run(e, params, operands):
        out = e.primitive.bind(*operands, **params)
        return out if e.primitive.multiple_results else [out]

    for e in body.equations:
        operands = [values[a] if isinstance(a, int) else jnp.asarray(a.value, a.tensor.dtype) for a in e.operands]
        results = run(e, e.params, operands)
        values.update(zip(e.results, results, strict=True))
        for d in range(results[0].ndim):
            step = single_step(e, body, d)
            if step is None:
                continue
            dims += 1
            for t in range(results[0].shape[d]):
                one = [x if k is None else x.take(min(t, x.shape[k] - 1), k) for x, k in zip(operands, step.dims, strict=True)]
                for a, b in zip(run(e, step.params, one), results, strict=True):
                    np.testing.assert_allclose(np.asarray(a, "float32"), np.asarray(b.take(t, d), "float32"), rtol=1e-6)
    assert dims


def loop(product, *, start=jnp.zeros, reverse=False, function=jnp.tanh, weight=lambda x, h: h):
    """A recurrent loop whose inputs are multiplied before it."""

    def fn(x, h, xs):
        def step(state, row):
            return function(row + state @ weight(x, h)), state

        return lax.scan(step, start((B, D)), product(x, h, xs), reverse=reverse)

    return fn


def inside(x, h, xs):
    return lax.scan(lambda state, row: (jnp.tanh(row @ x + state @ h), state), jnp.zeros((B, D)), xs)


RIGHT = {
    "matmul": lambda x, h, xs: xs @ x,
    "vmap": lambda x, h, xs: jax.vmap(lambda row: row @ x)(xs),
    "transposed": lambda x, h, xs: (xs.transpose(2, 0, 1).transpose(1, 2, 0) @ x).transpose(2, 0, 1).transpose(1, 2, 0),
}
WRONG = {
    "another weight": loop(lambda x, h, xs: xs @ h),
    "transposed weight": loop(lambda x, h, xs: xs @ x.T),
    "other slices": loop(lambda x, h, xs: (xs + 1) @ x),
    "steps in another order": loop(lambda x, h, xs: xs[::-1] @ x),
    "steps shifted": loop(lambda x, h, xs: jnp.concatenate([xs[1:], xs[:1]]) @ x),
    "another direction": loop(lambda x, h, xs: xs @ x, reverse=True),
    "another start": loop(lambda x, h, xs: xs @ x, start=jnp.ones),
    "another step": loop(lambda x, h, xs: xs @ x, function=jnp.sin),
    "another recurrent weight": loop(lambda x, h, xs: xs @ x, weight=lambda x, h: x),
    "a sum over the steps": loop(lambda x, h, xs: (xs - xs.mean(0)) @ x),
    "results in another order": lambda x, h, xs: loop(lambda x, h, xs: xs @ x)(x, h, xs)[::-1],
    "no loop": lambda x, h, xs: (jnp.zeros((B, D)), jnp.zeros((T, B, D))),
}


@pytest.mark.parametrize("product", RIGHT.values(), ids=RIGHT)
def test_what_people_write_by_hand_is_derived(product):
    before, after = (capture(fn, *ARGUMENTS).body for fn in (inside, loop(product)))
    check_loops(before, after)
    check_loops(before, before)


@pytest.mark.parametrize("fn", WRONG.values(), ids=WRONG)
def test_a_program_that_computes_something_else_is_refused(fn):
    before, after = (capture(f, *ARGUMENTS).body for f in (inside, fn))
    with pytest.raises(DerivationError):
        check_loops(before, after)


def output_layer(after):
    """A loop that returns its states, and a function of them after it, or of each in it."""

    def fn(inside, x, h, xs):
        def step(state, row):
            state = jnp.tanh(row + state @ h)
            return state, (inside(state, x), state)

        return lax.scan(step, xs[0], xs)

    def one(x, h, xs):
        return fn(lambda state, x: jnp.exp(state @ x).sum(-1), x, h, xs)

    def other(x, h, xs):
        last, (_, states) = fn(lambda state, x: None, x, h, xs)
        return last, (after(states, x, h), states)

    return [capture(f, *ARGUMENTS).body for f in (one, other)]


def test_an_output_layer_for_all_steps_is_derived_and_another_one_is_refused():
    check_loops(*output_layer(lambda states, x, h: jnp.exp(states @ x).sum(-1)))
    wrong = [
        lambda states, x, h: jnp.exp(states @ h).sum(-1),
        lambda states, x, h: jnp.exp(states[::-1] @ x).sum(-1),
        lambda states, x, h: jnp.exp((states - states.mean(0)) @ x).sum(-1),
        lambda states, x, h: jnp.exp(states[:1] @ x).sum(-1).repeat(states.shape[0], 0),
        lambda states, x, h: jnp.sin(states @ x).sum(-1),
        lambda states, x, h: jnp.exp(states @ x.T).sum(-1),
        lambda states, x, h: jnp.exp(jnp.roll(states, 1, 0) @ x).sum(-1),
    ]
    for after in wrong:
        with pytest.raises(DerivationError):
            check_loops(*output_layer(after))


def labelled(look_up):
    """A loop that returns the element of a label in every step, or all elements for a look-up after it."""
    labels = jnp.arange(T * B).reshape(T, B) % (D + 2)

    def fn(x, h, xs):
        def step(state, slices):
            row, label = slices
            state = jnp.tanh(row + state @ h)
            return state, jnp.take_along_axis(state @ x, label[:, None], 1) if look_up is None else state

        last, states = lax.scan(step, xs[0], (xs, labels))
        return last, states if look_up is None else look_up(states @ x, labels[..., None])

    return capture(fn, *ARGUMENTS).body


def test_a_look_up_of_labels_for_all_steps_is_derived_and_another_one_is_refused():
    check_loops(labelled(None), labelled(lambda logits, labels: jnp.take_along_axis(logits, labels, 2)))
    wrong = [
        lambda logits, labels: jnp.take_along_axis(logits, labels[::-1], 2),
        lambda logits, labels: jnp.take_along_axis(logits[::-1], labels, 2),
        lambda logits, labels: jnp.take_along_axis(logits, labels[:1].repeat(T, 0), 2),
        lambda logits, labels: jnp.take_along_axis(logits, labels[:, ::-1], 2),
        lambda logits, labels: jnp.take_along_axis(logits, labels, 2, mode="clip"),
        lambda logits, labels: jnp.take_along_axis(logits, labels + 0, 2),
        lambda logits, labels: jnp.take_along_axis(logits, labels, 1)[:, :, :1],
    ]
    for after in wrong:
        with pytest.raises(DerivationError):
            check_loops(labelled(None), labelled(after))


def added_up(sum_after=None, arguments=None):
    """A loop that adds up a function of an output layer, or returns its states for a sum after it."""

    def fn(x, h, xs):
        def step(carry, row):
            state = jnp.tanh(row + carry[0] @ h)
            return (state, *(jnp.exp(state @ x).sum(-1) + total for total in carry[1:])), state

        start = jnp.sin(x[0, 0]) * jnp.ones(B)
        (last, *totals), states = lax.scan(step, (xs[0], start) if sum_after is None else (xs[0],), xs)
        return last, totals[0] if sum_after is None else sum_after(start, states, x)

    return capture(fn, *(arguments or ARGUMENTS)).body


def test_a_sum_over_steps_of_an_output_layer_is_derived_and_another_one_is_refused():
    check_loops(added_up(), added_up(lambda start, states, x: start + jnp.exp(states @ x).sum(-1).sum(0)))
    wrong = [
        lambda start, states, x: jnp.exp(states @ x).sum(-1).sum(0),
        lambda start, states, x: start + start + jnp.exp(states @ x).sum(-1).sum(0),
        lambda start, states, x: start + jnp.sin(states @ x).sum(-1).sum(0),
        lambda start, states, x: start + jnp.exp(states[1:] @ x).sum(-1).sum(0),
        lambda start, states, x: start + jnp.exp(states @ x)[0].sum(-1),
        lambda start, states, x: start + jnp.exp((states @ x).sum(0)).sum(-1),
    ]
    for after in wrong:
        with pytest.raises(DerivationError):
            check_loops(added_up(), added_up(after))


def accumulators(in_loop, *, factor=lambda k: k + 1, start=lambda k: 0.0):
    """A loop that adds up some of 16 functions of its state, while the others are added up after it."""

    def fn(x, h, xs):
        def step(carry, row):
            state, totals = jnp.tanh(row + carry[0] @ h), carry[1:]
            jnp.sin(totals[0])  # which no result needs
            return (state, *(t + jnp.sin(factor(k) * state) for k, t in zip(in_loop, totals, strict=True))), state

        starts = [jnp.full((B, D), start(k)) for k in range(16)]
        (last, *totals), states = lax.scan(step, (xs[0], *(starts[k] for k in in_loop)), xs)
        known = dict(zip(in_loop, totals, strict=True))
        return last, *(known[k] if k in known else starts[k] + jnp.sin(factor(k) * states).sum(0) for k in range(16))

    return capture(fn, *ARGUMENTS).body


def test_the_sums_that_left_a_loop_are_told_from_those_that_stay_by_their_values():
    before, after = accumulators(range(16)), accumulators(range(8))
    with patch.object(NodeStore, "unarranged", autospec=True, side_effect=NodeStore.unarranged) as values:
        check_loops(before, after)
    assert values.call_count < 1000  # there are 12,870 choices of 8 sums
    check_loops(before, accumulators([1, 4, 5, 15]))
    wrong = [
        accumulators(range(8), factor=lambda k: k + 2),
        accumulators(range(8), factor=lambda k: k + 1 + (k == 7)),
        accumulators(range(8), factor=lambda k: k + 1 + (k == 8)),
        accumulators(range(8), start=lambda k: float(k == 7)),
        accumulators(range(8), start=lambda k: float(k == 8)),
    ]
    for other in wrong:
        with pytest.raises(DerivationError):
            check_loops(before, other)
    with pytest.raises(DerivationError):
        check_loops(after, before)


def test_a_sum_over_steps_in_float64_is_derived_in_any_context():
    with jax.enable_x64(True):
        wide = [jnp.zeros(a.shape, "float64") for a in ARGUMENTS]
        bodies = added_up(None, wide), added_up(lambda start, states, x: start + jnp.exp(states @ x).sum(-1).sum(0), wide)
    check_loops(*bodies)


def two_states(state, *, last=lambda a, b: (a, b), inside=True):
    """A loop of two carries of one type, with an output layer in its step or after it, on a carry before or after a step."""
    when, k = state

    def fn(x, h, xs):
        def step(carry, row):
            a, b = carry
            new = jnp.tanh(row + a @ h), jnp.sin(row + a + b)
            value = {"old": carry, "new": new}[when][k]
            return new, jnp.exp(value @ x) if inside else value

        carry, values = lax.scan(step, (xs[0], xs[1]), xs)
        return last(*carry), values if inside else jnp.exp(values @ x)

    return capture(fn, *ARGUMENTS).body


STATES = {f"{when} {name}": (when, k) for when in ("old", "new") for k, name in enumerate("ab")}


@pytest.mark.parametrize("state", STATES)
def test_an_output_layer_reads_its_own_carry_at_its_own_step(state):
    before = two_states(STATES[state])
    check_loops(before, two_states(STATES[state], inside=False))
    wrong = [two_states(other, inside=False) for name, other in STATES.items() if name != state]
    wrong.append(two_states(STATES[state], last=lambda a, b: (b, a), inside=False))
    for after in wrong:
        with pytest.raises(DerivationError):
            check_loops(before, after)


def test_a_value_that_is_read_twice_is_derived_once():
    """Otherwise the time would double with each of these, and the planning of a deep network in a loop would not end."""

    def deep(y):
        for _ in range(30):
            y = jnp.sin(y) + jnp.cos(y)
        return y

    def before(x, h, xs):
        return lax.scan(lambda state, row: (jnp.tanh(deep(row) @ x + state @ h), state), jnp.zeros((B, D)), xs)

    check_loops(*(capture(fn, *ARGUMENTS).body for fn in (before, loop(lambda x, h, xs: deep(xs) @ x))))


def moments(x, h, xs):
    return lax.scan(lambda s, row: (s + jnp.einsum("bd,be->de", jnp.sin(row), row), row.sum()), x, xs)


def summed(contract, *, start=lambda x: x, emit=jnp.sin, reverse=False):
    """A loop that emits an operand of the products, and their sum after it."""

    def fn(x, h, xs):
        _, (sums, rows) = lax.scan(lambda _, row: ((), (row.sum(), emit(row))), (), xs, reverse=reverse)
        return start(x) + contract(rows, xs), sums

    return fn


OVER_ALL = "tbd,tbe->de"


def test_a_sum_of_products_over_steps_is_derived():
    check_loops(*(capture(fn, *ARGUMENTS).body for fn in (moments, summed(lambda a, b: jnp.einsum(OVER_ALL, a, b)))))


def test_a_result_of_the_loop_may_be_an_operand_of_the_sum_after_it():
    def before(x, h, xs):
        return lax.scan(lambda s, row: (s + jnp.einsum("bd,be->de", jnp.sin(row), row), (jnp.sin(row), row)), x, xs)

    def after(contract):
        def fn(x, h, xs):
            _, (rows, same) = lax.scan(lambda _, row: ((), (jnp.sin(row), row)), (), xs)
            return x + contract(rows, same), (rows, same)

        return fn

    check_loops(*(capture(fn, *ARGUMENTS).body for fn in (before, after(lambda a, b: jnp.einsum(OVER_ALL, a, b)))))
    with pytest.raises(DerivationError):
        check_loops(*(capture(fn, *ARGUMENTS).body for fn in (before, after(lambda a, b: jnp.einsum(OVER_ALL, b, a)))))


@pytest.mark.parametrize(
    "fn",
    [
        summed(lambda a, b: jnp.einsum("tbd,tbe->ed", a, b)),
        summed(lambda a, b: jnp.einsum(OVER_ALL, a, b[::-1])),
        summed(lambda a, b: jnp.einsum(OVER_ALL, a, a)),
        summed(lambda a, b: jnp.einsum(OVER_ALL, a, b), start=jnp.zeros_like),
        summed(lambda a, b: jnp.einsum(OVER_ALL, a, b), emit=jnp.cos),
        summed(lambda a, b: jnp.einsum(OVER_ALL, a, b), reverse=True),
        summed(lambda a, b: jnp.einsum(OVER_ALL, a[1:], b[1:])),
    ],
)
def test_another_sum_is_refused(fn):
    with pytest.raises(DerivationError):
        check_loops(*(capture(f, *ARGUMENTS).body for f in (moments, fn)))


def joined(weights, *, order=lambda row, state: [row, state]):
    def fn(x, h, xs):
        def step(state, row):
            return jnp.tanh(jnp.concatenate(order(row, state), 1) @ weights(x, h)), state

        return lax.scan(step, jnp.zeros((B, D)), xs)

    return fn


def parts(first, second):
    def fn(x, h, xs):
        w = jnp.concatenate([x, h]) * 2

        def step(state, row):
            return jnp.tanh(row + state @ w[second]), state

        return lax.scan(step, jnp.zeros((B, D)), xs @ w[first])

    return fn


def test_a_product_of_joined_values_is_derived_from_its_parts_in_their_order():
    before = capture(joined(lambda x, h: jnp.concatenate([x, h]) * 2), *ARGUMENTS).body
    check_loops(before, capture(parts(slice(0, D), slice(D, 2 * D)), *ARGUMENTS).body)
    for wrong in (parts(slice(D, 2 * D), slice(0, D)), parts(slice(0, D), slice(0, D))):
        with pytest.raises(DerivationError):
            check_loops(before, capture(wrong, *ARGUMENTS).body)


def test_a_checkpoint_is_checked_inside():
    def checkpointed(fn):
        return capture(lambda *a: jax.checkpoint(fn)(*a), *ARGUMENTS).body

    check_loops(checkpointed(inside), checkpointed(loop(RIGHT["matmul"])))
    with pytest.raises(DerivationError):
        check_loops(checkpointed(inside), checkpointed(WRONG["another weight"]))
