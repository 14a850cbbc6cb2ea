"""Small models in plain JAX, and strategies picked at random: what property tests of whole plans run on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from unity.machine.machine import Machine
from unity.pcg.capture.capture import Captured, capture
from unity.pcg.ir.graph import PARALLELIZATION, Node
from unity.pcg.propagation.placement import placing
from unity.search.cost.assembly import Assembled, assemble
from unity.search.cost.cost import Training
from unity.search.solver.problem import Alternatives, Point

MACHINE = Machine.grid(2, 4, "a100")


@cache
def widens() -> bool:
    """Whether XLA computes products of bfloat16 in float32 here: that depends on its version and on the processor."""
    shape = jax.ShapeDtypeStruct((128, 128), jnp.bfloat16)
    return "f32[128,128]" in str(jax.jit(lambda x: x @ x).lower(shape).compile().as_text())


@dataclass(frozen=True)
class Small:
    loss: Callable[[Any, Any], Any]
    params: Any
    batch: Any


def arrays(tree: Any, seed: int = 0) -> Any:
    """Float64 weights of a sensible size, and integers below seven."""
    rng = np.random.default_rng(seed)

    def one(s: jax.ShapeDtypeStruct) -> np.ndarray:
        if np.dtype(s.dtype).kind == "i":
            return rng.integers(0, 7, s.shape).astype(s.dtype)
        return (rng.normal(size=s.shape) / np.sqrt(max(s.shape[0], 1) if s.shape else 1)).astype(s.dtype)

    return jax.tree.map(one, tree)


def f(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float64")


def i(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "int32")


def norm(x: Any, gain: Any, bias: Any) -> Any:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * gain + bias


def block(p: Any, x: Any) -> Any:
    b, s, d = x.shape
    y = norm(x, p["g1"], p["b1"])
    q, k, v = (z.reshape(b, s, 4, d // 4).transpose(0, 2, 1, 3) for z in jnp.split(y @ p["qkv"], 3, -1))
    scores = jnp.where(jnp.tril(jnp.ones((s, s), bool)), q @ k.swapaxes(-1, -2) / np.sqrt(d // 4), -1e9)
    x = x + (jax.nn.softmax(scores) @ v).transpose(0, 2, 1, 3).reshape(b, s, d) @ p["o"]
    return x + jax.nn.gelu(norm(x, p["g2"], p["b2"]) @ p["up"] + p["c"]) @ p["down"]


def cross_entropy(logits: Any, labels: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1).mean()


def layer(d: int) -> Any:
    return {
        "qkv": f(d, 3 * d), "o": f(d, d), "up": f(d, 4 * d), "c": f(4 * d), "down": f(4 * d, d),
        "g1": f(d), "b1": f(d), "g2": f(d), "b2": f(d),
    }  # fmt: skip


def gpt(layers: int = 1, d: int = 32, vocabulary: int = 48, b: int = 8, s: int = 16) -> Small:
    def loss(p: Any, batch: Any) -> Any:
        x = p["token"][batch["x"]] + p["position"]
        for one in p["layers"]:
            x = block(one, x)
        return cross_entropy(x @ p["token"].T, batch["y"])

    params = {"token": f(vocabulary, d), "position": f(s, d), "layers": [layer(d) for _ in range(layers)]}
    return Small(loss, params, {"x": i(b, s), "y": i(b, s)})


def joint_attention(b: int = 2, s: int = 6, heads: int = 2) -> Small:
    """Attention of one projection, which `moveaxis` takes apart, and a product of a tensor with itself: capture rewrites both."""
    d = 2 * heads

    def loss(w: Any, x: Any) -> Any:
        q, k, v = jnp.moveaxis((x @ w).reshape(b, s, 3, heads, 2), 2, 0).transpose(0, 1, 3, 2, 4)
        y = jax.nn.softmax(q @ k.swapaxes(-1, -2)) @ v
        return jnp.sum((y[0, 0] @ y[0, 0].T) ** 2) + jnp.mean(y**2)

    return Small(loss, f(d, 3 * d), f(b, s, d))


def gpt_scanned(
    layers: int = 2, d: int = 16, vocabulary: int = 32, b: int = 8, s: int = 8, layer_fn: Callable[[Any, Any], Any] = block
) -> Small:
    """A language model as a scan over its layers, whose residuals are stacked."""

    def loss(p: Any, batch: Any) -> Any:
        x = p["token"][batch["x"]] + p["position"]
        x, _ = lax.scan(lambda x, one: (layer_fn(one, x), None), x, p["layers"])
        return cross_entropy(x @ p["token"].T, batch["y"])

    stacked = jax.tree.map(lambda t: f(layers, *t.shape), layer(d))
    return Small(loss, {"token": f(vocabulary, d), "position": f(s, d), "layers": stacked}, {"x": i(b, s), "y": i(b, s)})


def lstm(b: int = 8, s: int = 6, d: int = 16, vocabulary: int = 32) -> Small:
    def loss(p: Any, batch: Any) -> Any:
        def step(carry: Any, x: Any) -> Any:
            h, c = carry
            a, g, m, o = jnp.split(x @ p["wx"] + h @ p["wh"] + p["b"], 4, -1)
            c = jax.nn.sigmoid(a) * c + jax.nn.sigmoid(g) * jnp.tanh(m)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        x = p["token"][batch["x"]].transpose(1, 0, 2)
        start = jnp.zeros((b, d), x.dtype)
        _, h = lax.scan(step, (start, start), x)
        return cross_entropy(h @ p["out"], batch["y"].T)

    params = {"token": f(vocabulary, d), "wx": f(d, 4 * d), "wh": f(d, 4 * d), "b": f(4 * d), "out": f(d, vocabulary)}
    return Small(loss, params, {"x": i(b, s), "y": i(b, s)})


def cnn(b: int = 8, n: int = 8) -> Small:
    numbers = ("NHWC", "HWIO", "NHWC")

    def loss(p: Any, batch: Any) -> Any:
        x = lax.conv_general_dilated(batch["image"], p["k1"], (1, 1), "SAME", dimension_numbers=numbers)
        mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
        x = jax.nn.relu((x - mean) * lax.rsqrt(variance + 1e-3) * p["g"] + p["b"])
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        x = lax.conv_general_dilated(x, p["k2"], (2, 2), "SAME", dimension_numbers=numbers, feature_group_count=4)
        return cross_entropy(jax.nn.relu(x).mean((1, 2)) @ p["w"], batch["y"])

    params = {"k1": f(3, 3, 4, 8), "g": f(8), "b": f(8), "k2": f(3, 3, 2, 16), "w": f(16, 8)}
    return Small(loss, params, {"image": f(b, n, n, 4), "y": i(b)})


MODELS = {"gpt": gpt, "gpt_scanned": partial(gpt_scanned, layer_fn=jax.checkpoint(block)), "lstm": lstm, "cnn": cnn}


def made(model: Small, machine: Machine = MACHINE) -> tuple[Captured, Assembled]:
    """A model, and all its strategies on a machine."""
    with jax.enable_x64(True):
        captured = capture(model.loss, model.params, model.batch)
    return captured, assemble(captured.graph, captured.differentiated, machine, Training())


@cache
def named(model: str) -> tuple[Captured, Assembled]:
    """One of the models on the usual machine."""
    return made(MODELS[model]())


def counted(assembled: Assembled, point: Point, of: Literal["time", "memory"]) -> float:
    """What the search counts for a point."""
    problem, values = assembled.problem, point.values
    unary = sum(getattr(c, of)[a, v] for c, v, a in zip(problem.unary, values, point.alternatives.unary, strict=True))
    chosen = zip(problem.edges, point.alternatives.edges, strict=True)
    return unary + sum(getattr(e.cost, of)[a, values[e.first], values[e.second]] for e, a in chosen)


def scatters(node: Node) -> bool:
    """Return whether an operator of a parallel graph scatters a value inside."""
    if node.body is None or node.kind in PARALLELIZATION:
        return False
    placed = placing(node.body, tuple(v.type for v in node.operands), node.types, len(node.types[0]))
    return any(s is not None and s.scattered for s in placed)


def moves(node: Node) -> bool:
    """Return whether an operator of a parallel graph moves slices inside, or gathers them."""
    if not scatters(node) or node.body is None:
        return False
    placed = placing(node.body, tuple(v.type for v in node.operands), node.types, len(node.types[0]))
    return any(s is not None and s.states[v].kind == "P" for s in placed for v in (s.scattered if s is not None else ()))


def random_point(assembled: Assembled, rng: np.random.Generator) -> Point:
    """Any strategy that can be run, drawn site by site; what a choice makes impossible elsewhere is ruled out at once."""
    problem = assembled.problem
    possible = [np.isfinite(e.cost.time.min(0)) for e in problem.edges]
    joined: dict[int, list[int]] = {}
    for k, e in enumerate(problem.edges):
        joined.setdefault(e.first, []).append(k)
        joined.setdefault(e.second, []).append(k)

    def consistent(allowed: list[np.ndarray], changed: list[int]) -> bool:
        while changed:
            s = changed.pop()
            for k in joined.get(s, []):
                e = problem.edges[k]
                other, table = (e.second, possible[k]) if e.first == s else (e.first, possible[k].T)
                left = allowed[other] & table[allowed[s]].any(0)
                if not left.any():
                    return False
                if left.sum() < allowed[other].sum():
                    allowed[other] = left
                    changed.append(other)
        return True

    def choose(allowed: list[np.ndarray], s: int) -> list[np.ndarray]:
        for v in rng.permutation(np.flatnonzero(allowed[s])):
            trial = [a.copy() for a in allowed]
            trial[s] = np.arange(len(allowed[s])) == v
            if consistent(trial, [s]):
                return trial
        raise AssertionError(f"no value of site {s} is possible: the sites before it are joined in a circle")

    allowed: list[np.ndarray] = [np.asarray(np.isfinite(c.time).any(0)) for c in problem.unary]
    assert consistent(allowed, list(range(len(allowed))))
    for s in range(len(problem.sizes)):
        allowed = choose(allowed, s)
    values = [int(np.flatnonzero(a)[0]) for a in allowed]
    chosen = [e.cost.time[:, values[e.first], values[e.second]] for e in problem.edges]
    alone = [c.time[:, v] for c, v in zip(problem.unary, values, strict=True)]
    unary, edges = (tuple(int(rng.choice(np.flatnonzero(np.isfinite(t)))) for t in ts) for ts in (alone, chosen))
    return Point(0.0, 0.0, tuple(values), Alternatives(unary, edges))
