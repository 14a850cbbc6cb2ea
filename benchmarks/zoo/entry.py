"""An entry of the zoo: a loss of a package at its full size and at a size that runs in seconds, and the helpers of such entries."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

Loss = Callable[..., Any]
Arguments = Callable[[], Any]
Pick = Callable[[Any, Any], Any]
Case = tuple[Loss, Arguments]


@dataclass(frozen=True)
class Entry:
    """A training loss of a package.

    Attributes:
        package: the distribution on PyPI.
        name: the loss, as a user of the package would call it.
        make: returns the loss and a function that computes its arguments, weights first. It asks its own argument for every size:
            `pick(full, tiny)`.
    """

    package: str
    name: str
    make: Callable[[Pick], Case]

    @property
    def label(self) -> str:
        return f"{self.package}: {self.name}"

    @property
    def lines(self) -> int:
        """The number of lines that state the loss."""
        return len(inspect.getsource(self.make).strip().splitlines()) - 1  # without the decorator

    def case(self, tiny: bool) -> Case:
        return self.make((lambda full, small: small) if tiny else (lambda full, small: full))


ENTRIES: list[Entry] = []


def entry(package: str, name: str) -> Callable[[Callable[[Pick], Case]], Callable[[Pick], Case]]:
    """Register a function as the `make` of an entry."""

    def register(make: Callable[[Pick], Case]) -> Callable[[Pick], Case]:
        ENTRIES.append(Entry(package, name, make))
        return make

    return register


def key(seed: int = 0) -> jax.Array:
    return jax.random.key(seed)


def normal(*shape: int, seed: int = 1) -> jax.Array:
    return jax.random.normal(key(seed), shape)


def integers(below: int, *shape: int, seed: int = 2) -> jax.Array:
    return jax.random.randint(key(seed), shape, 0, below)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    import optax

    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def keras_case(network: Any, inputs: Arguments, labels: Arguments) -> Case:
    """Return the cross entropy of a network of Keras that computes logits, with the new state of its layers."""
    weights, rest = ([v.value for v in vs] for vs in (network.trainable_variables, network.non_trainable_variables))

    def loss(weights: Any, rest: Any, inputs: Any, labels: jax.Array) -> Any:
        logits, state = network.stateless_call(weights, rest, inputs, training=True)
        return cross_entropy(logits, labels), state

    return loss, lambda: (weights, rest, inputs(), labels())
