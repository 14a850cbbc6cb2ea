"""Canonical forms have the values of the program, and distinguish everything but layouts."""

import random
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jax import lax
from laid_programs import BINARY, inverse, programs, struct

from unity.pcg.ir.program import program_of, tensor_type
from unity.substitutions.language.promises import promised_rows
from unity.substitutions.language.rearrangement import transposed
from unity.verify.derivations.canonical_form import apply_body, canonical_forms
from unity.verify.derivations.constructors import exchanged
from unity.verify.derivations.nodes import NodeStore, reachable, substituted
from unity.verify.semantics.domains import Plain
from unity.verify.semantics.interpret import interpret


def forms(*programs):
    """Return the outputs of some programs, in one store."""
    store = NodeStore()
    return [canonical_forms(program_of(p)[0], store).outputs for p in programs]


# The meaning of canonical forms


def seen(view, x):
    return x.reshape(view.sizes).transpose(view.permutation).reshape(view.target)


def meaning(outputs, arrays):
    """Evaluate canonical forms in numpy, from their nodes alone."""
    found = {}
    for node in reachable(outputs):
        operands = [seen(x.view, found[x.node]) for x in node.operands]
        found[node] = arrays[node.params[0]] if node.kind == "input" else MEANING[node.kind](node.params, *operands)
        assert found[node].shape == node.shape, node.kind
    return [seen(x.view, found[x.node]) for x in outputs]


MEANING = {
    "function": lambda p, x: {"relu": partial(np.maximum, 0), "sign(x)": np.sign, "neg(x)": np.negative}[p[0]](x),
    "add": lambda p, x, y: x + y,
    "sub": lambda p, x, y: x - y,
    "mul": lambda p, x, y: x * y,
    "broadcast": lambda p, x: np.broadcast_to(x, (p[0], *x.shape)),
    "dot": lambda p, x, y: x @ y,
    "concat": lambda p, *xs: np.concatenate(xs, -1),
    "slice": lambda p, x: x[:, slice(*p)],
    "sum": lambda p, x: x.sum(-1),
    "rows": lambda p, x, ids: x[np.clip(ids, 0, len(x) - 1)],
    "laid": lambda p, x: x,
}


def small(program, seed):
    """Return small whole numbers as arguments, so that nothing is rounded."""
    rng = np.random.default_rng(seed)
    return [rng.integers(-2, 5 if x.dtype == np.int32 else 3, x.shape).astype(x.dtype) for x in program.arguments]


@given(programs(), st.integers(0, 1000), st.integers(0, 1000))
def test_canonical_forms_have_the_values_of_the_program(program, seed, layout):
    """So programs with equal canonical forms compute the same."""
    arrays, traced = small(program, seed), program.traced(random.Random(layout))
    (outputs,) = forms(traced)
    plain = [x.astype(np.float64) if x.dtype == np.float32 else x for x in arrays]
    for found, exact in zip(meaning(outputs, plain), interpret(traced, arrays, Plain(), ()), strict=True):
        assume(np.abs(exact).max(initial=0) < 2**50)
        np.testing.assert_array_equal(found, exact)


def test_relu_is_one_function_whether_or_not_a_gradient_flows():
    """`sign` passes none, and a reshaped operand must not make another function of it."""
    programs = [jax.make_jaxpr(fn)(jnp.ones((2, 3))) for fn in (jax.nn.relu, lambda x: jax.nn.relu(jnp.sign(x)))]
    assert [x.node.params for (x,) in forms(*programs)] == [("relu",)] * 2


@given(programs(), st.integers(0, 1000))
def test_layouts_do_not_matter(program, layout):
    one, other = forms(program.traced(), program.traced(random.Random(layout)))
    assume(not any(symmetric(node) for node in reachable(one)))
    assert one == other


@given(programs(), st.integers(0, 1000))
def test_substituted_arguments_reach_all_their_users(program, seed):
    """The result is as if the program had been applied to the new value, whatever the value's layout."""
    rng, store = random.Random(seed), NodeStore()
    start = canonical_forms(program_of(program.traced(rng))[0], store)
    inputs = [elsewhere(rng, start.values[v], f"other {v}", store) for v in start.body.inputs]
    read = apply_body(store, start.body, inputs)
    assume(not any(symmetric(node) for node in reachable(read.outputs)))
    instead = {start.values[v].node: x for v, x in zip(start.body.inputs, inputs, strict=True)}
    assert substituted(store, start.outputs, instead) == read.outputs


def elsewhere(rng, x, name, store):
    """Return another value of the same type, of a node with another order of dimensions."""
    order = tuple(rng.sample(range(len(x.shape)), len(x.shape)))
    tensor = tensor_type(tuple(x.shape[d] for d in order), x.node.tensor.dtype)
    return store.rearranged(transposed(tensor.shape, inverse(order)), store.unarranged("input", (name,), (), tensor))


def symmetric(node):
    """Return whether a node has several equal views because it repeats elements: which one a value has is not determined."""
    return any(x.node.kind == "broadcast" for x in node.operands) and (
        node.kind not in BINARY or node.operands[0].node.kind == "broadcast"
    )


# Operands that are one node

EXCHANGED = {
    "plus": (lambda x: x + x.T, lambda x: x.T + x),
    "in a circle": (lambda x: x * x.reshape(4, 2, 8).transpose(1, 0, 2).reshape(8, 8), None),
    "itself": (lambda x: x + x, lambda x: x + x),
    "turned": (lambda x: (x + x.T).reshape(2, 4, 8).transpose(1, 0, 2), lambda x: (x.T + x).reshape(2, 4, 8).transpose(1, 0, 2)),
    "minus": (lambda x: x - x.T, None),
    "two": (lambda x: x + jnp.exp(x), None),
    "function": (lambda x: jnp.exp(x + x.T), None),
}


@pytest.mark.parametrize("case", EXCHANGED)
def test_operands_that_are_involutions_of_each_other_can_be_exchanged(case):
    """No other operands can be exchanged."""
    one, other = EXCHANGED[case]
    ((x,), *same) = forms(*(jax.make_jaxpr(fn)(Y) for fn in (one, other) if fn is not None))
    assert exchanged(x) == (same[0][0] if same else None)


# What is the same, and what is not

X, Y, W = struct((4, 6, 8)), struct((8, 8)), struct((8, 2, 4))
V, N = struct((8,)), struct(())
IMAGE, KERNEL = struct((2, 8, 8, 4)), struct((3, 3, 4, 4))
TABLE, IDS = struct((5, 8)), struct((2, 3), "int32")


def conv(x, w, order, stride=1, padding="SAME", **more):
    return lax.conv_general_dilated(x, w, (stride, stride), padding, dimension_numbers=(order, "HWIO", order), **more)


def rows(table, ids, mode="clip", **more):
    numbers = lax.GatherDimensionNumbers((ids.ndim,), (0,), (0,))
    return lax.gather(table, ids[..., None], numbers, (1, table.shape[1]), mode=mode, **more)


SAME = {
    "rearranged": (lambda x: x.transpose(2, 0, 1).reshape(2, 4, 24), lambda x: x.reshape(24, 8).T.reshape(8, 24)
                   .reshape(2, 4, 24), [X]),
    "bias": (lambda x, v: x + v, lambda x, v: (x.reshape(24, 8) + v).reshape(x.shape), [X, V]),
    "bias, one dimension": (lambda x, v: x + v, lambda x, v: v[None, None] + x, [X, V]),
    "bias, repeated": (lambda x, v: x + v, lambda x, v: x + jnp.broadcast_to(v, x.shape), [X, V]),
    "scale": (lambda x, s: x * s, lambda x, s: (s[None] * x.reshape(-1)).reshape(x.shape), [X, N]),
    "number": (lambda x: x * 2.0, lambda x: np.full((1, 1, 1), 2.0, np.float32) * x, [X]),
    "product": (lambda x, w: jnp.einsum("abd,dhk->abhk", x, w), lambda x, w: (x @ w.reshape(8, 8)).reshape(4, 6, 2, 4), [X, W]),
    "contracted in another order": (lambda x, w: jnp.einsum("dhk,abhk->abd", w, jnp.tanh(x).reshape(4, 6, 2, 4)),
                                    lambda x, w: jnp.einsum("dkh,abkh->abd", w.transpose(0, 2, 1),
                                                            jnp.tanh(x).reshape(4, 6, 2, 4).transpose(0, 1, 3, 2)), [X, W]),
    "transposed rows": (lambda x, y: x @ y, lambda x, y: (x.transpose(1, 0, 2) @ y).transpose(1, 0, 2), [X, Y]),
    "joined": (lambda x: jnp.concatenate([x, jnp.tanh(x)], 1),
               lambda x: jnp.concatenate([x.transpose(2, 1, 0), jnp.tanh(x.transpose(2, 1, 0))], 1).transpose(2, 1, 0), [X]),
    "cut": (lambda x: jnp.split(x, 2, axis=1)[1], lambda x: x.transpose(1, 0, 2)[3:].transpose(1, 0, 2), [X]),
    "summed": (lambda x: x.sum((0, 2)), lambda x: x.transpose(2, 1, 0).reshape(8, 24)
               .reshape(8, 6, 4).transpose(1, 0, 2).reshape(6, 32).sum(1), [X]),
    "kept": (lambda x: x.sum(1, keepdims=True), lambda x: x.sum(1)[:, None], [X]),
    "images": (lambda x, w: conv(x, w, "NHWC"),
               lambda x, w: conv(x.transpose(0, 3, 1, 2), w, "NCHW").transpose(0, 2, 3, 1), [IMAGE, KERNEL]),
    "table": (rows, lambda t, i: rows(t, i.T.reshape(-1)).reshape(3, 2, 8).transpose(1, 0, 2), [TABLE, IDS]),
    "commuted": (lambda x: jnp.exp(x) * jnp.tanh(x) + x, lambda x: x + jnp.tanh(x) * jnp.exp(x), [X]),
    "unused": (lambda x: jnp.exp(x), lambda x: (jnp.tanh(x), jnp.exp(x))[1], [X]),
}  # fmt: skip

APART = {
    "sub": (lambda x, y: x - y, lambda x, y: y - x, [Y, Y]),
    "operands": (lambda x, y: x @ y, lambda x, y: y @ x, [Y, Y]),
    "operator": (lambda x, y: x + y, lambda x, y: x * y, [Y, Y]),
    "argument": (lambda x, y: jnp.exp(x), lambda x, y: jnp.exp(y), [Y, Y]),
    "transposed": (lambda x: x, lambda x: x.T, [Y]),
    "shape": (lambda x: x, lambda x: x.reshape(4, 16), [Y]),
    "transposed operand": (lambda x, y: x @ y, lambda x, y: x @ y.T, [Y, Y]),
    "added transposed": (lambda x, y: x + y, lambda x, y: x + y.T, [Y, Y]),
    "axis of a sum": (lambda x: x.sum(0), lambda x: x.sum(1), [Y]),
    "axis of a join": (lambda x: jnp.concatenate([x, x], 0).reshape(-1), lambda x: jnp.concatenate([x, x], 1).reshape(-1), [Y]),
    "order of a join": (lambda x, y: jnp.concatenate([x, y], 1), lambda x, y: jnp.concatenate([y, x], 1), [Y, Y]),
    "bounds": (lambda x: x[2:4], lambda x: x[3:5], [Y]),
    "steps": (lambda x: x[0:4], lambda x: x[0:8:2], [Y]),
    "axis of a bias": (lambda x, v: x + v, lambda x, v: x + v[:, None], [Y, V]),
    "repeated": (lambda v: jnp.broadcast_to(v, (8, 8)), lambda v: jnp.broadcast_to(v[:, None], (8, 8)), [V]),
    "number": (lambda x: x * 2.0, lambda x: x * 3.0, [Y]),
    "number in a function": (lambda x: x / 2.0, lambda x: 2.0 / x, [Y]),
    "power": (lambda x: x**3, lambda x: x**4, [Y]),
    "precision": (lambda x, y: x @ y, lambda x, y: jnp.matmul(x, y, precision="highest"), [Y, Y]),
    "accumulated": (lambda x, y: lax.dot(x, y, preferred_element_type="bfloat16"),
                    lambda x, y: lax.dot(x, y).astype("bfloat16"), [Y, Y]),
    "dtype": (lambda x: x.astype("bfloat16"), lambda x: x.astype("float16"), [Y]),
    "kept dimension": (lambda x, y: jnp.einsum("abc,abd->abcd", x, y), lambda x, y: jnp.einsum("abc,bad->abcd", x, y),
                       [struct((4, 4, 2))] * 2),
    "accuracy": (lax.tanh, lambda x: lax.tanh(x, accuracy=lax.AccuracyMode.HIGHEST), [Y]),
    "stride": (lambda x, w: conv(x, w, "NHWC", 2), lambda x, w: conv(x, w, "NHWC", 2, "VALID"), [IMAGE, KERNEL]),
    "conv precision": (lambda x, w: conv(x, w, "NHWC"), lambda x, w: conv(x, w, "NHWC", precision="highest"), [IMAGE, KERNEL]),
    "image": (lambda x, w: conv(x, w, "NHWC"), lambda x, w: conv(x, w, "NWHC"), [IMAGE, KERNEL]),
    "out of range": (rows, lambda t, i: rows(t, i, "fill"), [TABLE, IDS]),
    "filled": (lambda t, i: rows(t, i, "fill"), lambda t, i: rows(t, i, "fill", fill_value=1), [TABLE, IDS]),
    "promised": (rows, lambda t, i: rows(t, i, indices_are_sorted=True), [TABLE, IDS]),
    "other": (lambda x: lax.cumsum(x), lambda x: lax.cumsum(x, reverse=True), [Y]),
    "other axis": (lambda x: lax.cumsum(x), lambda x: lax.cumsum(x, 1), [Y]),
    "other operands": (lambda x, y: x / y, lambda x, y: y / x, [Y, Y]),
    "one of two": (lambda x: lax.top_k(x, 8)[0], lambda x: lax.top_k(x, 8)[1].astype(x.dtype), [Y]),
    "program": (lambda x: lax.scan(lambda c, r: (c + r, None), x[0], x)[0],
                lambda x: lax.scan(lambda c, r: (c - r, None), x[0], x)[0], [Y]),
}  # fmt: skip


def pair(one, other, arguments):
    return forms(*(jax.make_jaxpr(fn)(*arguments) for fn in (one, other)))


@pytest.mark.parametrize("case", SAME)
def test_equal_programs_have_equal_forms(case):
    one, other = pair(*SAME[case])
    assert one == other


@pytest.mark.parametrize("case", APART)
def test_different_programs_have_different_forms(case):
    one, other = pair(*APART[case])
    assert {x.text for x in one}.isdisjoint(x.text for x in other)


def test_types_of_arguments_are_distinguished():
    first, second = (forms(jax.make_jaxpr(jnp.exp)(struct((4,), d)))[0][0] for d in ("float32", "bfloat16"))
    assert first.text != second.text


class Hidden:
    """Return functions that their text does not distinguish."""

    def __init__(self, factor):
        self.factor = factor


def with_rule(hidden):
    @jax.custom_jvp
    def f(x):
        return jnp.exp(x)

    f.defjvp(lambda primals, tangents: (f(*primals), hidden.factor * tangents[0]))
    return f


def test_functions_with_equal_text_are_distinguished():
    """Their names are the same whenever the same program is read."""
    f, g = with_rule(Hidden(1.0)), with_rule(Hidden(2.0))
    ((one, other, again),) = forms(jax.make_jaxpr(lambda x: (f(x), g(x), f(x)))(Y))
    assert one == again != other
    ((first, second),) = forms(jax.make_jaxpr(lambda x: (g(x), f(x)))(Y))
    assert (first.text, second.text) == (one.text, other.text)


def test_promised_rows_have_their_types_where_64_bits_are_off():
    body = promised_rows((2, 3), "float64", (2,), "int64", 5)
    assert [body.tensor(a).dtype for a in (*body.inputs, *body.outputs)] == ["float64", "int64", "float64"]
