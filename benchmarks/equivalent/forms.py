"""A class of equivalent programs: forms of one computation, and the arguments that they take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LARGE, SMALL = 0, 1  # which of a letter's two sizes: to plan, and to run
SIZES: Mapping[str, tuple[int, int]] = {
    "A": (192, 4),  # channels of an image
    "B": (49152, 12),  # samples or tokens
    "C": (64, 4),  # width of a head
    "D": (1536, 8),  # width
    "E": (24, 4),  # experts
    "F": (6144, 12),  # hidden width
    "G": (8, 1),  # key and value heads
    "H": (24, 2),  # heads
    "I": (96, 8),  # height and width of an image
    "K": (64, 3),  # rank
    "L": (6, 3),  # layers
    "M": (8, 2),  # micro-batches
    "N": (192, 4),  # sequences or images
    "O": (384, 6),  # channels of a convolution's result
    "P": (4096, 9),  # capacity of an expert
    "S": (768, 6),  # length of a sequence
    "T": (32, 3),  # time steps
    "V": (24576, 10),  # vocabulary
    "W": (24, 3),  # tables, or indices of a bag
}
TYPES = {"bf16": jnp.bfloat16, "f16": jnp.float16}

Tree = Any
Pack = Callable[..., tuple[Tree, ...]]


@dataclass(frozen=True)
class Form:
    """One way to write a computation. `pack` makes its arguments of the class's: separate weights of stacked ones, say."""

    run: Callable[..., jax.Array]
    pack: Pack = lambda *arguments: arguments


@dataclass(frozen=True)
class Equivalence:
    """Programs that compute the same value and the same gradients.

    Args:
        arguments: a tree of strings for each argument; the first one is differentiated. "B D" is a float32 array of these two
            sizes, "bf16 B D" one of another type, "B < V" one of integers below V, "key" a key of random numbers.
        forms: by name.
        differences: why a form's plan takes longer than the class's fastest, for forms whose arithmetic differs.
    """

    arguments: Sequence[Tree]
    forms: Mapping[str, Form]
    differences: Mapping[str, str] = field(default_factory=dict)

    def structs(self, form: str) -> tuple[Tree, ...]:
        """The arguments of a form at the sizes that are planned, of which nothing is allocated."""
        whole = jax.tree.map(lambda text: _struct(text, LARGE), tuple(self.arguments))
        return jax.eval_shape(self.forms[form].pack, *whole)

    def arrays(self, seed: int = 0) -> tuple[Tree, ...]:
        """Small arguments of the class, with data drawn at random."""
        rng = np.random.default_rng(seed)
        return jax.tree.map(lambda text: _drawn(text, rng), tuple(self.arguments))


def same(*arguments: Tree, differences: Mapping[str, str] | None = None, **forms: Callable[..., Any] | Form) -> Equivalence:
    """A class of forms, each a function of the arguments, or a Form. Underscores in names are read as spaces."""
    named = {name.replace("_", " "): f if isinstance(f, Form) else Form(f) for name, f in forms.items()}
    return Equivalence(arguments, named, differences or {})


def size(letter: str, which: int) -> int:
    return int(letter) if letter.isdigit() else SIZES[letter][which]


def _parsed(text: str, which: int) -> tuple[tuple[int, ...], Any, int]:
    """The shape of an argument, its type, and the bound of its integers (0: none)."""
    words, _, bound = text.partition("<")
    letters = words.split()
    dtype = TYPES.get(letters[0], jnp.float32) if letters else jnp.float32
    shape = tuple(size(letter, which) for letter in letters if letter not in TYPES)
    return shape, jnp.int32 if bound else dtype, size(bound.strip(), which) if bound else 0


def _struct(text: str, which: int) -> jax.ShapeDtypeStruct:
    if text == "key":
        return jax.eval_shape(lambda: jax.random.key(0))
    shape, dtype, _ = _parsed(text, which)
    return jax.ShapeDtypeStruct(shape, dtype)


def _drawn(text: str, rng: np.random.Generator) -> jax.Array:
    if text == "key":
        return jax.random.key(0)
    shape, dtype, bound = _parsed(text, SMALL)
    if bound:
        return jnp.asarray(rng.integers(0, bound, shape), dtype)
    return jnp.asarray(rng.normal(size=shape), jnp.float64 if dtype == jnp.float32 else dtype)
