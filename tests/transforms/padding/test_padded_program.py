"""Padded programs: values and gradients are those of the function, for all indices and values, wherever it is padded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import fewer, one_in
from hypothesis import given, settings
from hypothesis import strategies as st
from odd_functions import FUNCTIONS, arguments
from precision import in_64_bits

from unity.pcg.capture.capture import capture
from unity.pcg.local.interpreter import run_body
from unity.transforms.padding.fills import enlarged
from unity.transforms.padding.padded_program import padded_body
from unity.transforms.padding.padding import PaddedWeight, padded_inputs

EXACT = {"xla_disable_hlo_passes": "algsimp"}  # which takes 0 * x for 0, though x may be infinite


@pytest.fixture(autouse=True)
def _in_64_bits():
    with in_64_bits():
        yield


def run(body, values):
    return run_body(body, values, [()] * len(body.inputs), [()] * len(body.outputs), ())


def with_gradients(body, leaves, differentiated):
    """The results, and the gradients of a function of all of them that weighs every element by itself."""

    def figure(*own):
        values = {**dict(enumerate(leaves)), **dict(zip(differentiated, own, strict=True))}
        results = run(body, [values[k] for k in range(len(leaves))])
        weights = (jnp.cos(1.0 + jnp.arange(r.size)).reshape(r.shape) for r in results)
        return sum(jnp.sum(w * r) for w, r in zip(weights, results, strict=True) if jnp.issubdtype(r.dtype, jnp.inexact)), results

    both = jax.jit(jax.grad(figure, tuple(range(len(differentiated))), has_aux=True), compiler_options=EXACT)
    gradients, results = both(*(leaves[k] for k in differentiated))
    return results, gradients


def check(fn, args, multiple, stored):
    """Compare a function with its padded program. Returns the gradients of both."""
    captured = capture(fn, *args)
    body = captured.body
    odd = {n: -(-n // multiple) * multiple for n in (5, 7, 9)}
    inputs = padded_inputs(captured, odd)
    leaves = [*map(jnp.asarray, jax.tree.leaves(args)), *map(jnp.asarray, captured.consts)]
    own = [k for k in sorted(captured.differentiated) if jnp.issubdtype(leaves[k].dtype, jnp.inexact)]
    kept = [k for k in own if stored and k in inputs]
    assert bool(kept) == stored
    weights = {k: PaddedWeight((k,), leaves[k].shape, enlarged(leaves[k].shape, inputs[k])) for k in kept}
    packed = [weights[k].pack({k: x}) if k in weights else x for k, x in enumerate(leaves)]
    results, gradients = with_gradients(body, leaves, own)
    padded, cotangents = with_gradients(padded_body(body, inputs, kept, captured.differentiated), packed, own)
    for x, y in zip(results, padded, strict=True):
        np.testing.assert_allclose(y, x, rtol=1e-10, atol=1e-12)
    for k, x, y in zip(own, gradients, cotangents, strict=True):
        np.testing.assert_allclose(weights[k].unpack(y)[k] if k in weights else y, x, rtol=1e-10, atol=1e-12)
    return gradients, cotangents


@pytest.mark.parametrize("name", one_in(2, FUNCTIONS))
def test_values_and_gradients_are_those_of_the_function(name):
    gradients, cotangents = check(FUNCTIONS[name], arguments(name), 8, stored=True)
    for x, y in zip(gradients, cotangents, strict=True):  # so that an optimizer leaves zeros behind weights
        padding_of = np.ones(y.shape, bool)
        padding_of[tuple(slice(n) for n in x.shape)] = False
        assert not np.asarray(y)[padding_of].any()


@given(st.sampled_from(sorted(FUNCTIONS)), st.sampled_from([2, 4, 8]), st.booleans(), st.integers(0, 1 << 30))
@settings(max_examples=fewer(3), deadline=None)
def test_any_infinity_and_nan_arrives_where_it_does_in_the_function(name, multiple, stored, seed):
    rng, args = np.random.default_rng(seed), arguments(name)

    def spoiled(x):
        flat = np.array(x).reshape(-1)
        flat[rng.integers(flat.size)] = rng.choice([np.inf, -np.inf, np.nan])
        return jnp.asarray(flat.reshape(x.shape))

    leaves, tree = jax.tree.flatten(args)
    floats = [k for k, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact)]
    chosen = floats[rng.integers(len(floats))]
    leaves[chosen] = spoiled(leaves[chosen])
    check(FUNCTIONS[name], jax.tree.unflatten(tree, leaves), multiple, stored)
