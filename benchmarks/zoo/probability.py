"""Densities, Gaussian processes, rankings and fixed points."""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.zoo.entry import Case, Pick, cross_entropy, entry, integers, key, normal


@entry("flowjax", "masked autoregressive flow")
def autoregressive_flow(pick: Pick) -> Case:
    import equinox as eqx
    from flowjax.distributions import StandardNormal
    from flowjax.flows import masked_autoregressive_flow
    from flowjax.train.losses import MaximumLikelihoodLoss

    width = pick(64, 4)
    sizes = {"flow_layers": pick(8, 2), "nn_width": pick(512, 16), "nn_depth": 2}
    flow = masked_autoregressive_flow(key(), base_dist=StandardNormal((width,)), **sizes)
    weights, static = eqx.partition(flow, eqx.is_inexact_array)

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        return MaximumLikelihoodLoss()(weights, static, x)

    return loss, lambda: (weights, normal(pick(65536, 16), width))


@entry("gpjax", "sparse variational Gaussian process (evidence lower bound)")
def gaussian_process(pick: Pick) -> Case:
    import gpjax
    from flax import nnx

    jax.config.update("jax_enable_x64", pick(False, True))  # of few points, the factor of the covariance is badly conditioned
    rows, width, inducing, batch = pick(2**20, 64), pick(16, 2), pick(1024, 8), pick(65536, 32)

    prior = gpjax.gps.Prior(mean_function=gpjax.mean_functions.Constant(), kernel=gpjax.kernels.RBF())
    posterior = prior * gpjax.likelihoods.Gaussian(num_datapoints=rows)
    family = gpjax.variational_families.VariationalGaussian(posterior, normal(inducing, width), jitter=1e-3)
    graph, state = nnx.split(family)

    def loss(state: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return -gpjax.objectives.elbo(nnx.merge(graph, state), gpjax.Dataset(x, y)) / rows

    return loss, lambda: (state, normal(batch, width, seed=3), normal(batch, 1, seed=4))


@entry("tfp-nightly", "marginal likelihood of a Gaussian process")
def marginal_likelihood(pick: Pick) -> Case:
    from tensorflow_probability.substrates import jax as tfp

    tasks, points, width = pick(256, 8), pick(512, 8), pick(8, 2)

    def loss(weights: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        amplitude, scale, noise = (jax.nn.softplus(weights[name]) for name in ("amplitude", "scale", "noise"))
        kernel = tfp.math.psd_kernels.MaternFiveHalves(amplitude, scale)
        process = tfp.distributions.GaussianProcess(kernel, x, observation_noise_variance=noise + 0.1)
        return -jnp.mean(process.log_prob(y))

    def arguments() -> tuple[Any, ...]:
        weights = {name: jnp.float32(0.5) for name in ("amplitude", "scale", "noise")}
        return weights, normal(tasks, points, width), normal(tasks, points, seed=3)

    return loss, arguments


@entry("numpyro", "variational autoencoder (its example)")
def autoencoder(pick: Pick) -> Case:
    import numpyro
    import numpyro.distributions as dist
    from flax import linen as nn
    from numpyro.infer import Trace_ELBO

    batch, pixels, hidden, latent = pick(16384, 16), pick(784, 16), pick(400, 8), pick(50, 4)
    encoder, decoder = nn.Dense(hidden), nn.Sequential([nn.Dense(hidden), nn.softplus, nn.Dense(pixels)])
    heads = nn.Dense(2 * latent)

    def model(weights: Any, image: jax.Array) -> None:
        with numpyro.plate("batch", batch):
            z = numpyro.sample("z", dist.Normal(jnp.zeros(latent), 1).expand([latent]).to_event(1))
            logits = decoder.apply(weights["decoder"], z)
            numpyro.sample("image", dist.Bernoulli(logits=logits).to_event(1), obs=image)

    def guide(weights: Any, image: jax.Array) -> None:
        inner: Any = encoder.apply(weights["encoder"], image)
        both: Any = heads.apply(weights["heads"], nn.softplus(inner))
        location, scale = jnp.split(both, 2, -1)
        with numpyro.plate("batch", batch):
            numpyro.sample("z", dist.Normal(location, jnp.exp(scale)).to_event(1))

    def loss(weights: Any, image: jax.Array, seed: jax.Array) -> jax.Array:
        return Trace_ELBO().loss(seed, {}, model, guide, weights, image) / batch

    def arguments() -> tuple[Any, ...]:
        parts = {"encoder": (encoder, pixels), "heads": (heads, hidden), "decoder": (decoder, latent)}
        weights = {name: network.init(key(), jnp.zeros(width)) for name, (network, width) in parts.items()}
        return weights, integers(2, batch, pixels).astype(jnp.float32), key(1)

    return loss, arguments


@entry("rax", "learning to rank: soft-max loss of a scoring network")
def ranking(pick: Pick) -> Case:
    import flax.linen as nn
    import rax

    queries, items, features, width = pick(4096, 8), pick(256, 8), pick(136, 8), pick(1024, 16)
    network = nn.Sequential([nn.Dense(width), nn.relu, nn.Dense(width), nn.relu, nn.Dense(1)])

    def loss(weights: Any, x: jax.Array, relevance: jax.Array, where: jax.Array) -> jax.Array:
        scores: Any = network.apply(weights, x)
        return rax.softmax_loss(scores[..., 0], relevance, where=where, reduce_fn=jnp.mean)

    def arguments() -> tuple[Any, ...]:
        x, relevance = normal(queries, items, features), integers(5, queries, items).astype(jnp.float32)
        return network.init(key(), x[:1]), x, relevance, integers(4, queries, items, seed=3) > 0

    return loss, arguments


@entry("rax", "learning to rank: pairwise logistic loss with lambda weights")
def pairwise_ranking(pick: Pick) -> Case:
    import flax.linen as nn
    import rax

    queries, items, features, width = pick(1024, 8), pick(128, 8), pick(136, 8), pick(1024, 16)
    network = nn.Sequential([nn.Dense(width), nn.relu, nn.Dense(width), nn.relu, nn.Dense(1)])

    def loss(weights: Any, x: jax.Array, relevance: jax.Array) -> jax.Array:
        scores: Any = network.apply(weights, x)
        return rax.pairwise_logistic_loss(scores[..., 0], relevance, lambdaweight_fn=rax.dcg_lambdaweight, reduce_fn=jnp.mean)

    def arguments() -> tuple[Any, ...]:
        x, relevance = normal(queries, items, features), integers(5, queries, items).astype(jnp.float32)
        return network.init(key(), x[:1]), x, relevance

    return loss, arguments


@entry("optimistix", "deep equilibrium network")
def equilibrium(pick: Pick) -> Case:
    import optimistix

    width, features, classes, batch = pick(512, 8), pick(3072, 16), pick(10, 4), pick(8192, 8)

    def loss(weights: Any, x: jax.Array, label: jax.Array) -> jax.Array:
        def cell(z: jax.Array, x: jax.Array) -> jax.Array:
            return jnp.tanh(z @ weights["recurrent"] + x @ weights["in"])

        solver = optimistix.FixedPointIteration(rtol=1e-4, atol=1e-4)
        z = jax.vmap(lambda x: optimistix.fixed_point(cell, solver, jnp.zeros(width), x, max_steps=64, throw=False).value)(x)
        return cross_entropy(z @ weights["out"], label)

    def arguments() -> tuple[Any, ...]:
        weights = {
            "recurrent": 0.3 * normal(width, width) / width**0.5,
            "in": normal(features, width, seed=3) / features**0.5,
            "out": normal(width, classes, seed=4) / width**0.5,
        }
        return weights, normal(batch, features, seed=5), integers(classes, batch)

    return loss, arguments
