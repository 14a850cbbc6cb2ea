# ruff: noqa: E501 (templates are lines of programs)
"""Layers, losses, linear algebra and rare functions."""

from __future__ import annotations

import numpy as np

from benchmarks.fuzz.operations.indexing import indices
from benchmarks.fuzz.operations.table import operation
from benchmarks.fuzz.programs import Draw, Rejected, dtype_name

LAYERS = """jax.nn.softmax({0})|jax.nn.log_softmax({0})|jax.nn.softmax({0}, axis=0)|jax.nn.standardize({0})|jax.nn.logsumexp({0}, axis=-1, keepdims=True)|jax.nn.glu({0})
({0} - {0}.mean(-1, keepdims=True)) * lax.rsqrt({0}.var(-1, keepdims=True) + 1e-5)|{0} * lax.rsqrt(jnp.mean({0} * {0}, -1, keepdims=True) + 1e-6)|({0} - {0}.mean(0)) / jnp.sqrt({0}.var(0) + 1e-5)
{0} / jnp.linalg.norm({0}, axis=-1, keepdims=True)|{0} / (jnp.sum(jnp.abs({0}), -1, keepdims=True) + 1e-3)|jax.nn.softmax(jnp.where({0} > 0, {0}, -jnp.inf))|jnp.cov({0}.reshape({0}.shape[0], -1))
jnp.corrcoef({0}.reshape({0}.shape[0], -1))|-jnp.mean(jax.nn.log_softmax({0})[..., 0])|jax.nn.softmax({0} * 1e4)|jax.nn.log_softmax({0}, axis=0)|jax.nn.sparse_plus({0})|jnp.cross({0}[..., :3], {0}[..., :3] * 2)
jax.image.resize({0}, tuple(2 * n for n in {0}.shape), 'linear')|jax.image.resize({0}, {0}.shape[:-1] + (3,), 'nearest')|jax.image.resize({0}, {0}.shape[:-1] + (6,), 'cubic')
jax.lax.map(jnp.tanh, {0})|jnp.convolve({0}.ravel()[:8], jnp.ones(3, {0}.dtype))|jnp.fft.fft({0})|jnp.abs(jnp.fft.rfft({0})) ** 2|jnp.fft.ifft(jnp.fft.fft({0}, axis=0), axis=0).real|jnp.fft.fft2({0}[None])|jnp.fft.irfft({0})|jnp.fft.fftshift({0})"""
LAYERS_OF = [t for line in LAYERS.split("\n") for t in line.split("|")]


@operation(6)
def layer(d: Draw) -> None:
    d.add(d.rng.choice(LAYERS_OF[:9] if d.rng.random() < 0.5 else LAYERS_OF), d.pick(least=1))


@operation(1.5)
def attention(d: Draw) -> None:
    b, s, h, k = d.rng.choice((1, 2)), d.rng.choice((2, 4, 6)), d.rng.choice((1, 2)), d.rng.choice((2, 4))
    q = d.pick(ndim=4, wish=(b, s, h, k), fits=lambda t: np.prod(t.shape) > 0)
    shape, dtype = d.of(q).shape, dtype_name(d.of(q).dtype)
    keys, values = d.pick(shape=shape, dtype=dtype), d.pick(shape=shape, dtype=dtype)
    texts = [
        "jax.nn.dot_product_attention({0}, {1}, {2})",
        "jax.nn.dot_product_attention({0}, {1}, {2}, is_causal=True)",
        "jnp.einsum('bhqk,bkhd->bqhd', jax.nn.softmax(jnp.einsum('bqhd,bkhd->bhqk', {0}, {1})), {2})",
    ]
    d.add(d.rng.choice(texts), q, keys, values)


LOSSES = """optax.squared_error({0}, {1})|optax.l2_loss({0}, {1})|optax.huber_loss({0}, {1})|optax.log_cosh({0}, {1})|optax.cosine_distance({0}, {1}, epsilon=1e-3)|optax.cosine_similarity({0}, {1}, epsilon=1e-3)
optax.sigmoid_binary_cross_entropy({0}, jax.nn.sigmoid({1}))|optax.softmax_cross_entropy({0}, jax.nn.softmax({1}))|optax.kl_divergence(jax.nn.log_softmax({0}), jax.nn.softmax({1}))|optax.hinge_loss({0}, jnp.sign({1}))
optax.poly_loss_cross_entropy({0}, jax.nn.softmax({1}))|optax.safe_softmax_cross_entropy({0}, jax.nn.softmax({1}))|jnp.mean(({0} - {1}) ** 2)|optax.sigmoid_focal_loss({0}, jax.nn.sigmoid({1}))|optax.smooth_labels(jax.nn.softmax({0}), 0.1)"""
LOSSES_OF = [t for line in LOSSES.split("\n") for t in line.split("|")]


@operation(2.5)
def loss(d: Draw) -> None:
    x = d.pick(least=1)
    shape = d.of(x).shape
    if d.rng.random() < 0.35:
        y = indices(d, shape[-1], shape[:-1])
        texts = [
            "optax.softmax_cross_entropy_with_integer_labels({0}, {1})",
            "-jnp.take_along_axis(jax.nn.log_softmax({0}), {1}[..., None], -1)[..., 0]",
            "optax.losses.multiclass_hinge_loss({0}, {1})",
            "(jnp.argmax({0}, -1) == {1}).mean()",
        ]
        texts += [
            "jnp.sum(jnp.where({1} >= 0, optax.softmax_cross_entropy_with_integer_labels({0}, jnp.maximum({1}, 0)), 0)) / jnp.maximum(jnp.sum({1} >= 0), 1)"
        ]
        d.add(d.rng.choice(texts), x, y)
        return
    d.add(d.rng.choice(LOSSES_OF), x, d.pick(shape=shape, dtype=dtype_name(d.of(x).dtype)))


ALGEBRA = """jnp.linalg.solve({0} + 4 * jnp.eye(<n>, dtype={0}.dtype), {1})|jnp.linalg.inv({0} + 4 * jnp.eye(<n>, dtype={0}.dtype))|jnp.linalg.cholesky({0} @ {0}.mT + jnp.eye(<n>, dtype={0}.dtype))
jnp.linalg.qr({0} + 3 * jnp.eye(<n>, dtype={0}.dtype))[1]|jnp.linalg.eigvalsh({0} @ {0}.mT + jnp.diag(jnp.arange(<n>, dtype={0}.dtype)))|jnp.linalg.svd({0} + 3 * jnp.diag(jnp.arange(<n>, dtype={0}.dtype)), compute_uv=False)
jnp.linalg.det({0})|jnp.linalg.slogdet({0} + 4 * jnp.eye(<n>, dtype={0}.dtype))[1]|lax.linalg.triangular_solve({0} + 4 * jnp.eye(<n>, dtype={0}.dtype), {1}, left_side=True, lower=True)|jnp.linalg.matrix_power({0}, 3)
jax.scipy.linalg.expm({0} * 0.1)|jax.scipy.linalg.solve_triangular({0} + 4 * jnp.eye(<n>, dtype={0}.dtype), {1})|jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor({0} @ {0}.mT + jnp.eye(<n>, dtype={0}.dtype)), {1})
jnp.linalg.pinv({0} + 4 * jnp.eye(<n>, dtype={0}.dtype))|jnp.linalg.eigh({0} @ {0}.mT + jnp.diag(jnp.arange(<n>, dtype={0}.dtype)))[0]|lax.linalg.tridiagonal_solve({1}[..., 0] * 0.1, {1}[..., 0] + 4, {1}[..., 0] * 0.2, {1})"""
ALGEBRA_OF = [t for line in ALGEBRA.split("\n") for t in line.split("|")]


@operation(1.2)
def linear_algebra(d: Draw) -> None:
    if d.main not in ("float32", "float64"):
        raise Rejected("no narrow types")
    n, batch = d.rng.choice((2, 3, 4)), d.rng.choice(((), (), (2,), (6,)))
    a = d.argument((*batch, n, n), d.main, "normal")
    b = d.pick(shape=(*batch, n, d.rng.choice((2, 4))), dtype=d.main, fresh=0.6)
    d.add(d.rng.choice(ALGEBRA_OF), a, b, n=n)


RARE = """lax.igammac(lax.stop_gradient(jnp.abs({0}) + 0.5), jnp.abs({0}) + 0.5)|lax.zeta(lax.stop_gradient(jnp.abs({0}) + 2), lax.stop_gradient(jnp.abs({0}) + 0.5))
lax.reduce_precision({0}, 8, 7)|jnp.arctanh(0.9 * jnp.tanh({0}))|jnp.ldexp(*jnp.frexp(lax.stop_gradient({0})))|lax.random_gamma_grad(jnp.abs({0}) + 1, jnp.abs({0}) + 1)
jax.grad(lambda a: jnp.sum(lax.igamma(a, jnp.abs({0}) + 0.5)))(lax.stop_gradient(jnp.abs({0}) + 0.5))|jax.ad_checkpoint.checkpoint_name(jnp.sin({0}), 'sine')
jax.checkpoint(lambda x: jax.ad_checkpoint.checkpoint_name(jnp.sin(x), 'sine') ** 2, policy=jax.checkpoint_policies.save_only_these_names('sine'))({0})
{0} * jax.random.bernoulli(jax.random.key(3), 0.5, {0}.shape)|{0} + jax.random.uniform(jax.random.wrap_key_data(jnp.array([1, 2], 'uint32')), {0}.shape, {0}.dtype)
jax.random.key_data(jax.vmap(jax.random.key)(jnp.arange(6))) * {0}.size|jnp.linalg.eigvals(lax.stop_gradient({0}[..., :2, :2]))|jnp.linalg.qr(lax.stop_gradient({0}), mode='raw')[1]
lax.linalg.householder_product(lax.stop_gradient({0}[..., :2]), lax.stop_gradient({0}[..., 0, :2]))|lax.linalg.lu({0}[..., :2, :2] + 3 * jnp.eye(2, dtype={0}.dtype))[0]
jax.scipy.linalg.lu_solve(jax.scipy.linalg.lu_factor({0}[:2, :2] + 3 * jnp.eye(2, dtype={0}.dtype)), {0}[:2])|jax.random.multivariate_normal(jax.random.key(1), {0}.ravel()[:2], jnp.eye(2, dtype={0}.dtype))
jax.grad(lambda x: jnp.sum(lax.reduce_window(x, -jnp.inf, lax.max, (1,) * (x.ndim - 1) + (2,), (1,) * (x.ndim - 1) + (2,), 'VALID') ** 2))({0})
jax.jvp(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1,) * (x.ndim - 1) + (2,), (1,) * (x.ndim - 1) + (2,), 'VALID'), ({0},), ({0},))[1]
lax.with_sharding_constraint({0} * 2, jax.sharding.SingleDeviceSharding(jax.devices()[0]))|jax.jit(lambda x: x * 2, inline=False)({0})|lax.custom_root(lambda y: y - jnp.tanh({0}), {0}, lambda f, g: jnp.tanh({0}), lambda g, y: y)
jax.random.dirichlet(jax.random.key(0), jnp.ones(3, {0}.dtype)) * jnp.sum({0})|lax.map(lambda x: jnp.sum(x * x), {0}, batch_size=2)|jnp.vectorize(lambda a, b: jnp.dot(a, b), signature='(n),(n)->()')({0}, {0})"""
RARE_OF = [t for line in RARE.split("\n") for t in line.split("|")]


@operation(2.5)
def rare(d: Draw) -> None:
    """What few programs have: primitives that nothing else here leads to."""
    d.add(d.rng.choice(RARE_OF), d.pick(least=1))
