"""Trains a small GPT on eight devices, goes on with four of them, then as two processes with four devices each.

Between them is a checkpoint, written by Orbax. Every part has a plan of its own, and the losses go on as if nothing had happened:
they are shown beside those of one device that trains without a break. The processor plays the devices.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import optax
import orbax.checkpoint as ocp
from _processes import together
from _text import batches
from flax import nnx
from gpt import BATCH, GPT, SEQUENCE

import unity

PARTS = ((1, 8), (1, 4), (2, 4))  # processes, and devices of each
OPTIMIZER = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 2e-3, 10, 200))


def model() -> tuple[Callable[..., jax.Array], Any]:
    graph, params = nnx.split(GPT(2, 64, nnx.Rngs(0)), nnx.Param)

    def loss_fn(params: nnx.State, batch: dict[str, jax.Array]) -> jax.Array:
        logits = nnx.merge(graph, params)(batch["tokens"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    return loss_fn, params


def train(fn: Callable[..., jax.Array], state: Any, data: list[Any]) -> tuple[Any, list[float]]:
    @jax.jit
    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, moments = state
        loss, gradient = jax.value_and_grad(fn)(params, batch)
        updates, moments = OPTIMIZER.update(gradient, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    losses = []
    for batch in data:
        state, loss = step(state, batch)
        losses.append(float(loss))
    return state, losses


def part(number: int, steps: int, folder: Path) -> None:
    """One part of the training: restores what the one before has saved, and saves what it comes to."""
    loss_fn, params = model()
    data = list(batches(len(PARTS) * steps, BATCH, SEQUENCE))[number * steps :][:steps]
    # As slow as a share of a processor: on anything faster it does not pay to split so small a model.
    device = unity.Device("processor", {"float32": 1e10}, 2**32, 1e10, 1.0, 1e-6)
    machine = unity.Machine.grid(jax.process_count(), jax.local_device_count(), device, intra=(1e9, 1e-5), inter=(2e8, 5e-5))
    # Fewer devices have less memory together: there the leanest plan.
    plan = unity.optimize(loss_fn, params, data[0], machine=machine, objective="memory" if number == 1 else "time")
    if jax.process_index() == 0:
        weights = [sharding.spec for sharding in jax.tree.leaves(plan.in_shardings[0])]
        print(f"  {sum(map(any, weights))} of {len(weights)} weights split; {plan.time * 1e3:.3g} ms a step")

    shapes = jax.eval_shape(lambda: (params, OPTIMIZER.init(params)))
    shardings = plan.shard.shardings(shapes)
    with ocp.StandardCheckpointer() as checkpointer:
        if number == 0:
            params = plan.shard(params)
            state = params, jax.jit(OPTIMIZER.init, out_shardings=shardings[1])(params)
        else:
            wanted = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
            state = checkpointer.restore(folder / f"part-{number - 1}", wanted)
        state, losses = train(plan, state, [plan.shard(state[0], batch)[1] for batch in data])
        checkpointer.save(folder / f"part-{number}", state)
    if jax.process_index() == 0:
        (folder / f"losses-{number}.json").write_text(json.dumps(losses))


def show(steps: int, folder: Path) -> None:
    """All losses beside those of a training without a break, on one device."""
    loss_fn, params = model()
    _, alone = train(loss_fn, (params, OPTIMIZER.init(params)), list(batches(len(PARTS) * steps, BATCH, SEQUENCE)))
    print(f"\n{'step':>5}  {'processes x devices':20}{'loss':>12}{'one device':>12}{'difference':>12}")
    for number, (processes, devices) in enumerate(PARTS):
        for k, loss in enumerate(json.loads((folder / f"losses-{number}.json").read_text()), number * steps):
            print(f"{k:>5}  {f'{processes} x {devices}':20}{loss:>12.6f}{alone[k]:>12.6f}{abs(loss - alone[k]):>12.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="of each part")
    parser.add_argument("--folder", type=Path, help="keep the checkpoints there")
    for name in ("--part", "--processes", "--process"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)  # of the parts, which are started here
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part is not None:
        jax.config.update("jax_num_cpu_devices", PARTS[args.part][1])
        if args.processes > 1:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
            jax.distributed.initialize(args.coordinator, args.processes, args.process)
        return part(args.part, args.steps, args.folder)
    folder = args.folder or Path(tempfile.mkdtemp())
    for number, (processes, devices) in enumerate(PARTS):
        print(f"{args.steps} steps as {processes} x {devices} devices", flush=True)
        together(["--part", str(number), "--steps", str(args.steps), "--folder", str(folder.absolute())], processes)
    show(args.steps, folder)


if __name__ == "__main__":
    main()
