"""Peak memory by liveness: each pass on small programs, and the whole against what is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import AS_USERS
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from small_models import gpt, widens  # noqa: F401 (named in a condition)

from unity.exec.compiled.check import compare, compiler_options
from unity.exec.liveness.buffers import assigned
from unity.exec.liveness.copies import tasks
from unity.exec.liveness.fusion import kernels
from unity.exec.liveness.library import library_fusions
from unity.exec.liveness.packing import offsets, packed
from unity.exec.liveness.program import Builder, Program
from unity.exec.liveness.rules import lowered
from unity.exec.liveness.schedule import scheduled
from unity.machine.machine import Machine
from unity.optimize import optimize
from unity.pcg.ir.program import tensor_type
from unity.plan.plan import Plan
from unity.search.memory.backend import CPU, GPU
from unity.search.space.live_buffers import AGAIN, ARGUMENTS, GRADIENTS, KEPT, SLOTS

TARGET = 0.15  # of all bytes, at worst: what the benchmark asks for


def f(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def program(fn: Callable[..., Any], *args: Any, backend: Any = CPU) -> Program:
    return lowered(jax.make_jaxpr(fn)(*args), backend)


def kinds(found: Program) -> list[str]:
    return [op.kind for op in found.ops if op.kind != "constant"]


# Operations


def test_equal_operations_are_one_and_dead_ones_none() -> None:
    def fn(x: Any) -> Any:
        jnp.sin(x)
        return jnp.exp(x) + jnp.exp(x)

    assert kinds(program(fn, f(8))) == ["exp", "add"]


def test_operations_come_after_their_operands_the_first_first() -> None:
    b, small = Builder(), tensor_type((8,), np.dtype(np.float32))
    x = b.new(small)
    (late,) = b.emit("log", (x,), (small,))
    (early,) = b.emit("exp", (x,), (small,))
    found = b.program([x], [*b.emit("add", (early, late), (small,))])
    assert kinds(found) == ["exp", "log", "add"]


def test_a_division_by_a_constant_is_a_product_and_a_product_by_one_nothing() -> None:
    assert kinds(program(lambda x: (x * 1.0) / 3.0, f(8))) == ["broadcast", "multiply-inverse"]


@pytest.mark.parametrize(
    ("fn", "shapes", "expected"),
    [
        (lambda a, b: a @ b, ((4, 8), (8, 2)), ["dot"]),
        (lambda a, b: a.T @ b, ((8, 4), (8, 2)), ["dot"]),  # exchanged by the product itself
        (lambda a, b: (a @ b).T, ((4, 8), (8, 2)), ["dot"]),
        # two dimensions are summed over, which must lie next to each other
        (lambda a, b: jnp.einsum("bsi,bso->io", a, b), ((2, 3, 4), (2, 3, 5)), ["transpose", "bitcast", "bitcast", "dot"]),
    ],
)
def test_products_turn_what_they_must(fn: Any, shapes: Any, expected: list[str]) -> None:
    assert sorted(kinds(program(fn, *(f(*s) for s in shapes)))) == sorted(expected)


def test_operands_are_as_large_as_what_they_are_taken_with() -> None:
    """As JAX writes them: a dimension of size 1 that grows is dropped first, so that equal ones are one."""

    def fn(x: Any, y: Any) -> Any:
        return x[:, None] * y, lax.broadcast_in_dim(x, (8, 4), (0,)) + y

    found = program(fn, f(8), f(8, 4))
    assert kinds(found) == ["broadcast", "multiply", "add"]
    assert all(found.tensors[v].shape == (8, 4) for op in found.ops[1:] for v in op.operands)


def test_a_product_that_sums_nothing_is_one_of_elements() -> None:
    found = program(lambda a, b: jnp.einsum("bi,bj->bij", a, b), f(4, 8), f(4, 2))
    assert kinds(found) == ["broadcast", "broadcast", "multiply"]
    assert kinds(program(lambda a, b: a @ b, f(4, 1), f(1, 2))) == ["bitcast", "broadcast", "bitcast", "broadcast", "multiply"]


def test_what_is_taken_away_at_edges_is_a_slice() -> None:
    def padded(*config: tuple[int, int, int]) -> list[str]:
        return kinds(program(lambda x: lax.pad(x, 0.0, config), f(8)))

    assert padded((-1, -2, 0)) == ["slice"]
    assert padded((1, 0, 0)) == padded((0, 0, 1)) == ["pad"]
    assert padded((-1, 2, 0)) == padded((0, -1, 1)) == ["pad", "slice"]
    assert padded((0, 0, 0)) == []
    both = program(lambda x: (lax.pad(x, 0.0, [(-1, -2, 0)]), x[1:6] + 1.0), f(8))
    assert kinds(both) == ["slice", "broadcast", "add"]


def test_a_product_in_groups_of_rows_reads_the_rows_once_for_each() -> None:
    def fn(x: Any, w: Any, sizes: Any) -> Any:
        return jnp.sum(lax.ragged_dot(x, w, sizes) ** 2)

    found = program(jax.grad(fn, (0, 1)), f(16, 8), f(4, 8, 2), f(4, dtype=jnp.int32))
    wide = sorted(found.tensors[op.results[0]].shape for op in found.ops if op.kind == "select")
    assert wide == [(4, 16, 2), (4, 16, 8)]  # of cotangents; and of rows, for both products that read them
    assert [found.tensors[op.results[0]].shape for op in found.ops if op.kind == "dot"] == [(16, 2), (16, 8), (4, 8, 2)]


def test_products_in_groups_of_a_batch_are_products() -> None:
    fn = jax.vmap(lax.ragged_dot)
    assert "dot" in kinds(program(fn, f(2, 6, 4), f(2, 3, 4, 2), f(2, 3, dtype=jnp.int32)))


def test_random_bits_are_a_hash_whose_rounds_are_a_loop_on_cpus() -> None:
    def drawn(impl: str, backend: Any) -> set[str]:
        key = jax.random.key(0, impl=impl)
        return set(kinds(program(lambda k: jax.random.bits(k, (64,)), key, backend=backend)))

    assert drawn("threefry2x32", CPU) >= {"while", "xor"}
    assert drawn("threefry2x32", GPU) >= {"threefry2x32", "xor"}
    assert drawn("rbg", CPU) == {"random_bits"}


def test_convolutions_are_turned_to_channels_last_on_cpus_only() -> None:
    def fn(x: Any, k: Any) -> Any:
        return lax.conv_general_dilated(x, k, (1, 1), "SAME")

    shapes = f(2, 3, 8, 8), f(4, 3, 3, 3)
    assert kinds(program(fn, *shapes)).count("transpose") == 3
    assert kinds(program(fn, *shapes, backend=GPU)) == ["convolution"]


def test_narrow_numbers_are_widened_on_cpus_only() -> None:
    shapes = f(8, 8, dtype=jnp.bfloat16), f(8, 8, dtype=jnp.bfloat16)
    assert kinds(program(jnp.matmul, *shapes)) == ["convert", "convert", "dot", "convert"]
    assert kinds(program(jnp.matmul, *shapes, backend=GPU)) == ["dot"]


def test_what_branches_compute_is_there() -> None:
    def fn(x: Any) -> Any:
        return lax.cond(jnp.sum(x) > 0, lambda x: jnp.sort(x), lambda x: lax.cumsum(x), x)

    assert {"sort", "reduce-window", "conditional"} <= set(kinds(program(fn, f(64))))


# Fusion


def made(found: Program) -> list[str]:
    return [k.root.kind for k in kernels(found, library=True) if k.moves]


def test_cheap_operations_are_computed_again_in_every_reader() -> None:
    def fn(x: Any, y: Any) -> Any:
        shifted = x + 1.0
        return shifted @ y, jnp.tanh(shifted), shifted * 2.0

    found = kernels(program(fn, f(64, 64), f(64, 64)), library=True)
    reads = {k.root.kind: k.reads for k in found}
    assert reads["tanh"] == reads["multiply"] == (0,)  # x, not the sum, which is made for the product alone
    assert reads["dot"] != (0, 1)
    assert sorted(k.root.kind for k in found) == ["add", "dot", "multiply", "tanh"]


def test_expensive_operations_are_computed_once() -> None:
    assert made(program(lambda x: (jnp.tanh(x) + 1.0, jnp.tanh(x) * 2.0), f(64))) == ["tanh", "add", "multiply"]
    assert made(program(lambda x: jnp.tanh(x) + 1.0, f(64))) == ["add"]


def test_what_reads_more_than_it_makes_is_computed_once_if_some_reader_cannot_take_it_in() -> None:
    def fn(x: Any, y: Any, w: Any) -> Any:
        both = x + y
        return both @ w, both * 2.0

    found = {k.root.kind: k.reads for k in kernels(program(fn, *[f(64, 64)] * 3), library=True)}
    assert len(found["multiply"]) == 1
    assert len(found["add"]) == 2


def test_what_would_be_written_out_too_often_is_made_once() -> None:
    def twice(x: Any) -> Any:
        """A pad that a kernel asks at two indices, and one that two operations read."""
        wide = jnp.pad(x, 1)
        return jnp.tanh(wide[:-1] * wide[1:])

    assert made(program(twice, f(4096))) == ["pad", "tanh"]
    assert made(program(lambda x: jnp.tanh(jnp.pad(x, 1)), f(4096))) == ["tanh"]

    def chained(n: int) -> list[str]:
        """Sums of neighbours: the first is asked at twice as many indices with each that is added."""

        def fn(x: Any) -> Any:
            for _ in range(n):
                x = x[:-1] + x[1:]
            return x

        return made(program(fn, f(4096)))

    assert chained(4) == ["add"]
    assert chained(5) == chained(8) == ["add", "add"]


def test_a_library_computes_a_soft_max_to_its_exponentials() -> None:
    found = program(lambda x: jnp.exp(x - jnp.max(x, -1, keepdims=True)), f(64, 128))
    ((root, inside),) = library_fusions(found).items()
    assert found.ops[root].kind == "exp"
    assert {found.ops[i].kind for i in inside} >= {"reduce", "sub", "exp"}
    assert made(found) == ["exp"]


def test_a_small_reduction_is_no_librarys() -> None:
    assert library_fusions(program(lambda x: jnp.sum(x, -1), f(8, 8))) == {}


def test_what_is_widened_to_be_written_is_written_in_place_unless_the_slice_is_read_from_it() -> None:
    def inplace(fn: Callable[..., Any], *more: Any) -> bool:
        (kernel,) = kernels(program(fn, f(8, 64, dtype=jnp.bfloat16), *more), library=True)
        return 0 in kernel.inplace

    assert inplace(lambda xs, x: lax.dynamic_update_index_in_dim(xs, x, 3, 0), f(64, dtype=jnp.bfloat16))
    assert not inplace(lambda xs: lax.dynamic_update_index_in_dim(xs, xs[0], 3, 0))


# Order and copies


def order(fn: Callable[..., Any], *args: Any, eager: bool) -> list[str]:
    return [t.kind for t in scheduled(tasks(program(fn, *args), library=True), eager)]


def test_an_eager_backend_does_first_what_waits_for_arguments_alone() -> None:
    def fn(x: Any, w: Any) -> Any:
        return (x @ w @ w) + jnp.sin(w)[::-1] @ w

    assert order(fn, *[f(64, 64)] * 2, eager=True)[:2] == ["dot", "reverse"]
    assert order(fn, *[f(64, 64)] * 2, eager=False)[:2] == ["dot", "dot"]


def test_of_stacks_that_start_as_one_zero_all_but_one_are_copies() -> None:
    def fn(x: Any) -> Any:
        return lax.scan(lambda c, _: (c @ c, (c + 1.0, c * 2.0, jnp.tanh(c))), x, None, 5)

    found = order(fn, f(64, 64), eager=True)
    assert found.count("copy") == 1 + 2  # of the argument, which must not be written, and of the zeros
    assert found.count("while") == 1


# Memory


def stepped(step: Any, *args: Any) -> tuple[list[str], list[str]]:
    """What is done outside of a loop over the first argument, and in each of its steps."""
    found, inside = loop_of(step, *args)
    return kinds(found), kinds(inside)


def loop_of(step: Any, *args: Any) -> tuple[Program, Program]:
    """A program with a loop over the first argument, and that of the loop's step."""
    found = program(lambda xs, *more: lax.scan(lambda c, x: step(c, x, *more), xs[0], xs), *args)
    (loop,) = (op for op in found.ops if op.kind == "while")
    assert loop.inside is not None
    assert len(loop.inside.inputs) == 1 + len(loop.operands)
    read = {v for op in loop.inside.ops for v in op.operands} | set(loop.inside.outputs)
    assert read.issuperset(loop.inside.inputs[1:])  # what only others read is not given any more
    return found, loop.inside


def test_what_does_not_change_is_moved_out_of_a_loop() -> None:
    outside, inside = stepped(lambda c, x, w: (jnp.tanh(c @ jnp.exp(w.T)) + x, None), f(5, 64, 64), f(64, 64))
    assert "exp" in outside
    assert "exp" not in inside
    assert {"tanh", "dot"} <= set(inside) - set(outside)


def test_what_costs_nothing_is_moved_with_what_reads_it_alone() -> None:
    outside, inside = stepped(lambda c, x, w: (c * w[::-1] + x, None), f(5, 64, 64), f(64, 64))
    assert ("reverse" in outside, "reverse" in inside) == (False, True)
    outside, inside = stepped(lambda c, x, w: (c * jnp.exp(w[::-1]) + x, None), f(5, 64, 64), f(64, 64))
    assert ("reverse" in outside, "reverse" in inside) == (True, False)


def test_what_steps_take_slices_of_is_widened_once() -> None:
    _, inside = loop_of(lambda c, x: (c + x, None), f(5, 64, 64, dtype=jnp.bfloat16))
    (taken,) = (op.operands[0] for op in inside.ops if op.kind == "dynamic-slice")
    assert taken in inside.inputs
    assert inside.tensors[taken].dtype == jnp.float32


def test_keys_that_a_scan_stacks_are_there() -> None:
    def split(key: Any) -> Any:
        return lax.scan(lambda k, _: (jax.random.split(k)[0], k), key, None, 5)

    found = program(split, jax.eval_shape(jax.random.key, 0))
    (loop,) = (o for o in found.ops if o.kind == "while")
    assert [found.tensors[v].nbytes for v in loop.results] == [8, 40]


spans = st.tuples(st.integers(1, 40), st.integers(0, 20), st.integers(0, 8))


@given(st.lists(spans, min_size=1, max_size=30))
def test_packed_buffers_do_not_overlap_and_are_no_smaller_than_what_is_held_at_once(found: list[tuple[int, int, int]]) -> None:
    sizes = np.array([64 * n for n, _, _ in found])
    times = np.array([(a, a + d) for _, a, d in found])
    total = packed(sizes, times)
    most = max(sum(s for s, (a, b) in zip(sizes, times, strict=True) if a <= t <= b) for t in range(30))
    assert most <= total <= sizes.sum()
    where = offsets(sizes, times, np.arange(len(sizes)))
    for i in range(len(sizes)):
        for j in range(i):
            at_once = times[i, 0] <= times[j, 1] and times[j, 0] <= times[i, 1]
            assert not at_once or where[i] + sizes[i] <= where[j] or where[j] + sizes[j] <= where[i]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_what_is_held_one_after_the_other_takes_the_largest_and_at_once_the_sum(found: list[int]) -> None:
    sizes = np.array([64 * n for n in found])
    later = np.array([(i, i) for i in range(len(sizes))])
    assert packed(sizes, later) == sizes.max()
    assert packed(sizes, np.zeros_like(later)) == sizes.sum()


def block(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w) @ w


def remat(w: Any, x: Any) -> Any:
    for _ in range(3):
        x = jax.checkpoint(block)(w, x)
    return jnp.sum(x**2)


def steps(w: Any, x: Any) -> Any:
    return jnp.sum(lax.scan(lambda c, _: (block(w, c), None), x, None, 6)[0] ** 2)


def convolved(k: Any, x: Any) -> Any:
    return jnp.sum(jnp.maximum(lax.conv_general_dilated(x, k, (1, 1), "SAME"), 0.0) ** 2)


def convolutions(kernels: Any, x: Any) -> Any:
    for k in kernels:
        x = jnp.tanh(lax.conv_general_dilated(x, k, (1, 1), "SAME"))
    return jnp.sum(x**2)


def looped(w: Any, x: Any) -> Any:
    return lax.while_loop(lambda c: jnp.sum(c) > 0, lambda c: jnp.tanh(block(w, c)), x)


def narrow_steps(w: Any, x: Any) -> Any:
    def step(c: Any, _: Any) -> Any:
        return jnp.tanh(c @ w.astype(c.dtype)) * jnp.sin(c), None

    return jnp.sum(lax.scan(step, x.astype(jnp.bfloat16), None, 6)[0].astype(x.dtype) ** 2)


def narrow_stack(x: Any) -> Any:
    def step(c: Any, _: Any) -> Any:
        c = jnp.sin(c)
        return c, c

    return lax.scan(step, x.astype(jnp.bfloat16), None, 8)[1]


def scanned_at_once(decay: Any, x: Any) -> Any:
    """A linear recurrence, as state space models have it."""

    def both(left: Any, right: Any) -> Any:
        return left[0] * right[0], right[0] * left[1] + right[1]

    found = lax.associative_scan(both, (jnp.exp(x[..., None] * decay), x[..., None] * decay), axis=0)[1]
    return jnp.sum(found**2)


def expert(w: Any, x: Any, sizes: Any) -> Any:
    return jnp.sum(jnp.tanh(lax.ragged_dot(x, w, sizes)) ** 2)


def dropped(w: Any, x: Any, key: Any) -> Any:
    for k in jax.random.split(key, 3):
        x = jnp.tanh(x @ w)
        x = jnp.where(jax.random.bernoulli(k, 0.9, x.shape), x / 0.9, 0.0)
    return jnp.sum(x**2)


WEIGHT, ROWS = f(128, 128), f(256, 128)
WIDENS = pytest.mark.skipif("not widens()", reason="the compiler has products of bfloat16 here")


@pytest.mark.parametrize(
    ("fn", "args", "tolerance"),
    [
        (lambda x: jnp.tanh(x), (ROWS,), 0.0),
        (lambda w, x: block(w, x), (WEIGHT, ROWS), 0.0),
        (lambda w, x: jax.nn.softmax(x @ w, -1) @ w, (WEIGHT, ROWS), 0.0),
        (jax.grad(lambda w, x: jnp.sum(block(w, block(w, x)) ** 2)), (WEIGHT, ROWS), TARGET),
        (jax.grad(remat), (WEIGHT, ROWS), TARGET),
        (jax.grad(steps), (WEIGHT, ROWS), TARGET),
        (looped, (WEIGHT, ROWS), TARGET),
        pytest.param(jax.grad(narrow_steps), (WEIGHT, ROWS), TARGET, marks=WIDENS),
        pytest.param(narrow_stack, (ROWS,), 0.0, marks=WIDENS),
        (jax.grad(scanned_at_once, (0, 1)), (f(8), f(32, 128)), TARGET),
        (jax.grad(dropped), (WEIGHT, ROWS, jax.eval_shape(lambda: jax.random.key(0))), TARGET),
        (jax.grad(expert, (0, 1)), (f(8, 128, 64), ROWS, f(8, dtype=jnp.int32)), TARGET),
        (lambda x: jnp.sin(lax.reduce_window(jnp.sin(x), 1.0, lax.mul, (1, 2), (1, 2), "VALID")), (ROWS,), TARGET),
        (lambda x: jnp.sin(lax.reduce(x, 2.0, lambda a, b: a + b, (1,))), (ROWS,), TARGET),
        (jax.grad(convolved), (f(32, 16, 3, 3), f(4, 16, 16, 16)), TARGET),
        (jax.grad(convolutions), ([f(16, 16, 3, 3)] * 4, f(4, 16, 16, 16)), TARGET),
        (jax.grad(convolutions), ([f(16, 16, 3, 3)] * 4, f(1, 16, 16, 16)), TARGET),  # only a dimension of size 1 moves
        pytest.param(
            lambda w, x: block(w, x),
            (f(128, 128, dtype=jnp.bfloat16), f(256, 128, dtype=jnp.bfloat16)),
            TARGET,
            marks=WIDENS,
        ),
    ],
)
def test_small_programs_take_what_is_compiled(fn: Any, args: Any, tolerance: float) -> None:
    """To the byte, where the order of what can run at once does not matter."""
    stats: Any = jax.jit(fn).lower(*args).compile(compiler_options={**compiler_options(), **AS_USERS}).memory_analysis()
    found = assigned(tasks(program(fn, *args), CPU.library), CPU.eager)
    fixed = stats.argument_size_in_bytes + stats.output_size_in_bytes
    small = 1024  # scalars, counters and conditions of loops
    assert abs(found.packed - stats.temp_size_in_bytes) <= tolerance * (fixed + stats.temp_size_in_bytes) + small


# Plans


def layers(params: Any, x: Any) -> Any:
    for w in params:
        x = jnp.tanh(x @ w)  # the line that holds most
    return jnp.mean(x**2)


def planned(devices: int = 8) -> Plan:
    return optimize(layers, [f(256, 256)] * 4, f(1024, 256), machine=Machine.grid(1, devices, "a100"), progress=False)


@pytest.mark.usefixtures("as_users_compile")
def test_a_plan_holds_what_is_compiled() -> None:
    plan = planned()
    for point in (plan.frontier[0], plan.frontier[-1]):
        arguments, outputs, _, together = compare(point, True).memory_lines
        assert arguments.difference == outputs.difference == 0
        assert abs(together.difference) <= TARGET


@pytest.mark.usefixtures("as_users_compile")
def test_a_transformer_holds_what_is_compiled() -> None:
    model = gpt(2, 64, 64, 16, 32)
    plan = optimize(model.loss, model.params, model.batch, machine=Machine.grid(1, 8, "a100"), progress=False)
    check = compare(plan, True)
    assert abs(check.memory_lines[-1].difference) <= TARGET
    assert check.searched.compiled == check.memory.total
    assert "all, searched" in str(check)
    assert (repr(check), repr(check.timeline)) == (str(check), str(check.timeline)), "what a prompt shows"


def test_what_holds_the_peak_is_named() -> None:
    found = planned().memory_timeline()
    kept = [h for h in found.held if h.why == KEPT]
    assert kept
    assert all("test_liveness.py" in h.line for h in kept)
    assert {ARGUMENTS, GRADIENTS, SLOTS} <= set(found.by_reason)
    assert found.by_reason[SLOTS] == 2 * found.by_reason[GRADIENTS]
    assert "test_liveness.py" in str(found)


def test_bytes_over_time_add_up() -> None:
    found = planned().memory_timeline()
    assert found.nbytes.max() == found.nbytes[found.moment]
    assert found.nbytes.max() <= found.step <= found.peak
    assert sum(h.nbytes for h in found.held) == found.peak


def test_without_a_gradient_nothing_is_kept() -> None:
    found = planned().memory_timeline(gradient=False)
    assert KEPT not in found.by_reason
    assert GRADIENTS not in found.by_reason
    assert found.slots == 0


def test_what_is_computed_again_is_named() -> None:
    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = x + jax.checkpoint(lambda w, x: jnp.tanh(x @ w) @ w.T)(w, x)
        return jnp.mean(x**2)

    plan = optimize(loss, [f(64, 1024)] * 3, f(1024, 64), machine=Machine.grid(1, 8, "a100"), progress=False)
    assert AGAIN in plan.memory_timeline().by_reason


def test_no_device_is_needed() -> None:
    found = planned(devices=64).memory_timeline()
    assert found.arguments < 4 * 256 * 256 * 4 + 1024 * 256 * 4
    assert found.peak > found.step > 0


def test_a_picture(tmp_path: Any) -> None:
    path = tmp_path / "memory.png"
    planned().memory_timeline().plot(path)
    assert path.stat().st_size > 1000


def test_where_the_backend_keeps_the_order_what_is_computed_again_is_there_for_its_reader_alone() -> None:
    """One layer's at a time, not all layers' at once."""

    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = jax.checkpoint(lambda w, x: jnp.tanh(jnp.sin(x @ w)) @ w.T)(w, x)
        return jnp.mean(x**2)

    def again(layers: int) -> int:
        params = [f(64, 2048)] * layers
        found = lowered(jax.make_jaxpr(jax.grad(loss))(params, f(512, 64)), GPU)
        return assigned(tasks(found, GPU.library, GPU.eager), GPU.eager).packed

    wide = 512 * 2048 * 4
    assert again(6) - again(2) < wide
