"""Trains a small GPT, written in Flax, on eight devices and on one, and prints the losses side by side.

Without GPUs the processor plays the devices. The text is Python's own documentation, byte by byte.
"""

import argparse
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _compare import print_losses
from _text import VOCABULARY, batches
from flax import nnx

import unity

SEQUENCE, BATCH = 64, 16


class Block(nnx.Module):
    """Attention and a feed-forward layer, each after a norm and around a residual."""

    def __init__(self, hidden: int, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.LayerNorm(hidden, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(num_heads=hidden // 32, in_features=hidden, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(hidden, rngs=rngs)
        self.up = nnx.Linear(hidden, 4 * hidden, rngs=rngs)
        self.down = nnx.Linear(4 * hidden, hidden, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    """Bytes [batch, sequence] to logits of the next ones [batch, sequence, vocabulary]."""

    def __init__(self, layers: int, hidden: int, rngs: nnx.Rngs) -> None:
        self.token = nnx.Embed(VOCABULARY, hidden, rngs=rngs)
        self.position = nnx.Embed(SEQUENCE, hidden, rngs=rngs)
        self.blocks = nnx.List([Block(hidden, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(hidden, rngs=rngs)
        self.head = nnx.Linear(hidden, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.token(tokens) + self.position(jnp.arange(SEQUENCE))
        mask = nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def train(loss_fn: Callable[..., jax.Array], params: Any, data: Iterable[Any], shard: Callable[..., Any]) -> list[float]:
    """An ordinary training loop; all that a plan adds to it is the placement of its arguments."""
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 2e-3, 10, 200))

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        loss, gradient = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses, state = [], optimizer.init(params)
    for batch in data:
        params, batch = shard(params, batch)
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    return losses


def describe(plan: unity.Plan) -> None:
    """What was captured, what was chosen, and what it was chosen from."""
    weights, _ = plan.in_shardings
    print(f"captured {len(plan.program.original)} operators; planned in {plan.inspect.search_seconds:.1f} s:\n{plan}")
    print("\nthe first block's weights, and the mesh axes that split their dimensions:")
    for path, sharding in jax.tree.leaves_with_path(weights["blocks"][0]):
        print(f"  {jax.tree_util.keystr(path, simple=True, separator='.'):28} {sharding.spec}")
    print(f"\n{len(plan.frontier)} plans that no other beats in both time and memory, among them:")
    for point in plan.frontier[:: max(1, len(plan.frontier) // 6)]:
        print(f"  {point.time * 1e3:8.1f} ms a step {point.memory / 1e6:8.2f} MB a device")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--devices", type=int, default=8, help="virtual devices, where there is no GPU")
    parser.add_argument("--memory-limit", type=float, metavar="MB", help="what a device may use")
    parser.add_argument("--explain", action="store_true", help="print every decision of the plan")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.devices)

    graph, params = nnx.split(GPT(args.layers, args.hidden, nnx.Rngs(0)), nnx.Param)
    print(f"{args.layers} layers of {args.hidden}: {sum(leaf.size for leaf in jax.tree.leaves(params)):,} parameters")
    data = list(batches(args.steps, BATCH, SEQUENCE))

    def loss_fn(params: nnx.State, batch: dict[str, jax.Array]) -> jax.Array:
        logits = nnx.merge(graph, params)(batch["tokens"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    limit = None if args.memory_limit is None else args.memory_limit * 1e6
    plan = unity.optimize(loss_fn, params, data[0], memory_limit=limit)
    describe(plan)
    if args.explain:
        plan.explain()

    alone = train(loss_fn, params, data, shard=lambda *arguments: arguments)
    together = train(plan, params, data, shard=plan.shard)
    print_losses(alone, together, jax.device_count())


if __name__ == "__main__":
    main()
