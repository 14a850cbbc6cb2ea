"""Random networks of more kinds of steps than `random_networks`: concatenations, halves, heads, products of values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from random_networks import FREQUENCIES, FUNCTIONS, NORMS, STEPS, RandomNetwork

WIDEST, MULTIPLE = 40000, 256  # of the widths: the largest, and a divisor of all
HEAD = 128
NORMALIZING = {"norm", "norm of heads"}
ALIKE = {"sum", "scale", "choice", "scale by a total", "maximum"}  # of two values of one width
JOINING = {"merge", "gate", "gate, joined", "sum, scaled"}  # of two products

# The further kinds of steps: how often each is drawn, and its function of a function, two values [rows, width] and its weights.
WIDE_STEPS: dict[str, tuple[float, Callable[..., Any]]] = {
    "concatenation": (1.5, lambda fn, x, y: jnp.concatenate([x, y], -1)),
    "function of a concatenation": (1.5, lambda fn, x, y: fn(jnp.concatenate([x, y], -1))),
    "gate of halves": (1.5, lambda fn, x, y: fn(x[:, : x.shape[1] // 2]) * x[:, x.shape[1] // 2 :]),
    "half": (1, lambda fn, x, y: jnp.split(x, 2, -1)[1]),
    "norm of heads": (1, lambda fn, x, y: fn(x.reshape(x.shape[0], -1, HEAD)).reshape(x.shape)),
    "norm of rows": (1, lambda fn, x, y: x - x.mean(0)),
    "scale by a total": (0.5, lambda fn, x, y: x * jnp.tanh(y.mean())),
    "scale by rows": (0.5, lambda fn, x, y: x * y.mean(-1, keepdims=True)),
    "mix": (0.5, lambda fn, x, y: x @ ((x.T @ y) / x.shape[0])),
    "roll": (0.5, lambda fn, x, y: jnp.concatenate([x[:, -1:], x[:, :-1]], -1)),
    "gate, joined": (1.5, lambda fn, x, y, v, w: jnp.concatenate([fn(x @ v) * (y @ w), y], -1)),
    "sum, scaled": (1.5, lambda fn, x, y, v, w: fn(x @ v + y @ w) * x.mean(-1, keepdims=True)),
    "maximum": (0.5, lambda fn, x, y: jnp.maximum(x, y)),
    "running sum": (0.25, lambda fn, x, y: jnp.cumsum(x, -1)),
}
FUNCTIONS_OF_STEPS = STEPS | {kind: function for kind, (_, function) in WIDE_STEPS.items()}


class WideNetwork(RandomNetwork):
    """A random network with the further kinds of steps, and more steps and inputs."""

    frequencies: ClassVar[Mapping[str, float]] = FREQUENCIES | {kind: often for kind, (often, _) in WIDE_STEPS.items()}
    most_inputs: ClassVar[int] = 3
    most_steps: ClassVar[int] = 7

    def draw(self, kind: str) -> None:
        """Add a step, unless its result has an odd width."""
        rng, known, step = self.rng, self.known, FUNCTIONS_OF_STEPS[kind]
        x = len(known) - 1 if rng.random() < 0.6 else rng.randrange(len(known))
        y = rng.choice([k for k, width in enumerate(known) if kind not in ALIKE or width == known[x]])
        width = rng.choice(self.widths)
        single = {"product": [(known[x], width)], "bias": [(known[x],)], "pool": [(known[x], known[x])]}
        shapes = [(known[x], width), (known[y], width)] if kind in JOINING else single.get(kind, [])
        numbers = [len(self.weights) + k for k in range(len(shapes))]
        fn = rng.choice(NORMS if kind in NORMALIZING else FUNCTIONS)

        def run(*operands: Any) -> Any:
            return step(fn, *operands)

        of = [(self.rows, known[x]), (self.rows, known[y]), *shapes]
        (_, result) = jax.eval_shape(run, *(jax.ShapeDtypeStruct(shape, self.dtype) for shape in of)).shape
        if result <= WIDEST and result % MULTIPLE == 0:
            self.weights += shapes
            self.steps.append((run, x, y, numbers))
            known.append(result)
