"""Pallas kernels without a declaration: the divisions read off their grids and index maps, and plans that use them."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import ends, fewer, one_in
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu
from jax.ref import addupdate, swap
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import unity
from unity.pcg.capture.capture import capture
from unity.pcg.operators.pallas_kernels import PallasKernel, inferred
from unity.pcg.operators.pallas_sums import is_sum
from unity.plan.plan import Plan

MACHINE = unity.Machine.grid(1, 8, "a100")
BLOCK = 8


def spec(*blocks: int | None, at: Callable[..., Any]) -> pl.BlockSpec:
    return pl.BlockSpec(blocks, at)


def first(axis: int) -> Any:
    return pl.when(pl.program_id(axis) == 0)


def call_on_blocks(kernel: Callable[..., None], x: Any, y: Any, **options: Any) -> Any:
    """Call a kernel for each block of a product of matrices, and for each pair of blocks that are multiplied for it."""
    (m, k), n, b = x.shape, y.shape[1], BLOCK
    return pl.pallas_call(
        kernel,
        grid=(m // b, n // b, k // b),
        in_specs=[spec(b, b, at=lambda i, j, k: (i, k)), spec(b, b, at=lambda i, j, k: (k, j))],
        out_specs=spec(b, b, at=lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        interpret=True,
        **options,
    )(x, y)


def product(x: Any, y: Any) -> Any:
    """Multiply matrices, adding up over the last grid dimension."""

    def kernel(x: Any, y: Any, out: Any) -> None:
        @first(2)
        def _() -> None:
            out[...] = jnp.zeros_like(out)

        out[...] += x[...] @ y[...]

    return call_on_blocks(kernel, x, y, name="product")


def product_in_scratch(x: Any, y: Any) -> Any:
    """Multiply matrices, adding up in memory of the kernel's own, as on a TPU."""

    def kernel(x: Any, y: Any, out: Any, total: Any) -> None:
        @first(2)
        def _() -> None:
            total[...] = jnp.zeros_like(total)

        total[...] += x[...] @ y[...]

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _() -> None:
            out[...] = total[...]

    return call_on_blocks(kernel, x, y, scratch_shapes=[tpu.VMEM((BLOCK, BLOCK), x.dtype)])


def attention(q: Any, k: Any, v: Any, causal: bool = False) -> Any:
    """Attend over `[batch, heads, length, width]`, a block of queries in each step."""

    def kernel(q: Any, k: Any, v: Any, out: Any) -> None:
        scores = q[...] @ k[...].T
        if causal:
            row = pl.program_id(2) * BLOCK + lax.broadcasted_iota(jnp.int32, scores.shape, 0)
            scores = jnp.where(row >= lax.broadcasted_iota(jnp.int32, scores.shape, 1), scores, -1e9)
        out[...] = jax.nn.softmax(scores) @ v[...]

    b, h, s, d = q.shape
    whole = spec(None, None, s, d, at=lambda b, h, i: (b, h, 0, 0))
    block = spec(None, None, BLOCK, d, at=lambda b, h, i: (b, h, i, 0))
    return pl.pallas_call(
        kernel,
        grid=(b, h, s // BLOCK),
        in_specs=[block, whole, whole],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        interpret=True,
        name="attention",
    )(q, k, v)


def attended(q: Any, k: Any, v: Any, causal: bool = False) -> Any:
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k)
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[2:], bool)), scores, -1e9) if causal else scores
    return jax.nn.softmax(scores) @ v


def running_sum(x: Any) -> Any:
    """Add up along the rows, with the sum so far in the kernel's own memory."""

    def kernel(x: Any, out: Any, total: Any) -> None:
        total[...] = jnp.where(x[0, 0] == jnp.inf, 0.0, total[...]) + x[...].sum(0, keepdims=True)
        out[...] = jnp.broadcast_to(total[...], out.shape)

    rows, columns = x.shape
    block = spec(1, BLOCK, at=lambda j, i: (i, j))
    return pl.pallas_call(
        kernel,
        grid=(columns // BLOCK, rows),
        in_specs=[block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_shapes=[tpu.VMEM((1, BLOCK), x.dtype)],
        interpret=True,
    )(x)


def looked_up(rows: Any, table: Any) -> Any:
    """Take rows of a table, a block of columns in each step."""

    def kernel(rows: Any, table: Any, out: Any) -> None:
        out[...] = table[...]

    specs = tpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(len(rows), table.shape[1] // BLOCK),
        in_specs=[spec(1, BLOCK, at=lambda i, j, rows: (rows[i], j))],
        out_specs=spec(1, BLOCK, at=lambda i, j, rows: (i, j)),
    )
    types = jax.ShapeDtypeStruct((len(rows), table.shape[1]), table.dtype)
    return pl.pallas_call(kernel, grid_spec=specs, out_shape=types, interpret=True)(rows, table)


def kernel_of(fn: Callable[..., Any], *args: Any) -> PallasKernel:
    """Return the kernel in a function of arrays of these shapes."""
    program = jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(shape, "float32") for shape in args))
    (eqn,) = [e for e in program.eqns if e.primitive.name == "pallas_call"]
    return inferred(eqn).args[0]


def normal(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype("float32") / 4 for shape in shapes]


# What is inferred


@pytest.mark.parametrize(
    ("fn", "shapes", "split", "summed", "reasons"),
    [
        (product, [(16, 32), (32, 24)], "g0 g1", "g2", []),
        (product, [(16, 8), (8, 8)], "g0", "", []),  # a single step along the others
        (product_in_scratch, [(16, 32), (32, 24)], "g0 g1", "", ["grid dimension 2: result 0 is not provably a sum"]),
        (attention, [(4, 2, 16, 8)] * 3, "g0 g1 g2", "", []),
        (partial(attention, causal=True), [(4, 2, 16, 8)] * 3, "g0 g1", "", ["grid dimension 2: its program asks for the number"]),
        (jax.vmap(product, (0, None)), [(4, 16, 32), (32, 24)], "g0 g1 g2", "g3", []),
    ],
    ids=["matrix product", "single steps", "scratch", "attention", "causal attention", "vmap"],
)
def test_divisions_follow_from_grids_and_index_maps(fn: Any, shapes: Any, split: str, summed: str, reasons: list[str]) -> None:
    kernel = kernel_of(fn, *shapes)
    assert kernel.dimensions.split == tuple(split.split())
    assert kernel.dimensions.summed == tuple(summed.split())
    assert len(kernel.whole) == len(reasons)
    assert all(reason in said for reason, said in zip(reasons, kernel.whole, strict=True))


def test_steps_that_leave_something_to_the_next_are_not_divided() -> None:
    kernel = kernel_of(running_sum, (16, 16))
    assert not kernel.walks
    assert all("scratch memory is not provably set before it is read" in reason for reason in kernel.whole)
    assert len(kernel.whole) == 2


@pytest.mark.parametrize(
    ("keep", "dtype"), [(lambda r: r == 0, "float32"), (lambda r: r != 1, "float32"), (lambda r: r > 1, "int32")]
)
def test_what_is_left_for_some_arguments_only_is_not_divided(keep: Any, dtype: str) -> None:
    """Sums over time that restart at marks. The first row has one, so that nothing is read that was not set."""
    x, marks = jnp.ones((32, BLOCK)), jnp.full((32, BLOCK), 2, dtype).at[0].set(1)
    marks = marks if keep(marks[1, 0]) else marks * 0 + marks.at[1:].set(0)

    def fn(x: Any, marks: Any) -> Any:
        def kernel(x: Any, marks: Any, out: Any, total: Any) -> None:
            total[...] = jnp.where(keep(marks[...]), total[...], 0.0) + x[...]
            out[...] = total[...]

        return in_scratch(kernel, (len(x), 1), x, marks)

    right = np.cumsum(x, 0)
    np.testing.assert_allclose(fn(x, marks), right)
    plan = unity.optimize(fn, x, marks, training=False, machine=unity.Machine.grid(1, 8, "a100"), budget=0, progress=False)
    np.testing.assert_allclose(jax.jit(plan)(*plan.shard(x, marks)), right)


def in_scratch(kernel: Any, grid: tuple[int, ...], *arrays: Any, scratch: tuple[int, ...] = (1, BLOCK)) -> Any:
    """Call a kernel on blocks of a row, with scratch memory; the number of a block is the step along both dimensions."""
    block = spec(1, BLOCK, at=lambda i, j: (i, j))
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[block] * len(arrays),
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype),
        scratch_shapes=[tpu.VMEM(scratch, arrays[0].dtype)],
        interpret=True,
    )(*arrays)


def set_whole(x: Any, total: Any) -> None:
    total[...] = x[...]


def set_in_each_row(x: Any, total: Any) -> None:
    total[0] = x[0]


def set_by_either_branch(x: Any, total: Any) -> None:
    lax.cond(x[0, 0] > 0, lambda: set_whole(x, total), lambda: set_whole(x, total))


def set_in_a_loop(x: Any, total: Any) -> None:
    lax.fori_loop(0, 2, lambda i, c: (set_whole(x, total), c)[1], 0)


def set_at_the_first_column(x: Any, total: Any) -> None:
    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        set_whole(x, total)


def set_in_part(x: Any, total: Any) -> None:
    total[0, :4] = x[0, :4]


def set_for_some_arguments(x: Any, total: Any) -> None:
    @pl.when(x[0, 0] > -100)
    def _() -> None:
        set_whole(x, total)


def set_if_a_loop_takes_a_step(x: Any, total: Any) -> None:
    lax.while_loop(lambda c: c < x[0, 0], lambda c: (set_whole(x, total), c + 1)[1], -100.0)


def set_at_the_second_column(x: Any, total: Any) -> None:
    @pl.when(pl.program_id(1) == 1)
    def _() -> None:
        set_whole(x, total)


def set_in_two_parts(x: Any, total: Any) -> None:
    total[0, :4] = x[0, :4]
    total[0, pl.ds(4, 4)] = x[0, 4:]


def set_twice_in_part(x: Any, total: Any) -> None:
    set_in_part(x, total)
    set_in_part(x, total)


def set_beside_other_memory(x: Any, total: Any) -> None:
    def body(own: Any) -> None:
        own[...] = total[...]

    pl.run_scoped(body, tpu.VMEM((1, BLOCK), x.dtype))


def set_in_other_memory(x: Any, total: Any) -> None:
    pl.run_scoped(lambda own: set_whole(x, own), tpu.VMEM((1, BLOCK), x.dtype))


def read_in_the_second_round(x: Any, total: Any) -> None:
    def body(i: Any, c: Any) -> Any:
        @pl.when(c != 0)
        def _() -> None:
            total[...] = total[...] + 1

        return c + 1

    lax.fori_loop(0, 2, body, pl.program_id(1))
    set_whole(x, total)


def set_if_a_rounded_number_is_not_zero(x: Any, total: Any) -> None:
    @pl.when((pl.program_id(1) + 0.7).astype("int32") != 0)
    def _() -> None:
        set_whole(x, total)


def set_if_a_wrapped_number_is_positive(x: Any, total: Any) -> None:
    @pl.when((pl.program_id(1) + 200).astype("int8") > 0)
    def _() -> None:
        set_whole(x, total)


def set_if_a_boolean_is_two(x: Any, total: Any) -> None:
    @pl.when((pl.program_id(1) + 2).astype(bool).astype("int32") == 2)
    def _() -> None:
        set_whole(x, total)


def read_while_set(x: Any, total: Any) -> None:
    total[...] = x[...] + 0 * total[...]


@pytest.mark.parametrize(
    ("first", "split"),
    [
        (set_whole, "g0 g1"),
        (set_in_each_row, "g0 g1"),
        (set_by_either_branch, "g0 g1"),
        (set_in_a_loop, "g0 g1"),
        (set_at_the_first_column, "g0"),  # what the columns of a row add up
        (set_in_two_parts, "g0 g1"),
        (set_in_part, ""),
        (set_twice_in_part, ""),
        (set_beside_other_memory, ""),
        (set_in_other_memory, ""),
        (read_in_the_second_round, ""),
        (set_if_a_rounded_number_is_not_zero, ""),
        (set_if_a_wrapped_number_is_positive, ""),
        (set_if_a_boolean_is_two, ""),
        (set_for_some_arguments, ""),
        (set_if_a_loop_takes_a_step, ""),
        (set_at_the_second_column, ""),
        (read_while_set, ""),
    ],
)
def test_only_what_is_set_before_it_is_read_is_divided(first: Any, split: str) -> None:
    def fn(x: Any) -> Any:
        def kernel(x: Any, out: Any, total: Any) -> None:
            first(x, total)
            total[...] += x[...]
            out[...] = total[...]

        return in_scratch(kernel, (4, 2), x)

    assert kernel_of(fn, (4, 2 * BLOCK)).dimensions.split == tuple(split.split())


def test_fewer_bits_than_all_do_not_set_memory() -> None:
    def fn(x: Any) -> Any:
        def kernel(x: Any, out: Any, total: Any) -> None:
            total.bitcast("int8")[0:8, :] = jnp.zeros((8, 8), "int8")  # as many elements, a quarter of the bytes
            total[...] += jnp.broadcast_to(x[...], (8, 8))
            out[...] = total[7:8]

        return in_scratch(kernel, (4, 2), x, scratch=(8, 8))

    assert not kernel_of(fn, (4, 2 * BLOCK)).walks


def test_a_row_that_is_counted_from_the_end_and_replaced_is_read() -> None:
    def fn(x: Any) -> Any:
        def kernel(x: Any, out: Any, total: Any) -> None:
            last: Any = (pl.ds(-1, 1), slice(None))
            old = swap(total, last, jnp.zeros((1, BLOCK)))
            total[...] = jnp.broadcast_to(old + x[...], (8, BLOCK))
            out[...] = old

        return in_scratch(kernel, (4, 2), x, scratch=(8, BLOCK))

    assert not kernel_of(fn, (4, 2 * BLOCK)).walks


def test_a_semaphore_that_counts_steps_is_memory() -> None:
    def fn(x: Any) -> Any:
        def kernel(x: Any, out: Any, count: Any) -> None:
            pl.semaphore_signal(count, 1)
            out[...] = x[...] * pl.semaphore_read(count).astype("float32")

        block = spec(1, BLOCK, at=lambda i: (i, 0))
        options = {"in_specs": [block], "out_specs": block, "scratch_shapes": [tpu.SemaphoreType.REGULAR], "interpret": True}
        return pl.pallas_call(kernel, grid=(4,), out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), **options)(x)

    assert not kernel_of(fn, (4, BLOCK)).walks


def test_memory_that_is_not_used_does_not_matter() -> None:
    def fn(x: Any) -> Any:
        def kernel(x: Any, out: Any, total: Any) -> None:
            out[...] = 2 * x[...]

        return in_scratch(kernel, (4, 2), x)

    assert kernel_of(fn, (4, 2 * BLOCK)).dimensions.split == ("g0", "g1")


def test_an_operand_that_a_kernel_writes_is_not_divided() -> None:
    def fn(x: Any, total: Any) -> Any:
        def kernel(x: Any, total: Any, out: Any) -> None:
            total[...] = total[...] + x[...]
            out[...] = total[...]

        block = spec(1, BLOCK, at=lambda i: (i, 0))
        whole = spec(1, BLOCK, at=lambda i: (0, 0))
        types = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(kernel, grid=(4,), in_specs=[block, whole], out_specs=block, out_shape=types, interpret=True)(
            x, total
        )

    kernel = kernel_of(fn, (4, BLOCK), (1, BLOCK))
    assert not kernel.walks
    assert "writes to an operand" in kernel.whole[0]


def test_operands_and_results_in_the_same_memory_are_divided_alike() -> None:
    def fn(x: Any) -> Any:
        def kernel(x: Any, out: Any) -> None:
            out[...] = jnp.broadcast_to(x[pl.ds(0, 1), :] + 1, out.shape)

        whole, block = spec(2**20, BLOCK, at=lambda i: (0, 0)), spec(2**18, BLOCK, at=lambda i: (i, 0))
        types = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(
            kernel, grid=(4,), in_specs=[whole], out_specs=block, out_shape=types, input_output_aliases={0: 0}, interpret=True
        )(x)

    kernel = kernel_of(fn, (2**20, BLOCK))
    assert not kernel.walks


@pytest.mark.parametrize(
    ("at", "reason"),
    [
        (lambda i: (i // 2, 0), "the index map of operand 0 does more than count its blocks"),
        (lambda i: (3 - i, 0), "the index map of operand 0 does more"),
        (lambda i: (i, i), "the index map of operand 0 does more"),
        (lambda i: (0, 0), "it walks no operand"),
    ],
)
def test_other_index_maps_are_not_divided(at: Any, reason: str) -> None:
    def fn(x: Any) -> Any:
        def kernel(x: Any, out: Any) -> None:
            out[...] = 2 * x[...]

        types = jax.ShapeDtypeStruct((32, 8), x.dtype)
        specs = {"in_specs": [spec(8, 8, at=at)], "out_specs": spec(8, 8, at=lambda i: (i, 0))}
        return pl.pallas_call(kernel, grid=(4,), out_shape=types, interpret=True, **specs)(x)

    (said,) = kernel_of(fn, (32, 32)).whole
    assert reason in said


def test_blocks_that_reach_beyond_the_array_are_not_divided() -> None:
    def fn(x: Any) -> Any:
        def kernel(x: Any, out: Any) -> None:
            out[...] = 2 * x[...]

        block = spec(8, at=lambda i: (i,))
        return pl.pallas_call(kernel, grid=(4,), in_specs=[block], out_specs=block, out_shape=x, interpret=True)(x)

    (said,) = kernel_of(fn, (30,)).whole
    assert "its blocks do not divide dimension 0 of operand 0" in said


def accumulated(body: Callable[[Any, Any], None], *, clears: bool = True) -> Callable[[Any], Any]:
    """Return a kernel whose only result has one block, which every step changes by `body`."""

    def fn(x: Any) -> Any:
        def kernel(x: Any, out: Any) -> None:
            if clears:

                @first(0)
                def _() -> None:
                    out[...] = jnp.zeros_like(out)

            body(x, out)

        specs = {"in_specs": [spec(1, 8, at=lambda i: (i, 0))], "out_specs": spec(1, 8, at=lambda i: (0, 0))}
        total = jax.ShapeDtypeStruct((1, x.shape[1]), x.dtype)
        return pl.pallas_call(kernel, grid=(len(x),), out_shape=total, interpret=True, **specs)(x)

    return fn


def add(x: Any, out: Any) -> None:
    out[...] += x[...] ** 2


def add_from_the_left(x: Any, out: Any) -> None:
    out[...] = jnp.sin(x[...]) + out[...]


def add_scaled(x: Any, out: Any) -> None:
    out[...] = 2 * out[...] + x[...]


def add_of_itself(x: Any, out: Any) -> None:
    out[...] += x[...] * (1 + out[...])


def add_twice(x: Any, out: Any) -> None:
    out[...] += x[...]
    out[...] += out[...] * x[...]


def maximum(x: Any, out: Any) -> None:
    out[...] = jnp.maximum(out[...], x[...])


def add_where_positive(x: Any, out: Any) -> None:
    @pl.when(out[0, 0] >= 0)
    def _() -> None:
        out[...] += x[...]


def add_number(x: Any, out: Any) -> None:
    out[...] += x[...] * pl.program_id(0)


def add_the_first_twice(x: Any, out: Any) -> None:
    out[...] += x[...] * jnp.where(pl.program_id(0) == 0, 2.0, 1.0)


def add_ones_first(x: Any, out: Any) -> None:
    @first(0)
    def _() -> None:
        out[...] = jnp.ones_like(out)

    out[...] += x[...]


def overwrite(x: Any, out: Any) -> None:
    out[...] = x[...]


def add_in_place(x: Any, out: Any) -> None:
    addupdate(out, ..., x[...])


def add_total_in_place(x: Any, out: Any) -> None:
    addupdate(out, ..., x[...] + out[...])


SUMS = (add, add_from_the_left, add_in_place)
OTHERS = (
    add_scaled, add_of_itself, add_twice, maximum, add_where_positive, add_number, add_the_first_twice, add_ones_first, overwrite,
    add_total_in_place,
)  # fmt: skip


@pytest.mark.parametrize("body", [*SUMS, *OTHERS])
def test_sums_are_those_that_add_up_from_zero(body: Any) -> None:
    """The proof says of no kernel that it is a sum if halves of random numbers show that it is not."""
    fn = accumulated(body)
    (eqn,) = jax.make_jaxpr(fn)(jnp.ones((4, 8))).eqns
    program = eqn.params["jaxpr"]
    proved = is_sum(program, 0, program.invars[1:])
    (x,) = normal((4, 8))
    adds_up = np.allclose(fn(x), fn(x[:2]) + fn(x[2:]), rtol=1e-5)
    assert proved == adds_up == (body in SUMS)
    assert bool(inferred(eqn).args[0].walks) == proved


def test_a_total_that_is_not_set_to_zero_is_no_sum() -> None:
    (eqn,) = jax.make_jaxpr(accumulated(add, clears=False))(jnp.ones((4, 8))).eqns
    assert not inferred(eqn).args[0].walks


def test_a_total_that_a_loop_changes_is_not_divided() -> None:
    def add_in_loop(x: Any, out: Any) -> None:
        def step(carry: None, _: None) -> tuple[None, None]:
            out[...] += x[...]
            return carry, None

        lax.scan(step, None, None, length=2)

    (eqn,) = jax.make_jaxpr(accumulated(add_in_loop))(jnp.ones((4, 8))).eqns
    assert "is not provably a sum" in inferred(eqn).args[0].whole[0]


@pytest.mark.parametrize("rows", [4, 512])  # of 512 there is no trial
@pytest.mark.parametrize(
    ("inner", "width", "summed"),
    [(lambda i, j: (0, 0), 8, ""), (lambda i, j: (0, j // 2), 16, ""), (lambda i, j: (0, j), 32, "g0")],
)
def test_a_total_that_an_inner_dimension_sets_again_is_no_sum(inner: Any, width: int, summed: str, rows: int) -> None:
    """In the first step of the outer dimension, each step of the inner one sets its block to zero."""

    def fn(x: Any) -> Any:
        def kernel(x: Any, out: Any) -> None:
            @first(0)
            def _() -> None:
                out[...] = jnp.zeros_like(out)

            out[...] += x[...]

        specs = {"in_specs": [spec(1, 8, at=lambda i, j: (i, j))], "out_specs": spec(1, 8, at=inner)}
        total = jax.ShapeDtypeStruct((1, width), x.dtype)
        return pl.pallas_call(kernel, grid=(len(x), 4), out_shape=total, interpret=True, **specs)(x)

    (eqn,) = jax.make_jaxpr(fn)(jnp.ones((rows, 32), jnp.int32)).eqns
    assert " ".join(inferred(eqn).args[0].dimensions.summed) == summed


def test_an_index_map_that_asks_for_the_step_is_not_divided() -> None:
    def fn(x: Any) -> Any:
        def kernel(x: Any, y: Any, out: Any) -> None:
            out[...] = x[...] + y[...]

        specs = [spec(8, 8, at=lambda i: (i, 0)), spec(8, 8, at=lambda i: (pl.program_id(0), 0))]
        return pl.pallas_call(kernel, grid=(4,), in_specs=specs, out_specs=specs[0], out_shape=x, interpret=True)(x, x)

    (said,) = kernel_of(fn, (32, 8)).whole
    assert "the index map of operand 1 does more" in said


@pytest.mark.parametrize(("dtype", "walks"), [("bool", 0), ("uint8", 0), ("bfloat16", 0), ("float32", 0), ("int16", 1)])
def test_an_index_map_that_narrows_the_step_does_not_walk(dtype: str, walks: int) -> None:
    """Of two steps, as a trial has, each is itself in all these types."""

    def fn(x: Any) -> Any:
        def kernel(x: Any, out: Any) -> None:
            out[...] = x[...]

        specs = {"in_specs": [spec(1, at=lambda i: (i.astype(dtype).astype("int32"),))], "out_specs": spec(1, at=lambda i: (i,))}
        return pl.pallas_call(kernel, grid=(512,), out_shape=x, interpret=True, **specs)(x)

    assert len(kernel_of(fn, (512,)).walks) == walks


def into_part(x: Any, buffer: Any) -> Any:
    """Add blocks up into the first part of a buffer, whose other parts stay; there is no trial of so many bytes."""

    def kernel(x: Any, _: Any, out: Any) -> None:
        @first(0)
        def _() -> None:
            out[...] = jnp.zeros_like(out)

        out[...] += x[...]

    place = spec(2**19, 8, at=lambda i: (0, 0))
    specs = {"in_specs": [spec(2**19, 8, at=lambda i: (i, 0)), place], "out_specs": place}
    return pl.pallas_call(kernel, grid=(8,), out_shape=buffer, interpret=True, input_output_aliases={1: 0}, **specs)(x, buffer)


def in_windows(x: Any) -> Any:
    """Set windows that overlap to zero one after the other, and add to them."""

    def kernel(x: Any, out: Any) -> None:
        @first(0)
        def _() -> None:
            out[...] = jnp.zeros_like(out)

        out[...] += x[0]

    windows = pl.BlockSpec((pl.Element(2),), lambda i, j: (j,))
    specs = {"in_specs": [spec(1, 1, at=lambda i, j: (i, 0))], "out_specs": windows}
    return pl.pallas_call(kernel, grid=(8, 600), out_shape=jax.ShapeDtypeStruct((601,), x.dtype), interpret=True, **specs)(x)


def by_name(x: Any) -> Any:
    """Multiply by the number of the step along a grid dimension with a name; there is no trial of so many bytes."""

    def kernel(x: Any, out: Any) -> None:
        out[...] = x[...] * (1 + lax.axis_index("i"))

    block = spec(2**23, at=lambda i: (i,))
    grid: Any = (("i", 32),)
    return pl.pallas_call(kernel, grid=grid, in_specs=[block], out_specs=block, out_shape=x, interpret=True)(x)


def drawing(x: Any) -> Any:
    """Draw random numbers from the generator that the first step seeds."""

    def kernel(x: Any, out: Any) -> None:
        @first(0)
        def _() -> None:
            tpu.prng_seed(0)

        out[...] = x[...] + tpu.prng_random_bits((1, 8)).astype(x.dtype)

    block = spec(1, 8, at=lambda i, j: (i, j))
    return pl.pallas_call(kernel, grid=(600, 2), in_specs=[block], out_specs=block, out_shape=x, interpret=True)(x)


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [(into_part, [(2**22, 8), (2**20, 8)]), (in_windows, [(8, 1)]), (by_name, [(2**28,)]), (drawing, [(600, 16)])],
)
def test_what_no_trial_would_show_is_not_divided(fn: Any, shapes: Any) -> None:
    assert not kernel_of(fn, *shapes).walks


@pytest.mark.parametrize("function", [jnp.log, jnp.sqrt, lambda x: jnp.where(x > 0, x, -jnp.inf)])
def test_equal_values_that_are_not_finite_do_not_differ(function: Any) -> None:
    """Random numbers are negative, too."""

    def fn(x: Any) -> Any:
        def kernel(x: Any, out: Any) -> None:
            out[...] = function(x[...])

        block = spec(2, 8, at=lambda i: (i, 0))
        return pl.pallas_call(kernel, grid=(4,), in_specs=[block], out_specs=block, out_shape=x, interpret=True)(x)

    assert len(kernel_of(fn, (8, 8)).walks) == 1


def test_kernels_that_differ_in_a_stride_are_two() -> None:
    """JAX prints their programs alike."""

    def fn(x: Any) -> Any:
        def rows(stride: int) -> Any:
            def kernel(x: Any, out: Any) -> None:
                out[...] = x[pl.ds(0, 2, stride), :]

            specs = {"in_specs": [spec(4, 8, at=lambda i: (i, 0))], "out_specs": spec(2, 8, at=lambda i: (i, 0))}
            result = jax.ShapeDtypeStruct((len(x) // 2, 8), x.dtype)
            return pl.pallas_call(kernel, grid=(len(x) // 4,), out_shape=result, interpret=True, **specs)(x)

        return rows(1), rows(2)

    (x,) = normal((16, 8))
    contiguous, strided = unity.optimize(fn, x, training=False, machine=MACHINE, progress=False)(x)
    np.testing.assert_array_equal(contiguous[:2], x[:2])
    np.testing.assert_array_equal(strided[:2], x[:4:2])


def test_equal_kernels_are_one_function() -> None:
    def two(x: Any, y: Any) -> Any:
        return product(product(x, y), y)

    def fns() -> list[Any]:
        eqns = [e for e in jax.make_jaxpr(two)(*normal((16, 16), (16, 16))).eqns if e.primitive.name == "pallas_call"]
        return [inferred(e) for e in eqns]

    (one, other), again = fns(), fns()
    assert one is other is again[0]
    (eqn,) = jax.make_jaxpr(product)(*normal((16, 16), (16, 24))).eqns
    assert inferred(eqn) is not one


# Any index maps


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[int | None]]]:
    """Draw a grid, and for the two dimensions of two operands and a result the grid dimension that walks each, if any."""
    grid = tuple(draw(st.sampled_from([2, 4])) for _ in range(draw(st.integers(1, 3))))
    choices = st.lists(st.sampled_from([None, *range(len(grid))]), min_size=2, max_size=2)
    return grid, [draw(choices) for _ in range(3)]


@settings(max_examples=fewer(10))
@given(layouts(), st.data())
def test_a_smaller_grid_computes_the_blocks_of_smaller_arrays(layout: Any, data: Any) -> None:
    """A kernel over fewer blocks is what its author's code would be for arrays of that size."""
    grid, walked = layout

    def call(sizes: tuple[int, ...], *operands: Any) -> Any:
        def kernel(x: Any, y: Any, out: Any) -> None:
            out[...] = jnp.sin(x[...]) + 2 * y[...]

        specs = [spec(2, 2, at=lambda *ids, w=w: tuple(0 if d is None else ids[d] for d in w)) for w in walked]
        result = tuple(2 if d is None else 2 * sizes[d] for d in walked[2])
        types = jax.ShapeDtypeStruct(result, "float32")
        run = pl.pallas_call(kernel, grid=sizes, in_specs=specs[:2], out_specs=specs[2], out_shape=types, interpret=True)
        return run(*operands)

    def shape(w: list[int | None], sizes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(2 if d is None else 2 * sizes[d] for d in w)

    kernel = kernel_of(partial(call, grid), *(shape(w, grid) for w in walked[:2]))
    expected = {d for d in range(len(grid)) if walked[2].count(d) == 1 and all(w.count(d) < 2 for w in walked)}
    expected = {d for d in expected if any(d in w for w in walked[:2])}
    assert {w.grid for w in kernel.walks} == expected
    assume(expected)
    d = data.draw(st.sampled_from(sorted(expected)))
    sizes = tuple(1 if k == d else n for k, n in enumerate(grid))
    operands = normal(*(shape(w, sizes) for w in walked[:2]))
    (result,) = kernel.run(*(kernel.blocked(k, x) for k, x in enumerate(operands)))
    np.testing.assert_array_equal(result.reshape(shape(walked[2], sizes)), call(sizes, *operands))


# Plans


@jax.custom_vjp
def multiplied(x: Any, y: Any) -> Any:
    return product(x, y)


multiplied.defvjp(lambda x, y: (product(x, y), (x, y)), lambda kept, g: (product(g, kept[1].T), product(kept[0].T, g)))


@jax.custom_vjp
def attending(q: Any, k: Any, v: Any) -> Any:
    return attention(q, k, v)


attending.defvjp(lambda *qkv: (attention(*qkv), qkv), lambda qkv, g: jax.vjp(attended, *qkv)[1](g))


def layers(params: Any, x: Any) -> Any:
    def layer(h: Any, w: Any) -> Any:
        return h + jnp.tanh(multiplied(h, w)), None

    return (lax.scan(jax.checkpoint(layer), x, params)[0] ** 2).mean()


def plain_layers(params: Any, x: Any) -> Any:
    return (lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, params)[0] ** 2).mean()


REGION = AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,))
ROWS, HEADS, ALL = P("x"), P(None, "x"), P()


def on_devices(fn: Callable[..., Any], *specs: P) -> Callable[..., Any]:
    """Return a function of one device's pieces as one of all, whose results are as its first operand."""
    return jax.shard_map(fn, mesh=REGION, in_specs=specs, out_specs=specs[0], check_vma=False)


def planned(fn: Any, *args: Any, **options: Any) -> Plan:
    return unity.optimize(fn, *args, machine=MACHINE, budget=0, progress=False, **options)


def states(plan: Plan, kind: str) -> set[str]:
    nodes = (node for node, _ in plan.program.pcg.walk() if node.kind == kind)
    return {s.kind for node in nodes for v in (*node.operands, *node.results) for s in v.type}


@pytest.mark.parametrize(
    ("fn", "plain", "shapes", "kind"),
    one_in(
        2,
        [
            (
                lambda w, x: (jnp.tanh(multiplied(x, w)) ** 2).sum(),
                lambda w, x: (jnp.tanh(x @ w) ** 2).sum(),
                [(64, 64), (64, 64)],
                "product",
            ),
            (layers, plain_layers, [(2, 64, 64), (64, 64)], "product"),
            (
                lambda w, x: (attending(x * w, x, x) ** 2).sum(),
                lambda w, x: (attended(x * w, x, x) ** 2).sum(),
                [(1, 1, 16, 8), (8, 2, 16, 8)],
                "attention",
            ),
            (
                lambda w, x: (jnp.tanh(on_devices(multiplied, ROWS, ALL)(x, w)) ** 2).sum(),
                lambda w, x: (jnp.tanh(x @ w) ** 2).sum(),
                [(64, 64), (64, 64)],
                "product",
            ),
            (
                lambda params, x: on_devices(lambda x, params: layers(params, x)[None], ROWS, ALL)(x, params).sum(),
                lambda params, x: sum(plain_layers(params, half) for half in jnp.split(x, 2)),
                [(2, 64, 64), (64, 64)],
                "product",
            ),
            (
                lambda w, x: (on_devices(attending, HEADS, HEADS, HEADS)(x * w, x, x) ** 2).sum(),
                lambda w, x: (attended(x * w, x, x) ** 2).sum(),
                [(1, 1, 16, 8), (8, 2, 16, 8)],
                "attention",
            ),
        ],
    ),
    ids=one_in(
        2,
        [
            *("product", "scan and remat", "attention"),
            *("product in a shard_map", "scan and remat in a shard_map", "attention in a shard_map"),
        ],
    ),
)
def test_plans_with_divided_kernels_are_the_function(fn: Any, plain: Any, shapes: Any, kind: str) -> None:
    args = normal(*shapes)
    every, wanted = set[str](), jax.jit(jax.value_and_grad(plain))(*args)
    for point in ends(planned(fn, *args).frontier[::3]):
        every |= states(point, kind)
        value = jax.jit(jax.value_and_grad(point))(*point.shard(*args))
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5), value, wanted)
    assert "P" in every


@pytest.mark.parametrize(
    ("fn", "shapes", "said"),
    [
        (running_sum, [(16, 16)], "runs whole on every device: grid dimension 0: its scratch memory is not provably set"),
        (
            partial(attention, causal=True),
            [(8, 2, 16, 8)] * 3,
            "can be divided, as inferred from its index maps, along grid dimension 0, 1; not along grid dimension 2: its",
        ),
        (product, [(64, 64), (64, 64)], r"can be divided, as inferred from its index maps, along grid dimension 0, 1, 2 \(a sum\)"),
    ],
)
def test_no_kernel_is_refused_and_explain_tells_its_divisions(fn: Any, shapes: Any, said: str) -> None:
    args = normal(*shapes)

    def model(*args: Any) -> Any:
        return 2 * fn(*args)

    plan = planned(model, *args, training=False)
    np.testing.assert_allclose(plan(*args), model(*args), rtol=1e-4, atol=1e-5)
    text = io.StringIO()
    plan.explain(text)
    assert re.search(rf"\(test_pallas_kernels\.py:\d+ \(\w+\)\), a Pallas kernel, {said}", " ".join(text.getvalue().split()))


def test_operands_that_index_maps_read_are_whole() -> None:
    rows, (table,) = np.array([3, 1, 2, 2], "int32"), normal((5, 64))
    (eqn,) = jax.make_jaxpr(looked_up)(rows, table).eqns
    kernel = inferred(eqn).args[0]
    assert kernel.dimensions.split == ("g1",)
    assert "grid dimension 0: the index map of operand 1 does more" in kernel.whole[0]
    for point in planned(looked_up, rows, table, training=False).frontier:
        np.testing.assert_array_equal(point(rows, table), table[rows])


def test_a_kernel_without_a_derivative_is_reported() -> None:
    """As jax.grad reports it: by an assertion without a message where the kernel reads its place in the grid."""
    reason = r"AssertionError without a message in \w+ \(.*:\d+\)"
    with pytest.raises(unity.KernelError, match=rf"product cannot be differentiated: {reason}\n.*jax\.custom_vjp"):
        planned(lambda w, x: product(x, w).sum(), *normal((16, 16), (16, 16)))
    assert capture(lambda w, x: product(x, w).sum(), *normal((16, 16), (16, 16)))


def test_a_saved_plan_finds_its_kernels(tmp_path: Any) -> None:
    args = normal((64, 64), (64, 64))
    plan = planned(plain := lambda w, x: (multiplied(x, w) ** 2).sum(), *args)
    plan.files.save(tmp_path / "plan.json")
    assert unity.load(tmp_path / "plan.json", plain, *args).time == plan.time
    assert plan.check().agrees()
