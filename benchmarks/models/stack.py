"""Layers that repeat: unrolled over a list of parameters, or one `scan` over stacked ones."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
from jax import lax

from .model import Abstract, Tree

Block = Callable[[Tree, jax.Array], jax.Array]


@dataclass(frozen=True)
class Stack:
    """`params` repeats one block's abstract parameters; `apply` runs the block over them."""

    params: Callable[[Tree, int], Tree]
    apply: Callable[[Block, Tree, jax.Array], jax.Array]


def _listed(block: Tree, layers: int) -> Tree:
    return [block] * layers


def _unroll(block: Block, params: Tree, x: jax.Array) -> jax.Array:
    for layer in params:
        x = block(layer, x)
    return x


def _stacked(block: Tree, layers: int) -> Tree:
    return jax.tree.map(lambda leaf: Abstract((layers, *leaf.shape), leaf.dtype), block)


def _scan(block: Block, params: Tree, x: jax.Array) -> jax.Array:
    return lax.scan(lambda carry, layer: (block(layer, carry), None), x, params)[0]


unrolled = Stack(_listed, _unroll)
scanned = Stack(_stacked, _scan)
