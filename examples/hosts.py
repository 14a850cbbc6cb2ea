"""Trains a small GPT as several processes, each with its own devices and its own part of every batch.

`--process` says which of `--processes` this is, as on a cluster: run the script once on each host. Without it, all are started
here, and the processor plays their devices. What several hosts add to an ordinary training is marked with "hosts:".
"""

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

import jax
import optax
from _processes import together
from _text import batches
from flax import nnx
from gpt import BATCH, GPT, SEQUENCE

import unity


def parts(steps: int) -> Iterator[dict[str, Any]]:
    """Every batch's rows of this process. A real data loader reads no others."""
    rows = BATCH // jax.process_count()
    first = jax.process_index() * rows
    for batch in batches(steps, BATCH, SEQUENCE):
        yield {name: x[first : first + rows] for name, x in batch.items()}


def train(steps: int, layers: int, hidden: int, machine: unity.Machine | None) -> list[float]:
    graph, params = nnx.split(GPT(layers, hidden, nnx.Rngs(0)), nnx.Param)  # hosts: the same seed everywhere
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 2e-3, 10, 200))

    def loss_fn(params: nnx.State, batch: dict[str, jax.Array]) -> jax.Array:
        logits = nnx.merge(graph, params)(batch["tokens"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    whole = {name: jax.ShapeDtypeStruct((BATCH, SEQUENCE), "int32") for name in ("tokens", "labels")}
    plan = unity.optimize(loss_fn, params, whole, machine=machine)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        loss, gradient = jax.value_and_grad(plan)(params, batch)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = plan.shard(params)
    shardings = plan.shard.shardings(jax.eval_shape(optimizer.init, params))
    state, losses = jax.jit(optimizer.init, out_shardings=shardings)(params), []
    for k, part in enumerate(parts(steps)):
        params, state, loss = step(params, state, plan.shard.local(part))  # hosts: each gives its rows
        losses.append(float(loss))
        if k % 10 == 0 or k == steps - 1:
            print(f"step {k:3} loss {losses[-1]:.6f}", flush=True)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--process", type=int, help="which of them this is; none: start all of them on this machine")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="where the first process can be reached")
    parser.add_argument("--devices", type=int, default=2, help="virtual devices of a process, where there is no GPU")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--device", metavar="PRESET", help="plan for such devices, as 'a100', instead of measuring those here")
    parser.add_argument("--losses", metavar="FILE", help="write them there, as JSON")
    args = parser.parse_args()
    if args.process is None and args.processes > 1:
        return together(sys.argv[1:], args.processes)

    jax.config.update("jax_num_cpu_devices", args.devices)
    if args.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")  # hosts: for processors; GPUs need nothing
        jax.distributed.initialize(args.coordinator, args.processes, args.process)  # hosts: the one line of JAX's own
    local = jax.local_device_count()
    machine = None if args.device is None else unity.Machine.grid(jax.process_count(), local, args.device)
    print(f"{jax.process_count()} processes with {local} devices each")
    losses = train(args.steps, args.layers, args.hidden, machine)
    if args.losses is not None and jax.process_index() == 0:
        with open(args.losses, "w") as file:
            json.dump(losses, file)


if __name__ == "__main__":
    main()
