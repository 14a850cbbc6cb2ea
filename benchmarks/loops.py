"""Recurrent networks with their products in the loop: planned without rules of loops, with them, and written by hand.

Two layers that do not read each other are also planned with all rules but that of loops beside each other, and a layer over one
group of sequences after the other with all but that of maps.

`python -m benchmarks.loops`. On 8 A100s and 8 H100s. Seconds of a step and bytes on a device are predicted; search seconds are of
the whole call.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import unity
from benchmarks.models.model import f32, i32
from benchmarks.record import record_cases, show
from unity.machine.machine import Machine

MACHINES = {"8 A100": Machine.preset("dgx-a100"), "8 H100": Machine.preset("dgx-h100")}
WAYS: dict[str, dict[str, Any]] = {
    "in the loop": {"constraints": unity.without_rules("*-loop")},
    "loops apart": {"constraints": unity.without_rules("equal-loops-*", "mapped-loops-*")},
    "rules of loops": {},
    "by hand": {},
}


def network(
    cell: Callable[..., Any],
    states: int,
    gates: int,
    *,
    layers: int,
    hidden: int,
    steps: int,
    batch: int,
    looped: tuple[str, ...] = (),
) -> Any:
    """Return a language model of recurrent cells: its loss, with products in the loops or outside of them, and its arguments.

    The loops also have the parts of the model that `looped` names, as in a decoder: the embedding is in the first loop, the output
    layer, and the loss, in the last one.
    """
    vocab = 10_000

    def error(logits: Any, labels: Any) -> Any:
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)

    def loss(outside: bool) -> Callable[..., Any]:
        here = () if outside else looped

        def run(params: Any, tokens: Any, labels: Any) -> Any:
            x = tokens.T if "embedding" in here else params["table"][tokens.T]
            for k, w in enumerate(params["layers"]):
                zero = (jnp.zeros((batch, hidden)),) * states
                embeds, last = "embedding" in here and k == 0, k == layers - 1

                def in_loop(state: Any, slices: Any, w: Any = w, embeds: bool = embeds, last: bool = last) -> Any:
                    row, label = slices
                    row = params["table"][row] if embeds else row
                    state, y = cell(w, state, row @ w["x"] + w["b"])
                    y = y @ params["out"] if last and "output" in here else y
                    return state, error(y, label) if last and "loss" in here else y

                def before_loop(state: Any, row: Any, w: Any = w) -> Any:
                    return cell(w, state, row)

                x = lax.scan(before_loop, zero, x @ w["x"] + w["b"])[1] if outside else lax.scan(in_loop, zero, (x, labels.T))[1]
            if "loss" in here:
                return jnp.mean(x)
            return jnp.mean(error(x if "output" in here else x @ params["out"], labels.T))

        return run

    layer = {"x": f32(hidden, gates * hidden), "h": f32(hidden, gates * hidden), "b": f32(gates * hidden)}
    tokens = i32(batch, steps)
    params = {"table": f32(vocab, hidden), "layers": [layer] * layers, "out": f32(hidden, vocab)}
    return loss, (params, tokens, tokens)


def simple(w: Any, state: Any, drive: Any) -> Any:
    """A step of Elman's network."""
    h = jnp.tanh(drive + state[0] @ w["h"])
    return (h,), h


def lstm(w: Any, state: Any, drive: Any) -> Any:
    """A step of an LSTM."""
    h, c = state
    i, f, g, o = jnp.split(drive + h @ w["h"], 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h, c), h


def gru(w: Any, state: Any, drive: Any) -> Any:
    """A step of a gated recurrent unit."""
    r, z, n = jnp.split(drive, 3, axis=-1)
    ur, uz, un = jnp.split(state[0] @ w["h"], 3, axis=-1)
    z = jax.nn.sigmoid(z + uz)
    h = (1 - z) * jnp.tanh(n + jax.nn.sigmoid(r + ur) * un) + z * state[0]
    return (h,), h


def beside(
    cell: Callable[..., Any], states: int, gates: int, *, hidden: int, steps: int, batch: int, inputs: int, reverse: bool
) -> Any:
    """Return two recurrent layers that do not read each other, of one input or of two, one of them maybe in the other direction.

    The loss is the mean product of their results, with two loops and products in them, or with one and products outside of it.
    """

    def loss(outside: bool) -> Callable[..., Any]:
        def run(params: Any, sequences: Any) -> Any:
            zero = (jnp.zeros((batch, hidden)),) * states

            def layer(w: Any, xs: Any, back: bool) -> Any:
                return lax.scan(lambda state, row: cell(w, state, row @ w["x"] + w["b"]), zero, xs, reverse=back)[1]

            def lane(w: Any, rows: Any) -> Any:
                return lax.scan(lambda state, row: cell(w, state, row), zero, rows)[1]

            pairs = list(zip(params, sequences * (2 // inputs), (False, reverse), strict=True))
            if not outside:
                y, z = (layer(*pair) for pair in pairs)
                return jnp.mean(y * z)
            rows = [jnp.flip(x, 0) if back else x for x, back in ((x @ w["x"] + w["b"], back) for w, x, back in pairs)]
            y, z = jax.vmap(lane)(jax.tree.map(lambda *w: jnp.stack(w), *params), jnp.stack(rows))
            return jnp.mean(y * (jnp.flip(z, 0) if reverse else z))

        return run

    weights = {"x": f32(hidden, gates * hidden), "h": f32(hidden, gates * hidden), "b": f32(gates * hidden)}
    return loss, ([weights] * 2, [f32(steps, batch, hidden)] * inputs)


def grouped(cell: Callable[..., Any], states: int, gates: int, *, hidden: int, steps: int, batch: int, groups: int) -> Any:
    """Return a recurrent layer over one group of sequences after the other, by `lax.map`, or over all at once, by `jax.vmap`."""

    def loss(outside: bool) -> Callable[..., Any]:
        def run(w: Any, xs: Any) -> Any:
            def layer(rows: Any) -> Any:
                zero = (jnp.zeros((batch, hidden)),) * states
                return lax.scan(lambda state, row: cell(w, state, row), zero, rows @ w["x"] + w["b"])[1]

            return jnp.mean((jax.vmap(layer)(xs) if outside else lax.map(layer, xs)) ** 2)

        return run

    weights = {"x": f32(hidden, gates * hidden), "h": f32(hidden, gates * hidden), "b": f32(gates * hidden)}
    return loss, (weights, f32(groups, steps, batch, hidden))


PTB = {"layers": 2, "hidden": 2048, "steps": 40, "batch": 64}  # FlexFlow's rnnlm
SMALL = {"hidden": 1024, "steps": 40, "batch": 64}
CASES = {
    "RNNLM (LSTM)": (lstm, 2, 4, PTB),
    "RNNLM (LSTM), 512 sequences": (lstm, 2, 4, PTB | {"batch": 512}),
    "LSTM of 256 units": (lstm, 2, 4, PTB | {"hidden": 256, "steps": 128}),
    "GRU": (gru, 1, 3, PTB),
    "Elman": (simple, 1, 1, PTB | {"layers": 1}),
    "RNNLM (LSTM), output layer in the loop": (lstm, 2, 4, PTB | {"looped": ("output",)}),
    "RNNLM (LSTM), loss in the loop": (lstm, 2, 4, PTB | {"looped": ("output", "loss")}),
    "RNNLM (LSTM), embedding and loss in the loop": (lstm, 2, 4, PTB | {"looped": ("embedding", "output", "loss")}),
    "LSTM in two directions": (lstm, 2, 4, SMALL | {"inputs": 1, "reverse": True}),
    "two towers of GRUs": (gru, 1, 3, SMALL | {"inputs": 2, "reverse": False}),
    "LSTM over one group after the other": (lstm, 2, 4, SMALL | {"batch": 8, "groups": 8}),
}


def rows_of(name: str) -> list[dict[str, Any]]:
    """Return one row for each machine and way to plan a case."""
    cell, states, gates, sizes = CASES[name]
    build = beside if "inputs" in sizes else grouped if "groups" in sizes else network
    loss, arguments = build(cell, states, gates, **sizes)
    rows = []
    for machine, devices in MACHINES.items():
        ways = {way: options for way, options in WAYS.items() if way != "loops apart" or build is not network}
        for way, options in ways.items():
            started = time.perf_counter()
            plan = unity.optimize(loss(way == "by hand"), *arguments, machine=devices, progress=False, **options)
            rewriting = plan.program.loop_rewriting
            rows.append({
                "case": name,
                "machine": machine,
                "way": way,
                "ms": plan.time * 1e3,
                "MB": plan.memory / 1e6,
                "search s": time.perf_counter() - started,
                "rules": "" if rewriting is None else str(rewriting),
            })  # fmt: skip
    show(name, rows)
    return rows


def main() -> None:
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache  # so that no plan is read from the cache
        record_cases("loops", __doc__, CASES, "case", rows_of)


if __name__ == "__main__":
    main()
