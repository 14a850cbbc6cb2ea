"""Random programs in which one value is several things at once: operands, results, carries, outputs, arguments, constants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from hypothesis import strategies as st
from jax import lax

B, D, LENGTH = 8, 8, 2
WRAPPERS = ("scan", "remat", "remat scan", "scan remat", "cond", "while", "jit", "custom_vjp", "vmap")

Step = tuple[Any, ...]


@dataclass(frozen=True)
class Block:
    """A straight-line program: every step appends values; `outputs` are positions among all of them."""

    steps: tuple[Step, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """A loss of two matrices of weights and one of samples, with further results, which may be anything that is there."""

    block: Block
    extra: tuple[str | int, ...]

    def __call__(self, params: Any, x: Any) -> Any:
        values = [x, params["a"], params["b"], x, jnp.full((B, D), 0.5)]
        made = run(self.block, values)
        every = values + made
        extra = [_extra(e, every) for e in self.extra]
        return sum((jnp.mean(jnp.sin(m)) for m in made), jnp.float32(0)), extra


def _extra(e: str | int, every: Sequence[Any]) -> Any:
    return {"number": jnp.float32(2.5), "zeros": jnp.zeros((D,)), "whole": 3}[e] if isinstance(e, str) else every[e % len(every)]


def run(block: Block, values: Sequence[Any]) -> list[Any]:
    """The outputs of a block. Positions are taken modulo the number of values."""
    env = list(values)
    for step in block.steps:
        env += _step(step, env)
    return [env[k % len(env)] for k in block.outputs]


def _step(step: Step, env: list[Any]) -> list[Any]:
    kind, *rest = step
    at = lambda k: env[k % len(env)]  # noqa: E731
    if kind == "dot":
        return [at(rest[0]) @ at(rest[1]) / D]
    if kind == "add":
        return [at(rest[0]) + at(rest[1])]
    if kind == "mul":
        return [at(rest[0]) * at(rest[1])]
    if kind == "tanh":
        return [jnp.tanh(at(rest[0]))]
    positions, block, other = rest
    operands = [at(k) for k in positions]
    n = len(operands)
    outputs = (block.outputs * n)[:n]  # as many as a carry has
    carried = Block(block.steps, outputs)
    if kind == "remat":
        return list(jax.checkpoint(lambda *o: tuple(run(block, o)))(*operands))
    if kind == "jit":
        return list(jax.jit(lambda *o: tuple(run(block, o)))(*operands))
    if kind == "cond":
        branches = [lambda *o, b=b: tuple(run(Block(b.steps, (b.outputs * n)[:n]), o)) for b in (block, other)]
        return list(lax.cond(jnp.sum(env[0]) > 0, *branches, *operands))
    if kind == "while":
        operands = [lax.stop_gradient(o) for o in operands]
        step_ = lambda c: (c[0] + 1, tuple(run(carried, c[1])))  # noqa: E731
        return list(lax.while_loop(lambda c: c[0] < LENGTH, step_, (0, tuple(operands)))[1])
    if kind == "custom_vjp":
        return list(_with_rule(carried)(*operands))
    if kind == "vmap":
        return list(jax.vmap(lambda *o: tuple(run(_without_products(carried), o)))(*operands))
    body = lambda c, x: (tuple(run(carried, (*c, x))), [*run(carried, (*c, x))[:1], c[0]])  # noqa: E731
    if "remat" in kind.partition("scan")[2]:
        body = jax.checkpoint(body)
    scan = lambda *o: lax.scan(body, o, jnp.stack([env[0]] * LENGTH))  # noqa: E731
    scan = jax.checkpoint(scan) if kind.startswith("remat") else scan
    carry, ys = scan(*operands)
    return [*carry, *(y.sum(0) for y in ys)]


def _without_products(block: Block) -> Block:
    """The block without the products in it, in nested blocks too: of two rows, which `vmap` makes of matrices, they are numbers."""
    steps = (
        tuple(_without_products(part) if isinstance(part, Block) else part for part in s) for s in block.steps if s[0] != "dot"
    )
    return Block(tuple(steps), block.outputs)


def _with_rule(block: Block) -> Any:
    call = jax.custom_vjp(lambda *o: tuple(run(block, o)))
    call.defvjp(lambda *o: (tuple(run(block, o)), o), lambda o, cts: tuple(2 * ct for ct in cts))
    return call


POSITION = st.integers(0, 11)
PLAIN = st.one_of(
    st.tuples(st.sampled_from(["dot", "add", "mul"]), POSITION, POSITION),
    st.tuples(st.just("tanh"), POSITION),
)


def blocks(depth: int) -> st.SearchStrategy[Block]:
    """Blocks with wrappers down to a depth."""
    steps: Any = PLAIN if depth == 0 else st.one_of(PLAIN, wrapped(depth - 1))
    outputs = st.lists(POSITION, min_size=1, max_size=4).map(tuple)
    return st.builds(Block, st.lists(steps, min_size=0, max_size=3).map(tuple), outputs)


def wrapped(depth: int) -> st.SearchStrategy[Step]:
    """A block inside of a loop, a branch, a call or a checkpoint, whose operands may be the same value several times."""
    operands = st.lists(POSITION, min_size=1, max_size=3)
    return st.tuples(st.sampled_from(WRAPPERS), operands, blocks(depth), blocks(depth))


EXTRA = st.one_of(POSITION, st.sampled_from(["number", "zeros", "whole"]))
programs = st.builds(
    Program,
    st.builds(
        lambda first, block: Block((first, *block.steps), block.outputs),
        wrapped(1),
        blocks(1),
    ),
    st.lists(EXTRA, max_size=4).map(tuple),
)
