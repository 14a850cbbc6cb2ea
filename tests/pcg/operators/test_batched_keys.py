"""What depends on a whole batch, though it looks row by row: plans that divide the batch compute what one device does.

JAX's generators other than threefry draw, under `vmap`, the bits of all keys from the first of the batch.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import one_in
from jax import lax
from jax.sharding import PartitionSpec
from parallel_cases import Application
from test_pipelines_dropout import TREE, planned

import unity
from unity.pcg.parallel.stages import SCHEDULES, Mixed

IMPLS = ("rbg", "unsafe_rbg")  # of threefry, each key draws its own: the operators' own tests divide its batches
MACHINE = unity.Machine.grid(1, 4, "v100")
RNG = np.random.default_rng(0)

pytestmark = pytest.mark.usefixtures("own_cache")


def keys(impl, *shape):
    return jax.random.split(jax.random.key(3, impl=impl), shape)


def data(fn):
    return lambda *args: jax.random.key_data(fn(*args))


DRAWN = {
    "bits": jax.vmap(lambda k: jax.random.bits(k, (6,))),
    "bits of batches of batches": jax.vmap(jax.vmap(lambda k: jax.random.bits(k, (6,)))),
    "bytes": jax.vmap(lambda k: jax.random.bits(k, (6,), jnp.uint8)),
    "split": data(jax.vmap(lambda k: jax.random.split(k, 6))),
    "fold_in of one number": data(jax.vmap(lambda k: jax.random.fold_in(k, 3))),
    "split, then drawn": jax.vmap(lambda k: jax.random.normal(jax.random.split(k)[1], (6,))),
    "wrapped and unwrapped": data(lambda k: jax.random.wrap_key_data(jax.random.key_data(k), impl=jax.random.key_impl(k))),
    "clone": data(jax.vmap(jax.random.clone)),
}


@pytest.mark.parametrize(("name", "impl"), one_in(3, itertools.product(DRAWN, IMPLS)))
def test_pieces_are_those_of_the_whole_batch(name, impl):
    Application(DRAWN[name], [keys(impl, 12, 6) if "batches of" in name else keys(impl, 12)], (2, 3)).check()


@pytest.mark.parametrize("impl", IMPLS)
def test_numbers_folded_in_are_those_of_the_whole_batch(impl):
    numbers = RNG.integers(0, 99, 12).astype(np.uint32)
    for fn, key in ((jax.vmap(jax.random.fold_in), keys(impl, 12)), (jax.vmap(jax.random.fold_in, (None, 0)), keys(impl, 1)[0])):
        Application(data(fn), [key, numbers], (2, 3)).check()


def test_batches_of_keys_are_still_divided_if_each_gives_its_own():
    every = Application(DRAWN["bits"], [keys("threefry2x32", 12)], (2, 3)).check()
    assert any(c.operands[0][0].kind == "P" for c in every)


def dropped(key, row):
    return jnp.where(jax.random.bernoulli(key, 0.5, row.shape), 2 * row, 0)


def in_scan(x, k):
    def step(carry, _):
        x, k = carry
        return (jax.vmap(dropped)(k, jnp.sin(x)), jax.vmap(lambda k: jax.random.split(k)[0])(k)), None

    return lax.scan(step, (x, k), None, 3)[0][0]


def in_while(x, k):
    """Draw for each row until it is finished."""

    def one(row, k):
        def again(state):
            n, row, k = state
            k, drawn = jax.random.split(k)
            return n + 1, row + jax.random.uniform(drawn, row.shape), k

        return lax.while_loop(lambda s: (s[1].sum() < 9) & (s[0] < 20), again, (0, row, k))[1]

    return jax.vmap(one)(lax.stop_gradient(x), k)


def in_cond(x, k):
    return jax.vmap(lambda row, k: lax.cond(row[0] > 0, lambda: dropped(k, row), lambda: jax.random.normal(k, row.shape)))(x, k)


def in_branch(x, k):
    return lax.cond(x[0, 0] > 0, lambda: jax.vmap(dropped)(k, x), lambda: x + jax.vmap(lambda k: jax.random.normal(k, (4,)))(k))


def in_remat(x, k):
    return jax.checkpoint(lambda x, k: jax.vmap(dropped)(k, jnp.sin(x)))(x, k)


def by_rows(fn):
    return lambda x, k: jax.vmap(fn)(x, k)


BATCHED = {
    "dropout": lambda x, k: jax.vmap(dropped)(k, x),
    "scan": in_scan,
    "while": in_while,
    "cond": in_cond,
    "branch": in_branch,
    "remat": in_remat,
    "choice": by_rows(lambda row, k: jax.random.choice(k, row, (2,))),
    "permutation": by_rows(lambda row, k: jax.random.permutation(k, row)),
    "gamma": by_rows(lambda row, k: jax.random.gamma(k, jnp.exp(lax.stop_gradient(row)))),
    "poisson": by_rows(lambda row, k: jax.random.poisson(k, jnp.exp(lax.stop_gradient(row))).astype(row.dtype)),
    "categorical": by_rows(lambda row, k: jax.random.categorical(k, row).astype(row.dtype)),
    "rejection": by_rows(lambda row, k: jax.random.truncated_normal(k, -1, 1, row.shape)),
}


def held(fn, *args, at):
    """Compare a plan that slices the batch of the arguments at these paths with the function on one device."""
    pins = [unity.pin(path, PartitionSpec("device")) for path in at]
    plan = unity.optimize(fn, *args, machine=MACHINE, constraints=pins, progress=False, training=False, branches=False)
    assert all(plan.in_shardings[0].spec[:1]), plan.in_shardings
    given = [jax.device_put(x, s) for x, s in zip(args, plan.in_shardings, strict=True)]
    for got, want in zip(jax.tree.leaves(jax.jit(plan)(*given)), jax.tree.leaves(jax.jit(fn)(*args)), strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-5, atol=1e-6)


DRAWS = [(name, impl) for name in BATCHED for impl in IMPLS if name != "poisson"]
DRAWS += [("poisson", "threefry2x32")]  # JAX has no others


@pytest.mark.parametrize(("name", "impl"), one_in(3, DRAWS))
def test_plans_of_a_divided_batch_draw_what_one_device_does(name, impl):
    x = jnp.asarray(RNG.normal(size=(8, 4)), jnp.float32)
    held(BATCHED[name], x, keys(impl, 8), at=["x"])


def counted(row):
    """Step all rows until all are finished."""
    return lax.while_loop(lambda s: s[1] < 50, lambda s: (s[0] + 1, s[1] * 2 + 1), (0, jnp.abs(row).sum()))


def generated(row):
    bits = lax.rng_bit_generator(lax.bitcast_convert_type(row, jnp.uint32), (3,))
    return bits[0], bits[1]


@jax.custom_batching.custom_vmap
def centred(row):
    return row


@centred.def_vmap
def _of_batch(size, batched, x):
    return x - x.mean(0), True


ROWS = {
    "steps of a loop": jax.vmap(counted),
    "generator": jax.vmap(generated),
    "uniform": jax.vmap(lambda row: lax.cumsum(row) + lax.reduce_precision(row, 5, 3)),
    "symmetric eigenvalues": lambda x: jnp.linalg.eigvalsh(x[:, :, None] * x[:, None, :] + jnp.eye(4)),
    "singular values": lambda x: jnp.linalg.svd(x[:, :, None] * x[:, None, :] + jnp.eye(4), compute_uv=False),
    "triangular": lambda x: jnp.linalg.cholesky(x[:, :, None] * x[:, None, :] + jnp.eye(4)),
    "determinants": lambda x: jnp.linalg.slogdet(x[:, :, None] * x[:, None, :] + jnp.eye(4))[1],
    "stable sort": lambda x: lax.sort((jnp.round(x), x), dimension=1, num_keys=1, is_stable=True),
    "sort along the batch": lambda x: lax.sort((jnp.round(x), x), dimension=0, num_keys=1, is_stable=True),
    "ties of an argmax along the batch": lambda x: jnp.argmax(jnp.round(x), 0),
    "ties of an argmin along the batch": lambda x: jnp.argmin(jnp.round(x), 0),
    "ties of top_k along the batch": lambda x: lax.top_k(jnp.round(x).T, 3),
    "ties of top_k": lambda x: lax.top_k(jnp.round(x), 3),
    "approximate top_k": lambda x: lax.approx_max_k(x, 2),
    "approximate top_k along the batch": lambda x: lax.approx_max_k(x, 2, reduction_dimension=0),
    "sums along the batch": lambda x: lax.cumsum(x, 0),
    "largest so far along the batch": lambda x: (lax.cummax(x, 0), lax.cumlogsumexp(x, 0)),
    "unique": lambda x: jnp.unique(jnp.round(x), size=5, fill_value=99),
    "own rule for a batch": jax.vmap(centred),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_a_divided_batch_are_those_of_one_device(name):
    held(ROWS[name], jnp.asarray(RNG.normal(size=(8, 4)), jnp.float32), at=["*"])


@pytest.mark.parametrize("method", ["sequential", "expand_dims", "broadcast_all"])
def test_a_function_on_the_host_sees_the_batch_that_it_saw(method):
    def on_host(row):
        return np.asarray(row) - np.asarray(row).mean()

    def fn(x):
        return jax.vmap(
            lambda row: jax.pure_callback(on_host, jax.ShapeDtypeStruct(row.shape, row.dtype), row, vmap_method=method)
        )(x)

    held(fn, jnp.asarray(RNG.normal(size=(8, 4)), jnp.float32), at=["x"])


def with_keys_of_samples(params, x, keys):
    def step(carry, w):
        drop = jax.vmap(lambda key, row: jnp.where(jax.random.bernoulli(key, 0.7, row.shape), row, 0.0))
        return carry + drop(keys, jnp.tanh(carry @ w)), None

    return (lax.scan(step, x, params)[0] ** 2).mean()


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_micro_batches_that_depend_on_the_whole_batch_of_keys_are_refused(impl):
    params, x = (jnp.asarray(RNG.normal(size=s) / 3, jnp.float32) for s in ((4, 8, 8), (16, 8)))
    with pytest.raises(Mixed, match="where a sample stands in the batch"):
        planned(with_keys_of_samples, (params, x, keys(impl, 16)), TREE.axes[1:], 2, SCHEDULES[0])


@pytest.mark.parametrize(("impl", "words"), [("threefry2x32", 2), ("rbg", 4), ("unsafe_rbg", 4)])
def test_a_random_key_is_sent_as_its_words(impl, words):
    divided = unity.pin("keys", PartitionSpec("device"))

    def fn(keys):
        return jax.random.key_data(unity.constrain(keys, PartitionSpec()))

    plan = unity.optimize(fn, keys(impl, 8), machine=MACHINE, progress=False, training=False, constraints=divided)
    total = plan.check().total
    assert total.predicted == total.compiled == 8 * words
