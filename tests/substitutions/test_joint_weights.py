"""Weights that a program joins, joined once by `plan.shard`: what is stored, what is given back, and that nothing else changes."""

import io
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import fewer
from hypothesis import given, settings
from hypothesis import strategies as st

import unity
from unity.base.errors import DerivationError, PlanError
from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture
from unity.pcg.capture.packed_arguments import Packing
from unity.substitutions.language.axioms import default_library
from unity.substitutions.language.rearrangement import after, reshaped, transposed
from unity.substitutions.rewriting.joined_weights import Joined, with_joined
from unity.transforms.packing import JoiningRecord, joining_of
from unity.transforms.transformation import TransformationSource

EIGHT = Machine.grid(1, 8)
RNG = np.random.default_rng(0)

pytestmark = pytest.mark.usefixtures("own_cache")


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape) / np.sqrt(shape[-1]), jnp.float32)


def close(found, wanted, most=2e-5):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.shape == b.shape
        assert np.abs(np.asarray(a) - np.asarray(b)).max() <= most * max(1e-3, float(np.abs(b).max()))


def same(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)


def heads(params, x):
    """Three projections that the program joins itself, two of a width, and one that is turned first."""
    w = jnp.concatenate([params["q"], params["k"], params["v"].T], 1)
    q, k, v = jnp.split(jnp.tanh(x @ w), [16, 32], axis=-1)
    return jnp.mean((q * k) ** 2) + jnp.mean((v @ params["out"]) ** 2)


def heads_case():
    params = {"q": normal(24, 16), "k": normal(24, 16), "v": normal(8, 24), "out": normal(8, 4)}
    return heads, (params, normal(32, 24))


def stacked(params, ids):
    """Tables that the program stacks itself: neither their rows nor their columns can be divided by eight, all of them can."""
    table = jnp.concatenate(params["tables"], 0)
    found = table[ids]
    return jnp.mean((found @ params["w"]) ** 2)


def stacked_case():
    params = {"tables": [normal(10003, 3), normal(20009, 3), normal(2756, 3)], "w": normal(3, 5)}
    return stacked, (params, jnp.asarray(RNG.integers(32768, size=16), jnp.int32))


def planned(fn, args, **options):
    options = {"machine": EIGHT, "search": "captured", "branches": False, "progress": False} | options
    return unity.optimize(fn, *args, **options)


@st.composite
def sets(draw):
    """Leaves, each of a shape of its own, that are transposed and reshaped, and joined."""
    count, rank = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    shape, dim = draw(st.tuples(*[st.integers(1, 4)] * rank)), draw(st.integers(0, rank - 1))
    views = []
    for _ in range(count):
        target = (*shape[:dim], draw(st.integers(1, 4)), *shape[dim + 1 :])
        order = tuple(draw(st.permutations(range(rank))))
        back = transposed(target, order)
        flat = reshaped(back.target, (back.target[0], int(np.prod(back.target[1:], dtype=int))))
        view = after(flat, back) if draw(st.booleans()) else back
        views.append((view or back).inverse())
    return Joined(tuple(draw(st.permutations(range(count)))), tuple(views), dim, draw(st.integers(0, 3)))


@given(sets(), st.booleans())
@settings(max_examples=fewer(12), deadline=None)
def test_what_is_joined_comes_back_to_the_last_bit(one, on_host):
    leaves = [None] * len(one.leaves)
    for leaf, view in zip(one.leaves, one.views, strict=True):
        x = RNG.normal(size=view.source).astype(np.float32)
        leaves[leaf] = x if on_host else jnp.asarray(x)
    packing = Packing((one,))
    packed = packing.pack(leaves)
    assert packed[0].shape == one.stacked
    assert all(x.shape == (0,) for x in packed[1:])
    assert all(isinstance(x, np.ndarray) == on_host for x in packed)
    parts = [view(jnp.asarray(leaves[k])) for k, view in zip(one.leaves, one.views, strict=True)]
    wanted = jnp.concatenate(parts, one.dim)
    whole = np.asarray(packed[0]).reshape(*wanted.shape[: one.dim], -1, *wanted.shape[one.dim + 1 :])
    ends = [(0, one.zeros * (d == one.dim)) for d in range(wanted.ndim)]
    np.testing.assert_array_equal(whole, np.pad(wanted, ends))
    if len(leaves) > 1 or one.zeros:
        assert all(a is b for a, b in zip(packing.pack(packed), packed, strict=True))
    same(packing.unpack(packed), leaves)


def joins(fn, *args):
    captured = capture(fn, *args)
    return captured, with_joined(captured.body, captured.differentiated, 8)


def test_parts_of_one_size_can_be_divided_within_all_of_them():
    weights = [normal(6, 4), normal(6, 4), normal(6, 4)]
    captured, (body, (one,)) = joins(lambda p, x: jnp.sum(x @ jnp.concatenate(p, 1)), weights, normal(2, 6))
    assert (one.joined, one.stacked) == ((6, 12), (6, 3, 4))
    assert [body.tensors[v].shape for v in body.inputs] == [(6, 3, 4), (0,), (0,), (2, 6)]
    assert "concatenate" not in body.primitives
    assert captured.body.primitives.count("concatenate") == 1


@pytest.mark.parametrize(
    "fn",
    [
        lambda p, x: jnp.sum(x @ jnp.concatenate(p, 1)) + jnp.sum(p[0]),  # read elsewhere
        lambda p, x: (jnp.sum(x @ jnp.concatenate(p, 1)), p[1]),  # a result
        lambda p, x: jnp.sum(x @ jnp.concatenate([p[0], p[0]], 1)) + jnp.sum(p[1]),  # twice
        lambda p, x: jnp.sum(x @ jnp.concatenate([p[0], 2 * p[1]], 1)),  # not as it is
        lambda p, x: jnp.sum(jnp.concatenate([p[0], x.T], 1)) + jnp.sum(p[1]),  # no weight
    ],
)
def test_what_is_read_elsewhere_or_changed_is_not_joined_once(fn):
    captured, (body, found) = joins(fn, [normal(4, 4), normal(4, 4)], normal(4, 4))
    assert found == ()
    assert body is captured.body


@pytest.mark.parametrize("case", [heads_case, stacked_case], ids=["heads", "tables"])
def test_a_plan_with_joined_weights_computes_the_same(case, tmp_path):
    fn, args = case()
    plan = planned(fn, args, pack=True)
    assert plan.program.joining is not None
    wanted = jax.jit(jax.value_and_grad(fn))(*args)
    sharded = plan.shard(*args)
    assert jax.tree.map(lambda x: x.sharding, sharded) == plan.in_shardings
    value, gradient = jax.jit(jax.value_and_grad(plan))(*sharded)
    close((value, plan.shard.unpack(gradient)), wanted)
    same(plan.shard.unpack(sharded[0]), args[0])
    close(jax.jit(jax.value_and_grad(plan))(*args), wanted)  # the function's own, joined in the call
    plan.program.check_derivation()
    assert plan.check().agrees()
    text = io.StringIO()
    plan.explain(file=text)
    assert str(plan.program.joining) in text.getvalue()
    assert str(plan.program.joining) in str(plan.inspect.diff())
    plan.files.save(tmp_path / "plan.json")
    again = unity.load(tmp_path / "plan.json", fn, *args)
    assert again.program.pcg.key == plan.program.pcg.key
    same(again.shard(*args), sharded)


def test_tables_that_do_not_divide_alone_lie_in_parts_together():
    fn, args = stacked_case()
    apart, together = (planned(fn, args, pack=pack, objective="memory") for pack in (False, True))
    assert together.memory < 0.3 * apart.memory
    (tables, *_) = jax.tree.leaves(together.shard(*args)[0])
    assert tables.shape == (32768, 3)
    assert all(shard.data.shape[0] == 4096 for shard in tables.addressable_shards)


def looked_up(mode, ids):
    """A table of rows that nothing divides, and indices out of its range."""

    def fn(table, i):
        return jnp.sum(jnp.sin(table.at[i].get(mode=mode)))

    return fn, (normal(1003, 3), jnp.asarray(ids, jnp.int32))


@pytest.mark.parametrize("mode", ["clip", "promise_in_bounds"])
def test_a_table_that_nothing_divides_is_filled_up(mode):
    fn, args = looked_up(mode, [0, 1, 1002, 1002, 500, 7, 8, 9, 1003, 2000, 1005, -3])
    plan = planned(fn, args, pack=True, objective="memory")
    table, ids = plan.shard(*args)
    assert table.shape == (1008, 3)
    assert all(shard.data.shape[0] == 126 for shard in table.addressable_shards)
    value, gradient = jax.jit(jax.value_and_grad(plan))(table, ids)
    close((value, plan.shard.unpack(gradient)), jax.jit(jax.value_and_grad(fn))(*args))
    assert not np.asarray(gradient)[1003:].any()
    same(plan.shard.unpack(table), args[0])


def test_a_table_whose_rows_may_be_nan_or_are_read_otherwise_is_left_as_it_is():
    fn, args = looked_up("fill", [0, 1, 2000])
    for function in (fn, lambda t, i: jnp.sum(t[i]) + jnp.sum(t), lambda t, i: (jnp.sum(t[i]), t)):
        assert joins(function, *args)[1][1] == ()


def test_what_does_not_fit_may_fit_with_its_weights_joined():
    fn, args = stacked_case()
    together = planned(fn, args, pack=True, objective="memory")
    limit = 1.5 * together.memory
    with pytest.raises(unity.InfeasibleError):
        planned(fn, args, memory_limit=limit)
    assert planned(fn, args, memory_limit=limit, pack=True).memory <= limit


def test_an_optimizer_works_on_joined_weights_as_on_the_functions_own():
    fn, args = heads_case()
    plan = planned(fn, args, pack=True)

    def trained(loss, params, *batch):
        moments = jax.tree.map(jnp.zeros_like, params)
        gradients = jax.jit(jax.grad(loss))
        for _ in range(3):
            gradient = gradients(params, *batch)
            moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradient)
            params = jax.tree.map(lambda p, m: p - 0.1 * m - 1e-3 * p, params, moments)
        return {"params": params, "moments": (moments,)}

    close(plan.shard.unpack(trained(plan, *plan.shard(*args))), trained(fn, *args))


def test_without_pack_weights_stay_as_they_are():
    fn, args = heads_case()
    assert planned(fn, args).program.joining is None
    assert planned(lambda p, x: jnp.sum(x @ p), (normal(4, 4), normal(4, 4)), pack=True).program.joining is None


def test_a_file_that_joins_other_weights_is_refused():
    fn, args = heads_case()
    captured = capture(fn, *args)
    found = joining_of(captured, 8)
    assert found is not None
    found.check()
    source = TransformationSource(captured, (), Machine.grid(1, 8), default_library)
    assert found.record.apply(source).packing == found.packing
    with pytest.raises(PlanError, match="joins are others"):
        JoiningRecord("0").apply(source)
    other = capture(lambda p, x: jnp.sum(x @ jnp.concatenate([p["q"], p["k"]], 1)), *args)
    with pytest.raises(DerivationError, match="another program"):
        replace(found, before=other).check()
