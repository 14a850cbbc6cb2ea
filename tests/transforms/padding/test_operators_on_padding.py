"""Operators that once computed something else on padding, or failed to run on it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy import special
from precision import in_64_bits

from unity.pcg.capture.capture import capture
from unity.pcg.local.interpreter import run_body
from unity.transforms.padding.padded_program import padded_body
from unity.transforms.padding.padding import padded_inputs

MATRIX = np.random.default_rng(0).normal(size=(9, 5))


@pytest.fixture(autouse=True)
def _in_64_bits():
    with in_64_bits():
        yield


def check(fn, *args):
    """Compare the values and the gradient of a function with those of the program with its sizes 5, 7 and 9 padded to 8 and 16."""
    captured = capture(fn, *args)
    inputs = padded_inputs(captured, {5: 8, 7: 8, 9: 16})
    assert inputs
    program = padded_body(captured.body, inputs, (), captured.differentiated)

    def padded(*args):
        leaves = [*jax.tree.leaves(args), *map(jnp.asarray, captured.consts)]
        return run_body(program, leaves, [()] * len(leaves), [()] * len(program.outputs), ())

    def both(function):
        def total(first, *rest):
            results = jax.tree.leaves(function(first, *rest))
            weights = (jnp.cos(1.0 + jnp.arange(r.size)).reshape(r.shape) for r in results)
            return sum(jnp.sum(w * r.astype(float)) for w, r in zip(weights, results, strict=True)), results

        return jax.jit(jax.grad(total, has_aux=True))(*args)

    for x, y in zip(jax.tree.leaves(both(fn)), jax.tree.leaves(both(padded)), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(np.asarray(y, float), np.asarray(x, float), rtol=1e-10, atol=1e-12)


def test_an_extremum_of_a_type_without_infinity():
    x = jnp.abs(jnp.asarray(MATRIX)).astype("float8_e4m3fn")
    check(lambda w, x: (w, jnp.max(-x, 0).astype(float), jnp.min(x, 0).astype(float)), jnp.asarray(MATRIX), x)


def test_an_extremum_of_complex_numbers_with_infinite_real_parts():
    x = jnp.asarray([[complex(sign * np.inf, k * MATRIX[k, 0]) for k in range(5)] for sign in (-1, 1)])
    check(lambda w, x: (w, *(part(f(x, 1)) for f in (jnp.max, jnp.min) for part in (jnp.real, jnp.imag))), jnp.asarray(MATRIX), x)


def test_small_arrays_that_are_literals_of_the_program():
    def fn(w):
        numbers = np.arange(1.0, 46.0).reshape(9, 5)
        return w / numbers, jnp.where(numbers % 2 == 0, w, 0.0), w[:, 0] + np.arange(9.0), (w > 0) ^ (numbers > 7)

    check(fn, jnp.asarray(MATRIX))


@jax.custom_jvp
def magnitude(x):
    return jnp.abs(x)


@magnitude.defjvp
def _(primals, tangents):
    return jnp.sqrt(primals[0] * primals[0]), tangents[0] * jnp.sign(primals[0])


def test_a_derivative_rule_whose_value_has_other_padding_than_the_function():
    check(lambda w: magnitude(w).T @ magnitude(w), jnp.asarray(MATRIX))


def test_calls_with_a_derivative_rule_that_close_over_arrays():
    polynomial = jax.custom_jvp(jax.jit(lambda x: jnp.polyval(np.arange(1.0, 4.0), x)))
    polynomial.defjvp(lambda xs, ts: (polynomial(*xs), ts[0] * (2 * xs[0] + 2)))
    check(polynomial, jnp.asarray(MATRIX))


def test_nested_programs_without_equations():
    def fn(w):
        swapped, _ = jax.lax.scan(lambda c, _: ((c[1], c[0]), None), (w, jnp.tanh(w)), None, length=3)
        shifted = jax.lax.scan(lambda c, v: (v, c), w[:, 0], w.T)
        return swapped, shifted

    check(fn, jnp.asarray(MATRIX))


def test_operators_whose_parameters_contain_shapes():
    def fn(w):
        return jnp.split(w, 1, axis=0)[0], jnp.tile(w, (1, 1)), jnp.ldexp(w, 3)

    check(fn, jnp.asarray(MATRIX))


def test_library_functions_that_are_singular_at_zero():
    def fn(w):
        p = jax.nn.sigmoid(w)
        return special.entr(p), special.xlogy(p * (p > 0.5), p[::-1]), special.rel_entr(p, p[::-1])

    check(fn, jnp.asarray(MATRIX))


@pytest.mark.parametrize("start", [(4, 9), (-1, 100)])
def test_slices_and_updates_that_start_anywhere(start):
    def fn(w, i):
        part = jax.lax.dynamic_slice(w, (i[0], i[1]), (3, 2))
        return part, jax.lax.dynamic_update_slice(w, part[::-1], (i[1], i[0])), w.at[i].add(w[:2]), w[i], jnp.roll(w, i[0], 0)

    check(fn, jnp.asarray(MATRIX), jnp.asarray(start, jnp.int32))


def test_concatenations_and_pads():
    def fn(w):
        joined = jnp.concatenate([w, jnp.ones((9, 5))], 1), jnp.concatenate([w, w[:2]], 0), jnp.stack([w, 0 * w + 3], 1)
        pads = jnp.pad(w, 1), jnp.pad(w, ((0, 0), (2, 1)), constant_values=3.0), jnp.pad(w, 2, mode="reflect")
        return (
            *joined,
            *pads,
            *jnp.unstack(w, axis=1)[:2],
            *jnp.unstack(w)[1:3],
            jnp.roll(w, 2, 0),
            jnp.roll(w, 1),
            w[::-2],
            jnp.diff(w, axis=1),
        )

    check(fn, jnp.asarray(MATRIX))


def test_unsigned_indices_of_64_bits():
    indices = jnp.asarray([0, 8, 9, 15, 16, 2**31, 2**32, 2**32 + 9, 2**63, 2**63 + 10, 2**64 - 1], jnp.uint64)
    check(lambda t, i: (jnp.take(t, i, 0), jnp.take(t, i, 0, mode="fill", fill_value=-7.0)), jnp.asarray(MATRIX), indices)
