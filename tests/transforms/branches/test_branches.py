"""Branches on devices of their own: the same values and gradients, the collectives as predicted, weights where they are used."""

import io
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import fewer
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax import lax
from msgspec import structs
from stepped import stepped

import unity
from benchmarks.models import get
from benchmarks.models.model import concrete
from unity.base.errors import DerivationError, InfeasibleError, ParallelTypeError, PlanError
from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture
from unity.pcg.capture.group_slots import Slots
from unity.pcg.capture.packed_arguments import Packing
from unity.pcg.ir.graph import BRANCHES, PCG
from unity.pcg.ir.payloads import Branches
from unity.pcg.parallel.axis_names import AxisNames
from unity.pcg.parallel.branches import check_boundary_types, groups_of
from unity.pcg.parallel.traffic import traffic
from unity.plan.plan import Plan
from unity.plan.plan_family import PlanFamily
from unity.search.cost.cost import Training
from unity.search.cost.prediction import predict
from unity.search.session import Search
from unity.substitutions.language.axioms import default_library
from unity.transforms.branches import Forked, Share, branched, dealt
from unity.transforms.branches.choose import NEAR, BranchCandidate, parts_of
from unity.transforms.transformation import TransformationSource

TREE = Machine.grid(2, 4)
FOUR = Machine.grid(1, 4)
SLOW = unity.Device("slow", {"float32": 1e6}, 10**9, 1e9, 0.5, 0.0)  # so that all that can be is shared
RNG = np.random.default_rng(0)

pytestmark = pytest.mark.usefixtures("own_cache")


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape) / np.sqrt(shape[-1]), jnp.float32)


def towers(params, users, items):
    """Two towers of other depths and widths, and their products."""
    u = jax.nn.relu(users @ params["u1"]) @ params["u2"]
    v = jnp.tanh(jax.nn.relu(items @ params["v1"]) @ params["v2"]) @ params["v3"]
    return ((u * v).sum(-1) ** 2).mean()


def towers_case():
    sizes = {"u1": (24, 32), "u2": (32, 16), "v1": (40, 16), "v2": (16, 48), "v3": (48, 16)}
    return towers, ({k: normal(*s) for k, s in sizes.items()}, normal(16, 24), normal(16, 40))


def convolved(x, w):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def inception(params, x):
    """A block of four branches of other kernels, depths and channels, joined by concatenation, and what follows it."""
    x = jax.nn.relu(convolved(x, params["stem"]))
    one = jax.nn.relu(convolved(x, params["a"]))
    three = jax.nn.relu(convolved(jax.nn.relu(convolved(x, params["b1"])), params["b2"]))
    double = jax.nn.relu(convolved(jax.nn.relu(convolved(jax.nn.relu(convolved(x, params["c1"])), params["c2"])), params["c3"]))
    pooled = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")
    pool = jax.nn.relu(convolved(pooled, params["d"]))
    y = jnp.concatenate([one, three, double, pool], -1)
    return (y.mean((1, 2)) @ params["out"]).sum() ** 2


def inception_case():
    kernels = {
        "stem": (3, 3, 4, 8), "a": (1, 1, 8, 4), "b1": (1, 1, 8, 6), "b2": (3, 3, 6, 8), "c1": (1, 1, 8, 4), "c2": (3, 3, 4, 6),
        "c3": (3, 3, 6, 6), "d": (1, 1, 8, 2),
    }  # fmt: skip
    return inception, ({k: normal(*s) for k, s in kernels.items()} | {"out": normal(20, 3)}, normal(8, 8, 8, 4))


ROWS = (40, 17, 96, 33, 8)  # of the tables, which nothing divides evenly


def dlrm(params, dense, ids):
    """Tables of unequal sizes, a bottom and a top network."""
    bottom = jax.nn.relu(jax.nn.relu(dense @ params["bottom"][0]) @ params["bottom"][1])
    looked_up = [table[ids[:, k]] for k, table in enumerate(params["tables"])]
    x = jnp.concatenate([bottom, *looked_up], -1)
    return ((jax.nn.relu(x @ params["top"][0]) @ params["top"][1]) ** 2).mean()


def dlrm_case():
    tables = [normal(n, 8) for n in ROWS]
    params = {"bottom": [normal(12, 16), normal(16, 8)], "tables": tables, "top": [normal(48, 16), normal(16, 1)]}
    return dlrm, (params, normal(16, 12), jnp.asarray(RNG.integers(8, size=(16, len(ROWS)))))


def summed(params, x):
    """Three branches that are added up: two networks and a recurrent one."""
    first = jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"])
    second = jnp.sin(x @ params["c"]) @ params["d"]
    third = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["e"])[0]
    return ((first + second + third) ** 2).sum()


def summed_case():
    sizes = {"a": (16, 32), "b": (32, 16), "c": (16, 8), "d": (8, 16), "e": (3, 16, 16)}
    return summed, ({k: normal(*s) for k, s in sizes.items()}, normal(8, 16))


CASES = {"towers": towers_case, "inception": inception_case, "dlrm": dlrm_case, "summed": summed_case}


def planned(fn, args, machine, along, pack=False, shares=None) -> Plan:
    """The fastest plan whose branches are on devices of their own."""
    captured = capture(fn, *args)
    program = Forked(captured)
    count = int(np.prod([axis.size for axis in along]))
    if shares is None:
        shares = [dealt(k, range(1, 1 + len(r.branches)), count) for k, r in enumerate(program.regions)]
    made = branched(program, along, shares, pack)
    search = Search(made.after.graph, captured.differentiated, machine, Training())
    return Plan(PlanFamily(fn, made.before, search, 0.0, transformations=(made,)), search.fastest)


def close(found, wanted, most=1e-10):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.shape == b.shape
        assert np.abs(np.asarray(a) - np.asarray(b)).max() <= most * max(1e-3, float(np.abs(b).max()))


def doubled(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


@pytest.mark.parametrize(
    ("name", "machine", "axes", "pack"),
    [
        ("towers", TREE, 1, False), ("inception", TREE, 2, True), ("dlrm", FOUR, 2, True), ("summed", FOUR, 1, False),
    ],
)  # fmt: skip
def test_branches_apart_compute_the_same_and_send_what_was_predicted(name, machine, axes, pack):
    with jax.enable_x64(True):
        fn, args = CASES[name]()
        args = doubled(args)
        plan = planned(fn, args, machine, machine.axes[:axes], pack)
        step, found = stepped(plan, *args)
        close(step, jax.jit(jax.value_and_grad(fn))(*args))
        close(plan.shard.unpack(plan.shard(*args)[0]), args[0], 0.0)
        assert [n.kind for n in plan.program.pcg.nodes].count(BRANCHES) == 1
        assert all(line.predicted == line.compiled for line in found.lines), str(found)


def frozen_weight(params, users, items):
    """Two towers, one with a weight that is not trained."""
    u = jax.nn.relu(users @ params["u1"]) @ params["u2"]
    v = jnp.tanh(jax.nn.relu(items @ params["v1"]) @ lax.stop_gradient(params["v2"])) @ params["v3"]
    return ((u * v) ** 2).mean()


def frozen_tower(params, users, items):
    """Two towers, of which one is not trained."""
    u = jax.nn.relu(users @ params["u1"]) @ params["u2"]
    v = jnp.tanh(jax.nn.relu(items @ params["v1"]) @ params["v2"]) @ params["v3"]
    return ((u * lax.stop_gradient(v)) ** 2).mean()


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("fn", [frozen_weight, frozen_tower])
def test_gradients_that_are_zero_are_not_summed_over_the_groups(fn, pack):
    with jax.enable_x64(True):
        args = doubled(towers_case()[1])
        plan = planned(fn, args, TREE, TREE.axes[:1], pack)
        step, found = stepped(plan, *args)
        close(step, jax.jit(jax.value_and_grad(fn))(*args))
        assert all(line.predicted == line.compiled for line in found.lines), str(found)


def test_inside_of_branches_other_axes_are_used_and_their_collectives_stay_inside():
    fn, (params, users, items) = towers_case()
    args = params, users[:7], items[:7]  # samples that nothing divides, so that features are
    captured = capture(fn, *args)
    made = branched(Forked(captured), TREE.axes[:1], [Share(0, (0, 1), 0.5)], False)
    search = Search(made.after.graph, captured.differentiated, replace(TREE, device=SLOW), Training())
    plan = Plan(PlanFamily(fn, made.before, search, 0.0, transformations=(made,)), search.fastest)
    (node,) = [n for n in plan.program.pcg.nodes if n.kind == BRANCHES]
    inner = {id(n) for group in groups_of(node) for n in group.graph.nodes}
    flows = captured.differentiated
    within = [c for c in traffic(plan.program.pcg, flows) if id(c.node) in inner]
    assert within
    assert all(0 not in c.axes for c in within)
    step, found = stepped(plan, *args)
    close(step, jax.jit(jax.value_and_grad(fn))(*args), 2e-5)
    assert not found.deviations, str(found)


def test_a_packed_plan_takes_the_functions_own_weights_too():
    fn, args = towers_case()
    plan = planned(fn, args, TREE, TREE.axes[:1], pack=True)
    close(jax.jit(jax.value_and_grad(plan))(*args), jax.jit(jax.value_and_grad(fn))(*args), 2e-5)


def test_only_the_devices_of_a_branch_hold_its_packed_weights():
    fn, args = dlrm_case()
    without, plan = (planned(fn, args, FOUR, FOUR.axes, pack) for pack in (False, True))
    packing = plan.program.packing
    tables = {n for s in packing.slots for n in s.leaves if n is not None}
    assert len(tables) >= len(ROWS)
    params, _, _ = plan.shard(*args)
    leaves = jax.tree.leaves(params)
    for s in packing.slots:
        shards = leaves[s.first].addressable_shards
        assert leaves[s.first].shape == s.stacked
        assert s.stacked[0] == 4
        assert all(shard.data.shape[0] == 1 for shard in shards)
    # nothing is left of the tables' gradients to add up over groups
    flows = plan.program.family.captured.differentiated
    moved = [sum(c.elements for c in traffic(p.program.pcg, flows) if c.node.kind == "replicate") for p in (without, plan)]
    assert moved[1] < moved[0] - sum(n * 8 for n in ROWS) / 2
    assert plan.memory < without.memory


def test_the_tables_of_a_dlrm_are_each_on_a_device_of_its_own():
    rows = (401, 397, 389, 383)
    model = get("dlrm", tables=rows, width=8, bottom=(4, 8, 8), top=(8, 2), batch=16)
    args = concrete(model)
    machine = replace(FOUR, device=unity.Device("memory", {"float32": 1e15}, 10**9, 1e7, 0.5, 0.0))  # so that tables take longest
    plan = unity.optimize(model.loss, *args, machine=machine, progress=False, search="captured", branch_groups=4, pack=True)
    assert plan.program.branching is not None
    (node,) = [n for n in plan.program.serial.nodes if n.kind == BRANCHES]
    _, *tables = node.of(Branches).groups  # the first branch is the bottom network
    assert sorted(tables) == [0, 1, 2, 3]
    params, batch = plan.shard(*args)
    (array,) = [x for x in jax.tree.leaves(params["tables"]) if x.size]
    held = {shard.index[0].start or 0: shard for shard in array.addressable_shards}
    assert len({shard.device for shard in held.values()}) == 4
    for group, leaf in zip(tables, jax.tree.leaves(args[0]["tables"]), strict=True):
        assert held[group].data.shape == (1, max(rows), 8)
        close(held[group].data[0, : leaf.shape[0]], leaf, 0.0)
    value, gradient = jax.jit(jax.value_and_grad(plan))(params, batch)
    close((value, plan.shard.unpack(gradient)), jax.jit(jax.value_and_grad(model.loss))(*args), 2e-5)


def test_a_sum_and_a_concatenation_of_branches_are_reduced_once():
    for case in (summed_case, inception_case):
        fn, args = case()
        plan = planned(fn, args, FOUR, FOUR.axes[:1])
        forward = [c for c in traffic(plan.program.pcg) if 0 in c.axes]
        assert len(forward) == 1


@pytest.mark.parametrize("name", CASES)
def test_a_region_alone_has_the_same_branches(name):
    fn, args = CASES[name]()
    program = Forked(capture(fn, *args))
    (region,) = program.regions
    alone = Forked(program.alone(region))
    (same,) = alone.regions
    assert [alone.graphs[b][0].key for b in same.branches] == [program.graphs[b][0].key for b in region.branches]
    assert alone.captured.graph.outputs[0].tensor == program.body.tensors[program.body.equations[region.join].results[0]]


def test_attempts_with_other_groups_share_the_programs_of_operators():
    """What is derived from a program, such as its choices, is derived once."""
    fn, args = summed_case()
    program = Forked(capture(fn, *args))
    attempts = [branched(program, FOUR.axes[k : k + 1], [dealt(0, (1, 2, 3), 2)], False) for k in range(2)]
    bodies = [{n.body.key: n.body for n, _ in made.after.graph.walk() if n.body is not None} for made in attempts]
    assert bodies[0].keys() - {n.body.key for n, _ in program.captured.graph.walk() if n.body is not None}
    assert all(bodies[1][key] is body for key, body in bodies[0].items())


def test_a_branch_may_be_read_twice_by_its_join():
    def fn(params, x):
        a, b = jnp.tanh(x @ params["a"]) @ params["b"], jnp.sin(x @ params["b"]) @ params["a"]
        return (jnp.concatenate([a, b, a], -1) ** 3).sum()

    args = {"a": normal(8, 8), "b": normal(8, 8)}, normal(4, 8)
    close(jax.jit(planned(fn, args, FOUR, FOUR.axes[:1]))(*args), fn(*args), 2e-5)


def test_several_branches_share_a_group_where_there_are_more_of_them():
    fn, args = dlrm_case()
    plan = planned(fn, args, FOUR, FOUR.axes[:1], shares=[Share(0, (0, 1, 1, 0, 1, 0), 0.5)])
    (node,) = [n for n in plan.program.serial.nodes if n.kind == BRANCHES]
    assert [g.results for g in groups_of(node)] == [(0, 3, 5), (1, 2, 4)]
    close(jax.jit(plan)(*args), fn(*args), 2e-5)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 5))
def test_the_longest_first_is_never_worse_than_twice_the_even_share(loads, groups):
    assume(len(loads) >= groups)
    share = dealt(0, loads, groups)
    assert set(share.groups) == set(range(groups))
    largest = max(sum(n for n, g in zip(loads, share.groups, strict=True) if g == group) for group in range(groups))
    even = max(sum(loads) / groups, max(loads))
    assert largest <= 2 * even
    assert share.weight * sum(loads) == pytest.approx(largest) or not sum(loads)


shapes = st.integers(0, 3).flatmap(lambda rank: st.lists(st.tuples(*[st.integers(1, 5)] * rank), min_size=2, max_size=4))


@given(shapes, st.integers(0, 3))
@settings(max_examples=fewer(4))
def test_what_is_packed_is_unpacked_to_the_same(given_shapes, without):
    leaves = [jnp.asarray(RNG.normal(size=s), jnp.float32) for s in given_shapes]
    numbers = (*range(len(leaves)), *[None] * without)
    slots = Slots(numbers, (*given_shapes, *[()] * without))
    packing = Packing((slots,))
    packed = packing.pack(leaves)
    assert packed[0].shape == (len(numbers), *slots.shape)
    assert all(x.shape == (0,) for x in packed[1:])
    assert float(jnp.abs(packed[0]).sum()) == pytest.approx(sum(float(jnp.abs(x).sum()) for x in leaves), rel=1e-5)
    assert all(a is b for a, b in zip(packing.pack(packed), packed, strict=True))
    close(packing.unpack(packed), leaves, 0.0)


def test_weights_of_several_arguments_that_are_packed_together_are_placed_together():
    def fn(one, other, users, items):
        return towers({**one, **other}, users, items)

    _, (params, *batch) = towers_case()
    parts = [{k: x for k, x in params.items() if k[0] == name} for name in "uv"]
    options = {"machine": TREE, "search": "captured", "branch_groups": 2, "pack": True, "pipelines": False, "progress": False}
    plan = unity.optimize(fn, *parts, *batch, argnums=(0, 1), **options)
    with pytest.raises(PlanError, match=r"args\[0\]\['u.'\] is packed with weights of another argument"):
        plan.shard.local(parts[0], argument=0)
    close(jax.jit(plan)(*plan.shard(*parts, *batch)), fn(*parts, *batch), 2e-5)


def test_an_optimizer_works_on_packed_weights_as_on_the_functions_own():
    fn, args = towers_case()
    plan = planned(fn, args, TREE, TREE.axes[:1], pack=True)

    def trained(loss, params, *batch):
        moments = jax.tree.map(jnp.zeros_like, params)
        gradients = jax.jit(jax.grad(loss))
        for _ in range(3):
            gradient = gradients(params, *batch)
            moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradient)
            params = jax.tree.map(lambda p, m: p - 0.1 * m - 1e-3 * p, params, moments)
        return {"params": params, "moments": (moments,)}

    found = plan.shard.unpack(trained(plan, *plan.shard(*args)))
    close(found, trained(fn, *args), 2e-5)


def test_optimize_finds_branches_saves_them_and_says_so(tmp_path):
    fn, args = towers_case()
    plan = unity.optimize(fn, *args, machine=TREE, progress=False, branch_groups=2, pack=True)
    assert str(plan.program.branching).startswith("2 branches on 2 groups of devices, ")
    text = io.StringIO()
    plan.explain(file=text)
    assert f"{plan.program.branching}, along " in text.getvalue()
    plan.program.check_derivation()
    plan.files.save(tmp_path / "plan.json")
    loaded = unity.load(tmp_path / "plan.json", fn, *args)
    assert loaded.program.pcg.key == plan.program.pcg.key
    assert loaded.program.packing == plan.program.packing
    assert plan.program.packing
    close(jax.jit(loaded)(*loaded.shard(*args)), fn(*args), 2e-5)
    assert plan.inspect.simulate().makespan > 0
    assert "branches" in str(plan.inspect.diff())
    without = unity.optimize(fn, *args, machine=TREE, progress=False, branches=False)
    assert without.program.branching is None
    assert unity.optimize(fn, *args, machine=TREE, progress=False).time <= without.time


def test_costs_count_what_the_slowest_group_takes():
    fn, _ = towers_case()
    sizes = {"u1": (1024, 2048), "u2": (2048, 512), "v1": (2048, 1024), "v2": (1024, 2048), "v3": (2048, 512)}
    params = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in sizes.items()}
    batch = [jax.ShapeDtypeStruct((2048, n), jnp.float32) for n in (1024, 2048)]
    plan = unity.optimize(fn, params, *batch, machine=TREE, progress=False, search="captured", branch_groups=2)
    assert plan.program.branching is not None
    (share,) = plan.program.branching.shares
    parts = parts_of(BranchCandidate(plan.program.branching, plan.program.family.search, plan.program.candidate), TREE, Training())
    assert parts == pytest.approx({0: share.weight}, rel=NEAR)
    assert predict(plan.program.pcg, TREE, plan.program.family.captured.differentiated).time == pytest.approx(plan.time, rel=0.02)


def test_branches_are_taken_where_they_are_faster():
    """A batch that nothing divides, and odd widths: all that devices can share are the branches."""

    def fn(params, x, y):
        a, b = x, y
        for w, v in zip(params["a"], params["b"], strict=True):
            a, b = jnp.tanh(a @ w), jnp.tanh(b @ v)
        return (a * b).sum()

    args = ({name: [normal(301, 301) for _ in range(3)] for name in "ab"}, normal(7, 301), normal(7, 301))
    machine = replace(Machine.grid(1, 2), device=SLOW)
    plan = unity.optimize(fn, *args, machine=machine, progress=False, search="captured", pack=True)
    without = unity.optimize(fn, *args, machine=machine, progress=False, search="captured", branches=False)
    assert plan.program.branching is not None
    assert plan.time < 0.7 * without.time
    close(jax.jit(jax.value_and_grad(plan))(*args), jax.jit(jax.value_and_grad(fn))(*args), 2e-5)


def repeating(params, x):
    """Layers of two branches each, in two scans that repeat the same."""

    def layer(c, w):
        a = jnp.tanh(c @ w["a1"]) @ w["a2"]
        b = jnp.sin(jax.nn.relu(c @ w["b1"]) @ w["b2"]) @ w["b3"]
        return c + a + b, None

    x = lax.scan(layer, x, params["first"])[0]
    return (lax.scan(layer, jnp.tanh(x), params["second"])[0] ** 2).mean()


def repeating_case():
    sizes = {"a1": (3, 16, 32), "a2": (3, 32, 16), "b1": (3, 16, 24), "b2": (3, 24, 16), "b3": (3, 16, 16)}
    return repeating, ({part: {k: normal(*s) for k, s in sizes.items()} for part in ("first", "second")}, normal(32, 16))


def test_branches_are_found_inside_of_scans(tmp_path):
    fn, args = repeating_case()
    (spot,) = Forked(capture(fn, *args)).spots
    assert (len(spot.region.branches), spot.times) == (2, 6)
    plan = unity.optimize(fn, *args, machine=TREE, progress=False, search="captured", branch_groups=2, pipelines=False)
    assert [n.kind for n, _ in plan.program.pcg.walk()].count(BRANCHES) == 2
    assert plan.program.branching is not None
    (share,) = plan.program.branching.shares
    parts = parts_of(BranchCandidate(plan.program.branching, plan.program.family.search, plan.program.candidate), TREE, Training())
    assert parts == pytest.approx({0: share.weight}, rel=0.02)
    step, found = stepped(plan, *args)
    close(step, jax.jit(jax.value_and_grad(fn))(*args), 2e-5)
    assert all(line.predicted == line.compiled for line in found.lines), str(found)
    plan.program.check_derivation()
    plan.files.save(tmp_path / "plan.json")
    assert unity.load(tmp_path / "plan.json", fn, *args).program.pcg.key == plan.program.pcg.key


def test_no_region_lies_in_another():
    def fn(params, x):
        u = lax.scan(lambda c, w: (jnp.tanh(c @ w) @ w + jnp.sin(c @ w) @ w, None), x, params["a"])[0]
        v = jnp.tanh(x @ params["b"]) @ params["b"]
        return (u * v).sum()

    program = Forked(capture(fn, {"a": normal(2, 16, 16), "b": normal(16, 16)}, normal(8, 16)))
    assert [len(spot.region.branches) for spot in program.spots] == [2]
    assert program.spots[0].program is program


REFUSED = {
    "none": (lambda p, x: ((x @ p["a"]) ** 2).sum(), "no branches"),
    "one product each": (lambda p, x: ((x @ p["a"]) * (x @ p["b"])).sum(), "no branches"),
    "all devices": (
        lambda p, x: (lax.betainc(jnp.abs(x @ p["a"] @ p["b"]) + 1, x * 0 + 1, x * 0 + 0.5) * (x @ p["b"] @ p["a"])).sum(),
        r"regularized_incomplete_beta at .*test_branches.py.* must run on all devices",
    ),
    "too few": (lambda p, x: ((x @ p["a"] @ p["b"]) * (x @ p["b"] @ p["a"])).sum(), "are fewer than 4"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_apart_says_why(name):
    fn, reason = REFUSED[name]
    args = {"a": normal(8, 8), "b": normal(8, 8)}, normal(4, 8)
    with pytest.raises(InfeasibleError, match=f"(?s){reason}.*Without branch_groups="):
        unity.optimize(fn, *args, machine=FOUR, progress=False, search="captured", branch_groups=4 if name == "too few" else 2)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"branch_groups": 1}, "expected a number of groups"),
        ({"branch_groups": 2, "branches": False}, "do not go together"),
        ({"branch_groups": "2"}, "expected a number of groups"),
        ({"branch_groups": 2, "search": "optcnn"}, "search='optcnn' finds none"),
        ({"branch_groups": 3}, "no axes of .* make 3 groups"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, reason):
    fn, args = towers_case()
    with pytest.raises((ValueError, InfeasibleError), match=reason):
        unity.optimize(fn, *args, machine=TREE, progress=False, **options)


def test_a_group_that_is_not_on_its_axes_is_refused_by_the_type_checker():
    fn, args = towers_case()
    plan = planned(fn, args, TREE, TREE.axes[:1])
    (node,) = [n for n in plan.program.pcg.nodes if n.kind == BRANCHES]
    axes = plan.program.pcg.axes
    groups = "2 groups of branches along {} of the mesh {}: expected axes of 2 devices, got {}"
    for along, here, size in (("d0 d1", "d0 d1", 4), ("x9", "no axis", 1), ("n0 x9", "n0", 2)):
        wrong = replace(node, payload=structs.replace(node.of(Branches), along=tuple(along.split())))
        with pytest.raises(ParallelTypeError, match=groups.format(here, "n0=2 d0=2 d1=2", size)):
            check_boundary_types(wrong, axes)
        names = AxisNames.of_every_axis(axes, TREE.named_levels)
        shown = {"d0 d1": "device_a device_b", "n0": "node"}.get(here, here)
        (named,) = [n for n in names.run_graph(PCG((), tuple(wrong.results), axes)).nodes if n.kind == BRANCHES]
        with pytest.raises(ParallelTypeError, match=groups.format(shown, "node=2 device_a=2 device_b=2", size)):
            check_boundary_types(named, names.shown)
    wrong = replace(node, payload=structs.replace(node.of(Branches), along=("d0",)))
    with pytest.raises(ParallelTypeError, match="of branches along d0 is"):
        check_boundary_types(wrong, axes)


def test_a_file_that_speaks_of_other_branches_is_refused():
    fn, args = towers_case()
    captured = capture(fn, *args)
    made = branched(Forked(captured), TREE.axes[:1], [Share(0, (0, 1), 0.5)], True)
    source = TransformationSource(captured, (), TREE, default_library)
    assert made.record.apply(source).after.graph.key == made.after.graph.key
    with pytest.raises(PlanError, match="cannot be made"):
        structs.replace(made.record, shares=(Share(0, (0, 0), 0.5),)).apply(source)
    with pytest.raises(PlanError, match="cannot be on the machine v100-2x4"):
        structs.replace(made.record, along=("x",)).apply(source)
    with pytest.raises(DerivationError, match="leads to another program"):
        replace(made, shares=(Share(0, (1, 0), 0.5),)).check()
