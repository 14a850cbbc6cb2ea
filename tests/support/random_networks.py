"""Random small networks of products, sums, elementwise functions and normalizations, with a loss."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

ROWS, WIDTHS = (1024, 4096, 16384, 65536), (1024, 2048, 4096, 8192, 16384)
FUNCTIONS: Sequence[Callable[[Any], Any]] = (jnp.tanh, jax.nn.relu, jax.nn.gelu, jax.nn.sigmoid, jnp.square)
NORMS: Sequence[Callable[[Any], Any]] = (
    lambda x: x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6),
    jax.nn.softmax,
    lambda x: x - x.mean(-1, keepdims=True),
)
LOSSES: Sequence[Callable[[Any, Any], Any]] = (
    lambda x, y: jnp.mean(x**2),
    lambda x, y: jnp.mean(x**2) + 0.1 * jnp.mean(jnp.abs(y)),
    lambda x, y: jnp.mean(jax.nn.logsumexp(x, -1) - x[:, 0]),
)
# The function of each kind of step, of two values [rows, width] and its weights.
STEPS: dict[str, Callable[..., Any]] = {
    "product": lambda fn, x, y, w: x @ w,
    "merge": lambda fn, x, y, v, w: fn(x @ v + y @ w),
    "gate": lambda fn, x, y, v, w: fn(x @ v) * (y @ w),
    "function": lambda fn, x, y: fn(x),
    "norm": lambda fn, x, y: fn(x.astype(jnp.float32)).astype(x.dtype),
    "bias": lambda fn, x, y, b: x + b,
    "sum": lambda fn, x, y: x + y,
    "scale": lambda fn, x, y: x * y,
    "choice": lambda fn, x, y: jnp.where(x > 0, x, y),
    "pool": lambda fn, x, y, w: x * jax.nn.sigmoid(x.mean(0) @ w),
}
FREQUENCIES = dict(zip(STEPS, (3, 4, 2, 2, 1.5, 1, 1.5, 1, 0.5, 0.5), strict=True))


@dataclass
class RandomNetwork:
    """A network drawn from a seed: a function of weights and inputs, and their shapes."""

    frequencies: ClassVar[Mapping[str, float]] = FREQUENCIES  # of the kinds of steps
    most_inputs: ClassVar[int] = 2
    most_steps: ClassVar[int] = 6
    seed: int
    weights: list[tuple[int, ...]] = field(default_factory=list)
    steps: list[tuple[Callable[..., Any], int, int, list[int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = rng = random.Random(self.seed)
        self.rows, self.widths = rng.choice(ROWS), rng.sample(WIDTHS, 2)
        self.dtype = rng.choice(["float32", "float32", "bfloat16"])
        self.known = [rng.choice(self.widths) for _ in range(rng.randint(1, self.most_inputs))]  # the widths of all values
        self.inputs = [(self.rows, width) for width in self.known]
        for _ in range(rng.randint(2, self.most_steps)):
            self.draw(rng.choices(list(self.frequencies), list(self.frequencies.values()))[0])
        self.loss = rng.choice(LOSSES)

    def draw(self, kind: str) -> None:
        """Add a step."""
        rng, known = self.rng, self.known
        x = len(known) - 1 if rng.random() < 0.6 else rng.randrange(len(known))
        joins = kind in ("merge", "gate")
        y = rng.randrange(len(known)) if joins else rng.choice([k for k, width in enumerate(known) if width == known[x]])
        width = rng.choice(self.widths) if joins or kind == "product" else known[x]
        shapes = {
            "product": [(known[x], width)],
            "merge": [(known[x], width), (known[y], width)],
            "gate": [(known[x], width), (known[y], width)],
            "bias": [(width,)],
            "pool": [(width, width)],
        }.get(kind, [])
        numbers = [len(self.weights) + k for k in range(len(shapes))]
        self.weights += shapes
        fn = rng.choice(NORMS if kind == "norm" else FUNCTIONS)
        self.steps.append((lambda *operands: STEPS[kind](fn, *operands), x, y, numbers))
        known.append(width)

    def __call__(self, weights: Sequence[Any], *inputs: Any) -> Any:
        weights, values = ([x.astype(self.dtype) for x in some] for some in (weights, inputs))
        for step, x, y, numbers in self.steps:
            values.append(step(values[x], values[y], *(weights[k] for k in numbers)))
        return self.loss(*(x.astype(jnp.float32) for x in (values[-1], values[-2])))

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The shapes of the weights and of the inputs."""
        weights, inputs = ([jax.ShapeDtypeStruct(s, "float32") for s in shapes] for shapes in (self.weights, self.inputs))
        return weights, *inputs
