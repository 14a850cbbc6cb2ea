"""Reinforcement learning."""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.zoo.entry import Case, Pick, entry, integers, key, normal

OBSERVATIONS, ACTIONS = 87, 8  # of brax's ant


@entry("brax", "PPO")
def ppo(pick: Pick) -> Case:
    """The loss of brax' own trainer, on unrolled trajectories."""
    from brax.training import types
    from brax.training.acme import running_statistics, specs
    from brax.training.agents.ppo import losses, networks

    batch, steps = pick(2048, 16), pick(20, 4)
    network = networks.make_ppo_networks(OBSERVATIONS, ACTIONS, running_statistics.normalize)

    def loss(weights: Any, normalizer: Any, data: Any, seed: jax.Array) -> Any:
        return losses.compute_ppo_loss(weights, normalizer, data, seed, network)

    def arguments() -> tuple[Any, ...]:
        weights = losses.PPONetworkParams(network.policy_network.init(key()), network.value_network.init(key(1)))
        normalizer = running_statistics.init_state(specs.Array((OBSERVATIONS,), jnp.dtype("float32")))
        observed, rewards = normal(batch, steps, OBSERVATIONS), normal(batch, steps, seed=3)
        extras = {
            "state_extras": {"truncation": jnp.zeros((batch, steps))},
            "policy_extras": {
                "raw_action": normal(batch, steps, ACTIONS, seed=4),
                "log_prob": rewards - 5,
                "distribution_params": normal(batch, steps, 2 * ACTIONS, seed=5),
            },
        }
        actions, discount = jnp.tanh(normal(batch, steps, ACTIONS, seed=4)), jnp.ones((batch, steps))
        return weights, normalizer, types.Transition(observed, actions, rewards, discount, observed, extras), key()

    return loss, arguments


@entry("brax", "SAC, the critic")
def sac(pick: Pick) -> Case:
    from brax.training import types
    from brax.training.agents.sac import losses, networks

    batch = pick(65536, 16)
    network = networks.make_sac_networks(OBSERVATIONS, ACTIONS)
    _, critic, _ = losses.make_losses(network, 1.0, 0.99, ACTIONS)

    def loss(weights: Any, policy: Any, target: Any, data: Any, seed: jax.Array) -> Any:
        return critic(weights, policy, None, target, jnp.float32(0.2), data, seed)

    def arguments() -> tuple[Any, ...]:
        observed, following = normal(batch, OBSERVATIONS), normal(batch, OBSERVATIONS, seed=3)
        actions, rewards = jnp.tanh(normal(batch, ACTIONS, seed=4)), normal(batch, seed=5)
        extras = {"state_extras": {"truncation": jnp.zeros(batch)}, "policy_extras": {}}
        data = types.Transition(observed, actions, rewards, jnp.ones(batch), following, extras)
        weights = network.q_network.init(key())
        return weights, network.policy_network.init(key(1)), weights, data, key()

    return loss, arguments


@entry("rlax", "IMPALA: V-trace with a policy gradient")
def impala(pick: Pick) -> Case:
    import haiku as hk
    import rlax

    batch, steps, size, actions = pick(1024, 8), pick(20, 4), pick(84, 24), pick(18, 4)

    def forward(x: jax.Array) -> Any:
        y = hk.BatchApply(lambda x: hk.nets.MLP([pick(512, 16)])(hk.Flatten()(jax.nn.relu(hk.Conv2D(32, 8, 4)(x)))))(x)
        return hk.Linear(actions)(y), hk.Linear(1)(y)[..., 0]

    network = hk.without_apply_rng(hk.transform(forward))

    def loss(weights: Any, frames: jax.Array, action: jax.Array, reward: jax.Array, behaviour: jax.Array) -> jax.Array:
        logits, values = network.apply(weights, frames)
        rho = jax.vmap(rlax.categorical_importance_sampling_ratios)(logits[:, :-1], behaviour, action)
        step = jax.vmap(lambda v, w, r, d, i: rlax.vtrace_td_error_and_advantage(v, w, r, d, i, 0.9))
        traced = step(values[:, :-1], values[:, 1:], reward, jnp.full(reward.shape, 0.99), rho)
        weight = jnp.ones(reward.shape)
        policy = jax.vmap(rlax.policy_gradient_loss)(logits[:, :-1], action, traced.pg_advantage, weight)
        return jnp.mean(policy) + 0.5 * jnp.mean(traced.errors**2) + 0.01 * jnp.mean(
            jax.vmap(rlax.entropy_loss)(logits[:, :-1], weight)
        )  # fmt: skip

    def arguments() -> tuple[Any, ...]:
        frames = normal(batch, steps + 1, size, size, 4)
        action, reward = integers(actions, batch, steps), normal(batch, steps, seed=3)
        return network.init(jax.random.PRNGKey(0), frames), frames, action, reward, normal(batch, steps, actions, seed=4)

    return loss, arguments
