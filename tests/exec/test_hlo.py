"""`unity.exec.compiled.hlo` reports what a compiled program does: checked on programs whose communication is known."""

import itertools
import math
import re
from collections.abc import Callable
from textwrap import dedent

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import AS_USERS
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from unity.exec.compiled.hlo import KINDS, CompiledCollective, collectives, memory, total_bytes

SIZES = {"d": 2, "m": 4}
ROWS, COLUMNS = 16, 32


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh(tuple(SIZES.values()), tuple(SIZES), axis_types=(AxisType.Auto,) * 2)


def compiled(mesh, body, in_specs, out_specs, *shapes, **options) -> jax.stages.Compiled:
    """`body` in one shard_map, compiled for abstract arguments: (shape, dtype) each, laid out as `in_specs`."""
    mapped = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    arguments = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for (shape, dtype), spec in zip(shapes, in_specs, strict=True)
    ]
    return jax.jit(mapped, **options).lower(*arguments).compile(compiler_options=AS_USERS)


def report(mesh, body, in_specs, out_specs, *shapes) -> list[CompiledCollective]:
    return collectives(compiled(mesh, body, in_specs, out_specs, *shapes).as_text() or "")


def groups_along(axes: tuple[str, ...]) -> set[tuple[int, ...]]:
    """Devices that differ only in `axes`, by the definition of a mesh."""
    coordinates = list(itertools.product(*map(range, SIZES.values())))
    fixed = [i for i, axis in enumerate(SIZES) if axis not in axes]
    key = [tuple(c[i] for i in fixed) for c in coordinates]
    return {tuple(i for i, k in enumerate(key) if k == one) for one in key}


# Each takes the mapped axes and gives a body, its layouts, and the elements of the full side on one device.
def all_reduce(axes, n):
    return lambda x: lax.psum(x, axes), P(axes), P(), ROWS * COLUMNS // n


def all_gather(axes, n):
    return lambda x: lax.all_gather(x, axes, tiled=True), P(axes), P(axes), ROWS * COLUMNS


def reduce_scatter(axes, n):
    return lambda x: lax.psum_scatter(x, axes, tiled=True), P(None, axes), P(axes), ROWS * COLUMNS // n


def all_to_all(axes, n):
    return lambda x: lax.all_to_all(x, axes, 1, 0, tiled=True), P(axes), P(None, axes), ROWS * COLUMNS // n


@pytest.mark.parametrize("axes", [("d",), ("m",), ("d", "m")], ids="-".join)
@pytest.mark.parametrize("make", [all_reduce, all_gather, reduce_scatter, all_to_all])
def test_one_collective_is_reported_as_written(mesh, make: Callable, axes):
    n = math.prod(SIZES[a] for a in axes)
    body, in_spec, out_spec, elements = make(axes, n)
    (found,) = report(mesh, body, (in_spec,), out_spec, ((ROWS, COLUMNS), jnp.float32))
    assert found.kind == make.__name__.replace("_", "-")
    assert (found.dtype, found.elements, found.nbytes) == ("f32", elements, 4 * elements)
    assert {tuple(sorted(group)) for group in found.groups} == groups_along(axes)
    assert (found.count, found.trip_unknown, found.parts) == (1, False, 1)
    assert found.source == f"test_hlo.py:{body.__code__.co_firstlineno}"
    assert "shard_map" in found.op_name


def test_permute_is_reported_with_its_pairs(mesh):
    shift = [(i, i + 1) for i in range(3)]
    (found,) = report(mesh, lambda x: lax.ppermute(x, "m", shift), (P("m"),), P("m"), ((ROWS, COLUMNS), jnp.float32))
    assert (found.kind, found.elements) == ("collective-permute", ROWS * COLUMNS // 4)
    assert set(found.groups) == {(4 * d + i, 4 * d + j) for d in range(2) for i, j in shift}


def test_combined_reductions_are_summed(mesh):
    specs = (P("m"), P(None, "m"), P("m", "d"))
    found = report(
        mesh,
        lambda x, y, z: lax.psum((x, y, z), "m"),
        specs,
        (P(), P(), P(None, "d")),
        *[((ROWS, COLUMNS), jnp.float32)] * 3,
    )
    assert {c.kind for c in found} == {"all-reduce"}
    assert sum(c.parts for c in found) == 3
    assert max(c.parts for c in found) > 1  # or this program no longer tests combination
    local = ROWS * COLUMNS // 4
    assert sum(c.elements for c in found) == local + local + local // 2
    assert total_bytes(found) == {"all-reduce": 4 * sum(c.elements for c in found)}


def test_elements_are_counted_whatever_the_type_becomes(mesh):
    for dtype in (jnp.bfloat16, jnp.float16, jnp.int32, jnp.complex64):
        (found,) = report(mesh, lambda x: lax.psum(x, "m"), (P("m"),), P(), ((ROWS, COLUMNS), dtype))
        assert found.elements == ROWS * COLUMNS // 4
        assert found.nbytes >= found.elements * jnp.dtype(dtype).itemsize


def test_loops_multiply(mesh):
    def body(x):
        def inner(y, _):
            return lax.pcast(lax.psum(y, "m"), "m", to="varying") / 4, None

        def outer(y, _):
            return lax.scan(inner, jnp.sin(y), None, length=3)[0] + 0 * lax.all_gather(y, "m").sum(0), None

        return lax.scan(outer, x, None, length=5)[0]

    found = report(mesh, body, (P("m"),), P("m"), ((ROWS, COLUMNS), jnp.float32))
    assert {c.kind: c.count for c in found} == {"all-reduce": 15, "all-gather": 5}
    assert not any(c.trip_unknown for c in found)
    local = ROWS * COLUMNS // 4 * 4  # bytes
    assert total_bytes(found) == {"all-reduce": 15 * local, "all-gather": 5 * 4 * local}


def test_a_loop_that_depends_on_data_says_so(mesh):
    def body(x, limit):
        def again(carry):
            return (carry[0] < limit) & (lax.psum(carry[1].sum(), "m") < 1e9)

        return lax.while_loop(again, lambda c: (c[0] + 1, c[1] + lax.all_gather(c[1], "m").sum(0)), (0, x))[1]

    found = report(mesh, body, (P("m"), P()), P("m"), ((ROWS, COLUMNS), jnp.float32), ((), jnp.int32))
    assert {c.kind for c in found} == {"all-reduce", "all-gather"}
    assert all(c.trip_unknown and c.count == 1 for c in found)


@pytest.mark.parametrize(("first", "limit", "step"), [(0, 7, 1), (2, 9, 1), (0, 10, 3), (-4, 4, 5)])
def test_trip_counts_are_derived_where_xla_does_not_write_them(mesh, first, limit, step):
    def body(x):
        def once(carry):
            return carry[0] + step, lax.pcast(lax.psum(carry[1], "m"), "m", to="varying") / 4

        return lax.while_loop(lambda c: c[0] < limit, once, (first, x))[1]

    text = compiled(mesh, body, (P("m"),), P("m"), ((ROWS, COLUMNS), jnp.float32)).as_text() or ""
    bare = re.sub(r", backend_config=\{.*", "", text)
    assert "known_trip_count" in text
    assert "known_trip_count" not in bare
    for version in (text, bare):
        (found,) = collectives(version)
        assert (found.count, found.trip_unknown) == (len(range(first, limit, step)), False)


def test_every_branch_of_a_conditional_is_reported(mesh):
    branches = [lambda x: x, lambda x: lax.ppermute(x, "m", [(0, 1)]), lambda x: lax.all_gather(x, "m").sum(0)]
    found = report(
        mesh,
        lambda x, i: lax.switch(i, branches, x),
        (P("m"), P()),
        P("m"),
        ((ROWS, COLUMNS), jnp.float32),
        ((), jnp.int32),
    )
    assert sorted(c.kind for c in found) == ["all-gather", "collective-permute"]


def test_groups_of_the_partitioners_own_collectives(mesh):
    """XLA's partitioner prints groups otherwise than shard_map does; the product of a split contraction is known."""

    def product(x, w):
        return lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P()))

    layouts = (NamedSharding(mesh, P("d", "m")), NamedSharding(mesh, P("m")))
    shapes = ((ROWS, COLUMNS), (COLUMNS, 8))
    arguments = [jax.ShapeDtypeStruct(s, jnp.float32, sharding=p) for s, p in zip(shapes, layouts, strict=True)]
    found = collectives(jax.jit(product).lower(*arguments).compile(compiler_options=AS_USERS).as_text() or "")
    assert {c.kind: {tuple(sorted(g)) for g in c.groups} for c in found} == {
        "all-reduce": groups_along(("m",)),
        "all-gather": groups_along(("d",)),
    }


def test_memory_is_per_device_and_adds_up(mesh):
    def body(x):
        return lax.psum(jnp.sin(x) @ x.T, "m") @ x

    local = ROWS * COLUMNS // 4 * 4  # bytes
    shape = ((ROWS, COLUMNS), jnp.float32)
    plain = memory(compiled(mesh, body, (P(None, "m"),), P(None, "m"), shape))
    assert (plain.arguments, plain.outputs, plain.aliased) == (local, local, 0)
    assert plain.temporaries >= ROWS * ROWS * 4
    assert plain.total == 2 * local + plain.temporaries
    donated = memory(compiled(mesh, body, (P(None, "m"),), P(None, "m"), shape, donate_argnums=0))
    assert donated.aliased == local
    assert donated.total == local + donated.temporaries


def test_memory_says_where_it_is_not_known():
    class Silent:
        def memory_analysis(self):
            return None

    with pytest.raises(NotImplementedError, match="memory_analysis"):
        memory(Silent())


def test_other_texts_are_refused():
    lowered = jax.jit(jnp.sin).lower(jax.ShapeDtypeStruct((4,), jnp.float32)).as_text()
    with pytest.raises(ValueError, match=r"compile\(\)\.as_text\(\)"):
        collectives(lowered)


# Literal texts, for the forms that XLA's CPU backend does not print.
def program(line: str, *, operand: str = "f32[16]{0}", before: str = "") -> str:
    """A module of 8 devices whose only other instruction is the parameter %p."""
    head = "HloModule m, is_scheduled=true, num_partitions=8\n"
    return f"{head}{dedent(before)}\nENTRY %main () -> f32[] {{\n  %p = {operand} parameter(0)\n  {line}\n}}\n"


@pytest.mark.parametrize(
    ("printed", "groups"),
    [
        ("{}", [range(8)]),
        ("{{0,1},{2,3},{4,5},{6,7}}", [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ("[2,4]<=[8]", [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("[4,2]<=[2,4]T(1,0)", [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("[4,2]<=[2,2,2]T(0,2,1)", [(0, 2), (1, 3), (4, 6), (5, 7)]),
        ("mesh['a'=2,'b'=4] {'b'}", [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("mesh[a=2,b=4] {a}", [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("mesh['a'=2,'b'=4] {'a','b'}", [range(8)]),
        # part (p)s of an axis: its middle digit, when its index is written in the bases p, s, rest
        ("mesh['a'=4,'b'=2] {'a':(2)2}", [(0, 2), (1, 3), (4, 6), (5, 7)]),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", [(0, 1, 4, 5), (2, 3, 6, 7)]),
        ("mesh['a'=4,'b'=2], device_ids=([2,2,2]T(0,2,1)) {'a':(2)2}", [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ("mesh['a'=2,'b'=4], device_ids=(7,6,5,4,3,2,1,0) {'a'}", [(7, 3), (6, 2), (5, 1), (4, 0)]),
    ],
)
def test_every_printed_form_of_groups(printed, groups):
    line = f"ROOT %r = f32[16]{{0}} all-reduce(%p), channel_id=7, replica_groups={printed}, to_apply=%add"
    (found,) = collectives(program(line))
    assert sorted(found.groups) == sorted(map(tuple, groups))


@pytest.mark.parametrize(
    ("line", "kind", "elements", "parts"),
    [
        ("%s = f32[16]{0} all-reduce-start(%p), to_apply=%a\n  %d = f32[16]{0} all-reduce-done(%s)", 0, 16, 1),
        (
            "%s = (f32[16]{0}, f32[32]{0}) all-gather-start(%p), dimensions={0}\n  %d = f32[32]{0} all-gather-done(%s)",
            1,
            32,
            1,
        ),
        (
            "%s = ((f32[16]{0}, f32[16]{0}), (f32[32]{0}, f32[32]{0})) all-gather-start(%p, %p), dimensions={0}",
            1,
            64,
            2,
        ),
        (
            "%s = ((f32[16]{0}), f32[8]{0}, u32[]) reduce-scatter-start(%p), dimensions={0}, to_apply=%a\n"
            "  %u = ((f32[16]{0}), f32[8]{0}, u32[]) reduce-scatter-update(%s)\n"
            "  %d = f32[8]{0} reduce-scatter-done(%u)",
            2,
            16,
            1,
        ),
        ("%r = (f32[16]{0}, f32[16]{0}) all-to-all(%p, %p), replica_groups={{0,1}}", 3, 32, 1),
        (
            "%s = (f32[16]{0}, f32[16]{0}, u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,1}}\n"
            "  %d = f32[16]{0} collective-permute-done(%s)",
            4,
            16,
            1,
        ),
        # types of operands inline, as older versions print them
        ("%r = f32[16]{0} all-reduce(f32[16]{0:T(8,128)S(1)} %p), to_apply=%a", 0, 16, 1),
    ],
)
def test_asynchronous_pairs_count_once(line, kind, elements, parts):
    (found,) = collectives(program(line))
    assert (found.kind, found.elements, found.nbytes, found.parts) == (KINDS[kind], elements, 4 * elements, parts)


def test_wrapped_asynchronous_collectives_count_once():
    wrapped = """
        %async_computation (q: f32[16]) -> f32[8] {
          %q = f32[16]{0} parameter(0)
          ROOT %rs = f32[8]{0} reduce-scatter(%q), replica_groups={{0,1},{2,3}}, dimensions={0}, to_apply=%add
        }, execution_thread="parallel"
        """
    line = (
        "%s = ((f32[16]{0}), f32[8]{0}, u32[]) async-start(%p), calls=%async_computation\n"
        "  ROOT %d = f32[8]{0} async-done(%s), calls=%async_computation"
    )
    (found,) = collectives(program(line, before=wrapped))
    assert (found.kind, found.elements, found.groups) == ("reduce-scatter", 16, ((0, 1), (2, 3)))


@pytest.mark.parametrize(
    ("type_", "dtype", "elements", "nbytes"),
    [
        ("bf16[8,16]{1,0:T(8,128)(2,1)S(1)}", "bf16", 128, 256),
        ("c64[4]{0}", "c64", 4, 32),
        ("c128[4]{0}", "c128", 4, 64),
        ("pred[8]{0}", "pred", 8, 8),
        ("s32[]", "s32", 1, 4),
        ("f8e4m3fn[16]{0}", "f8e4m3fn", 16, 16),
        ("f8e8m0fnu[16]{0}", "f8e8m0fnu", 16, 16),
        ("s4[7]{0:E(4)}", "s4", 7, 4),
        ("f64[<=8,2]{1,0}", "f64", 16, 128),
        ("f32[0,4]{1,0}", "f32", 0, 0),
        ("(f32[4]{0}, /*index=1*/bf16[4]{0})", "bf16+f32", 8, 24),
    ],
)
def test_types(type_, dtype, elements, nbytes):
    (found,) = collectives(program(f"ROOT %r = {type_} all-reduce(%p), to_apply=%add", operand=type_))
    assert (found.dtype, found.elements, found.nbytes) == (dtype, elements, nbytes)


def test_sources_in_both_forms():
    metadata = 'metadata={op_name="jit(f)/a\\"b" source_file="/home/me/train.py" source_line=42}'
    (found,) = collectives(program(f"%r = f32[16]{{0}} all-reduce(%p), to_apply=%add, {metadata}"))
    assert (found.source, found.op_name) == ("train.py:42", 'jit(f)/a\\"b')
    tables = """
        FileNames
        1 "/home/me/train.py"
        2 "/home/me/model.py"

        FunctionNames
        1 "main"

        FileLocations
        1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=2}
        2 {file_name_id=2 function_name_id=1 line=12 end_line=13 column=1 end_column=2}

        StackFrames
        1 {file_location_id=1 parent_frame_id=1}
        2 {file_location_id=2 parent_frame_id=2}
        """
    line = "%r = f32[16]{0} all-reduce(%p), to_apply=%add, metadata={stack_frame_id=2}"
    assert collectives(program(line, before=tables))[0].source == "model.py:12"
    assert collectives(program("%r = f32[16]{0} all-reduce(%p), to_apply=%add"))[0].source == ""


def loop(first: int, limit: int, step: int, direction: str, *, turned: bool) -> str:
    """A loop from `first` while `direction` holds to `limit`; one collective in its body, one in its condition."""
    sides = "%limit, %i" if turned else "%i, %limit"
    return dedent(f"""
        HloModule m, num_partitions=8

        %body (c: (s32[], f32[4])) -> (s32[], f32[4]) {{
          %c = (s32[], f32[4]{{0}}) parameter(0)
          %i = s32[] get-tuple-element(%c), index=0
          %x = f32[4]{{0}} get-tuple-element(%c), index=1
          %step = s32[] constant({step})
          %next = s32[] add(%step, %i)
          %r = f32[4]{{0}} all-reduce(%x), replica_groups={{}}, to_apply=%add
          ROOT %t = (s32[], f32[4]{{0}}) tuple(%next, %r)
        }}

        %condition (c: (s32[], f32[4])) -> pred[] {{
          %c = (s32[], f32[4]{{0}}) parameter(0)
          %x = f32[4]{{0}} get-tuple-element(%c), index=1
          %g = f32[32]{{0}} all-gather(%x), replica_groups={{}}, dimensions={{0}}
          %i = s32[] get-tuple-element(%c), index=0
          %limit = s32[] constant({limit})
          ROOT %test = pred[] compare({sides}), direction={direction}
        }}

        ENTRY %main (x: f32[4]) -> (s32[], f32[4]) {{
          %x = f32[4]{{0}} parameter(0)
          %first = s32[] constant({first})
          %t = (s32[], f32[4]{{0}}) tuple(%first, %x)
          ROOT %w = (s32[], f32[4]{{0}}) while(%t), condition=%condition, body=%body
        }}
        """)


HOLDS = {"LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal, "NE": np.not_equal}


@given(st.integers(-9, 9), st.integers(-9, 9), st.integers(-4, 4), st.sampled_from(sorted(HOLDS)), st.booleans())
def test_derived_trip_counts_equal_running_the_loop(first, limit, step, direction, turned):
    runs, value = 0, first
    while runs < 100 and HOLDS[direction](*((limit, value) if turned else (value, limit))):
        runs, value = runs + 1, value + step
    expected = {"all-reduce": 1, "all-gather": 1} if runs == 100 else {"all-reduce": runs, "all-gather": runs + 1}
    found = collectives(loop(first, limit, step, direction, turned=turned))
    assert {c.kind: c.count for c in found} == expected
    assert all(c.trip_unknown == (runs == 100) for c in found)
