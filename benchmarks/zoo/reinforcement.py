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


@entry("rlax", "QR-DQN: quantile regression of a double Q-network")
def quantile_q_network(pick: Pick) -> Case:
    import haiku as hk
    import rlax

    batch, size, actions, quantiles = pick(4096, 8), pick(84, 24), pick(18, 4), pick(200, 8)
    levels = (jnp.arange(quantiles) + 0.5) / quantiles

    def forward(x: jax.Array) -> jax.Array:
        y = jax.nn.relu(hk.Conv2D(32, 8, 4)(x))
        y = jax.nn.relu(hk.Conv2D(pick(64, 8), 4, 2)(y))
        return hk.nets.MLP([pick(512, 16), quantiles * actions])(hk.Flatten()(y)).reshape(-1, quantiles, actions)

    network = hk.without_apply_rng(hk.transform(forward))

    def loss(weights: Any, target: Any, frames: jax.Array, action: jax.Array, reward: jax.Array) -> jax.Array:
        now, selector = (network.apply(weights, x) for x in frames)
        step = jax.vmap(rlax.quantile_q_learning, (0, None, 0, 0, 0, 0, 0, None))
        return jnp.mean(step(now, levels, action, reward, jnp.full(batch, 0.99), selector, network.apply(target, frames[1]), 1.0))

    def arguments() -> tuple[Any, ...]:
        frames = normal(2, batch, size, size, 4)
        weights, target = (network.init(jax.random.PRNGKey(seed), frames[0]) for seed in (0, 1))
        return weights, target, frames, integers(actions, batch), normal(batch, seed=3)

    return loss, arguments


@entry("mctx", "Gumbel MuZero: a policy improved by search, and its network's loss")
def muzero(pick: Pick) -> Case:
    import haiku as hk
    import mctx

    batch, features, width, actions = pick(8192, 8), pick(128, 8), pick(512, 16), pick(16, 4)
    represent = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([width, width])(x)))
    predict = hk.without_apply_rng(hk.transform(lambda s: hk.Linear(actions + 1)(hk.nets.MLP([width], activate_final=True)(s))))
    dynamics = hk.without_apply_rng(
        hk.transform(lambda s, a: hk.nets.MLP([width, width + 1])(jnp.concatenate([s, jax.nn.one_hot(a, actions)], -1)))
    )

    def loss(weights: Any, observed: jax.Array, returns: jax.Array, seed: jax.Array) -> jax.Array:
        def recurrent(weights: Any, seed: Any, action: jax.Array, state: jax.Array) -> Any:
            out = dynamics.apply(weights["dynamics"], state, action)
            heads = predict.apply(weights["predict"], out[:, 1:])
            discount = jnp.full(out.shape[:1], 0.99)
            step = {"reward": out[:, 0], "discount": discount, "prior_logits": heads[:, 1:], "value": heads[:, 0]}
            return mctx.RecurrentFnOutput(**step), out[:, 1:]

        state = represent.apply(weights["represent"], observed)
        heads = predict.apply(weights["predict"], state)
        root = mctx.RootFnOutput(prior_logits=heads[:, 1:], value=heads[:, 0], embedding=state)
        fixed, root = jax.lax.stop_gradient((weights, root))
        improved = mctx.gumbel_muzero_policy(fixed, seed, root, recurrent, pick(16, 4)).action_weights
        return jnp.mean((heads[:, 0] - returns) ** 2) - jnp.mean(jnp.sum(improved * jax.nn.log_softmax(heads[:, 1:]), -1))

    def arguments() -> tuple[Any, ...]:
        observed, state = normal(batch, features), jnp.zeros((batch, width))
        weights = {
            "represent": represent.init(jax.random.PRNGKey(0), observed),
            "predict": predict.init(jax.random.PRNGKey(1), state),
            "dynamics": dynamics.init(jax.random.PRNGKey(2), state, jnp.zeros(batch, jnp.int32)),
        }
        return weights, observed, normal(batch, seed=3), key(4)

    return loss, arguments
