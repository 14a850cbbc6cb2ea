"""Specifications over merged axes place arrays as the plan's own shardings do, and need no devices."""

import re
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import fewer
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import unity
from unity.pcg.parallel.axis_names import AxisNames
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import UNUSED, partitioned
from unity.plan.shardings.specs import Boundary, rules

P = PartitionSpec


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def loss(params, x):
    for layer in params["layers"]:
        x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
    return (x @ params["out"]).mean(), x


PARAMS = {"layers": [{"up": struct(64, 256), "down": struct(256, 64)} for _ in range(3)], "out": struct(64, 8)}
UP = unity.pin("args[0]['layers'][*]['up']", P(None, "device"))


@pytest.fixture(scope="module")
def pinned():
    return unity.optimize(
        loss, PARAMS, struct(64, 64), machine=unity.Machine.grid(2, 4, "a100"), constraints=[UP], search="captured", progress=False
    )


def test_specs_place_arguments_as_the_plan_does(pinned):
    mesh = Mesh(np.asarray(jax.devices()[:8]).reshape(tuple(pinned.mesh_shape.values())), tuple(pinned.mesh_shape))
    specs = jax.tree.leaves(pinned.in_specs, is_leaf=lambda x: isinstance(x, P))
    shardings = jax.tree.leaves(pinned.in_shardings)
    assert len(specs) == len(shardings) == 8
    for spec, sharding in zip(specs, shardings, strict=True):
        assert NamedSharding(mesh, spec).is_equivalent_to(sharding, 2), spec
    assert pinned.mesh_shape == {"node": 2, "device": 4}
    assert pinned.in_specs[0]["layers"][0]["up"] == P(None, "device")
    assert pinned.inspect.abstract_mesh.shape == pinned.mesh_shape
    assert jax.tree.structure(pinned.out_specs, is_leaf=lambda x: isinstance(x, P)) == jax.tree.structure((0, 0))


def branched(weights, x):
    h = jnp.tanh(x @ weights["first"])
    jax.debug.print("mean {}", h.mean())
    return (h @ jnp.concatenate([weights["a"], weights["b"]], 1)).mean(), h


TRANSFORMED = {
    "pipeline": (
        lambda w, x: (jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, w)[0] ** 2).mean(),
        (struct(4, 256, 256), struct(512, 256)),
        {"pipeline": unity.PipelineShape(2, 4)},
    ),
    "packed weights and an effect": (
        branched,
        ({"first": struct(256, 256), "a": struct(256, 512), "b": struct(256, 512)}, struct(4096, 256)),
        {"pack": True},
    ),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_specs_of_transformed_programs_place_their_arrays_as_the_plan_does(name):
    fn, args, options = TRANSFORMED[name]
    plan = unity.optimize(fn, *args, machine=unity.Machine.grid(2, 4, "a100"), progress=False, search="captured", **options)
    mesh = Mesh(np.asarray(plan.inspect.mesh.devices).reshape(tuple(plan.mesh_shape.values())), tuple(plan.mesh_shape))
    specs, outputs = (jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, P)) for tree in (plan.in_specs, plan.out_specs))
    placed = jax.tree.map(lambda s: jnp.ones(s.shape) / 8, args)
    arrays = jax.tree.leaves(plan.shard(*placed))
    for spec, array in zip(specs, arrays, strict=True):
        assert NamedSharding(mesh, spec).is_equivalent_to(array.sharding, array.ndim), spec
    results = jax.tree.leaves(plan(*plan.shard(*placed)))
    for spec, array in zip(outputs, results, strict=True):
        assert NamedSharding(mesh, spec).is_equivalent_to(array.sharding, array.ndim), spec
    assert plan.program.pipelining is not None or (plan.program.packing and plan.program.family.captured.observations)


def test_no_devices_are_needed():
    plan = unity.optimize(
        loss, PARAMS, struct(4096, 64), machine=unity.Machine.grid(64, 8, "h100"), search="captured", progress=False
    )
    assert np.prod(list(plan.mesh_shape.values())) == 512
    assert plan.in_specs[1] != P()


def test_specs_of_whole_levels_are_pins(pinned):
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(PARAMS)]
    specs = jax.tree.leaves(pinned.in_specs[0], is_leaf=lambda x: isinstance(x, P))
    pins = [unity.pin(f"args[0]{path}", spec) for path, spec in zip(paths, specs, strict=True)]
    again = unity.optimize(
        loss, PARAMS, struct(64, 64), machine=pinned.inspect.machine, constraints=pins, search="captured", progress=False
    )
    assert again.in_specs == pinned.in_specs


def test_a_mesh_of_the_axes_of_the_specifications_is_the_plans(pinned):
    mesh = jax.make_mesh(tuple(pinned.mesh_shape.values()), tuple(pinned.mesh_shape), axis_types=(AxisType.Auto,) * 2)
    there = pinned.on(mesh)
    assert there.inspect.mesh == mesh
    shardings = jax.tree.map(partial(NamedSharding, mesh), there.in_specs)
    alike = jax.tree.map(
        lambda one, other: one.mesh == other.mesh and one.is_equivalent_to(other, 2), there.in_shardings, shardings
    )
    assert all(jax.tree.leaves(alike))
    args = there.shard(*jax.tree.map(lambda s: jnp.ones(s.shape) / 8, (PARAMS, struct(64, 64))))
    expected = loss(*args)[0]
    for plan in (there, jax.jit(there), there.constrained()):
        results, gradients = plan(*args), jax.jit(jax.grad(lambda p, x, plan=plan: plan(p, x)[0]))(*args)
        np.testing.assert_allclose(results[0], expected, rtol=1e-5)
        assert {x.sharding.mesh for x in jax.tree.leaves((results, gradients))} == {mesh}
    assert there.check().agrees()


def test_one_device_is_a_mesh_of_one_axis():
    plan = unity.optimize(loss, PARAMS, struct(64, 64), machine=unity.Machine.grid(1, 1, "a100"), search="captured", progress=False)
    assert plan.mesh_shape == {"device": 1}
    mesh = jax.make_mesh((1,), ("device",), axis_types=(AxisType.Auto,))
    assert plan.on(mesh).in_shardings[1] == NamedSharding(mesh, PartitionSpec(None, None))
    assert plan.in_specs[1] == plan.out_specs[0] == P()


def test_a_plan_runs_on_other_devices(pinned):
    there = pinned.on(jax.devices()[::-1])
    args = jax.tree.map(lambda s: jnp.ones(s.shape) / 8, (PARAMS, struct(64, 64)))
    placed = there.shard(*args)
    assert list(there.inspect.mesh.devices.flat) == jax.devices()[::-1]
    np.testing.assert_allclose(there(*placed)[0], loss(*args)[0], rtol=1e-4)
    assert pinned.on(there.inspect.mesh).inspect.mesh == there.inspect.mesh
    assert all(point.inspect.mesh == there.inspect.mesh for point in there.frontier)


@dataclass(frozen=True)
class RemoteDevice:
    """A device of one of several processes."""

    id: int
    process_index: int


def test_processes_that_share_chosen_devices_compare_their_plans(pinned, monkeypatch):
    devices = [RemoteDevice(k, k // 4) for k in range(16)]
    own = [RemoteDevice(k, 9) for k in range(200, 208)]  # all of one process
    monkeypatch.setattr("unity.base.processes.several", lambda: True)
    monkeypatch.setattr("unity.base.processes.jax.devices", lambda: [*devices, *own])
    monkeypatch.setattr("unity.plan.device_mesh.mesh_of", lambda axes, chosen: chosen)
    compared = []
    monkeypatch.setattr("unity.plan.device_mesh.check_alike", compared.append)
    assert pinned.on(devices[:8]).inspect.mesh == tuple(devices[:8])
    assert len(compared) == 1
    assert "the plan" in compared[0]
    topology = [RemoteDevice(k, k // 4) for k in range(100, 108)]  # not present
    assert pinned.on(topology).inspect.mesh
    assert pinned.on(own).inspect.mesh
    assert len(compared) == 1


def first_match(pairs, path):
    return next(spec for pattern, spec in pairs if re.search(pattern, path))


@given(
    st.dictionaries(
        st.from_regex(r"(l[0-9]/|a\.b/)?[wv][0-9]?", fullmatch=True), st.sampled_from([P(), P("a"), P(None, "a")]), min_size=1
    )
)
def test_the_first_rule_that_matches_is_a_leafs_specification(by_path):
    tree = {}
    for path, spec in by_path.items():
        tree.setdefault(path.rpartition("/")[0], {})[path.rpartition("/")[2]] = spec
    pairs = rules(tree)
    for group, leaves in tree.items():
        for name, spec in leaves.items():
            assert first_match(pairs, f"{group}/{name}") == spec


def test_leaves_that_no_rule_tells_apart_are_refused():
    assert rules({"a/b": P("x"), "a": {"b": P("x")}}) == (("^a/b$", P("x")),)
    with pytest.raises(unity.PlanError, match="two leaves with the path a/b"):
        rules({"a/b": P("x"), "a": {"b": P()}})


AXES = (Axis("n0", 2, 0), Axis("n1", 2, 0), Axis("d0", 2, 1), Axis("d1", 2, 1))
STATES = st.lists(st.sampled_from([UNUSED, partitioned(0), partitioned(1)]), min_size=4, max_size=4)


@settings(max_examples=fewer(25))
@given(st.lists(STATES, min_size=1, max_size=3), STATES)
def test_merged_axes_divide_as_the_axes_of_prime_size_do(types, inner):
    every = [tuple(states) for states in (*types, inner)]
    boundary = Boundary(AxisNames(AXES, ("node", "device")).telling_apart(every), tuple(every[:-1]), ((16, 16),) * len(types), {})
    devices = np.arange(16)
    for states, spec in zip(types, boundary.specs, strict=True):
        assert pieces(spec, boundary.mesh_shape, devices) == pieces(
            P(*(tuple(a.name for a, s in zip(AXES, states, strict=True) if s == partitioned(d)) for d in (0, 1))),
            {a.name: a.size for a in AXES},
            devices,
        )


def pieces(spec, mesh_shape, devices):
    """Return the numbers of the rows' and the columns' part that each device holds."""
    grid = devices.reshape(tuple(mesh_shape.values()))
    places = dict(zip(mesh_shape, np.unravel_index(devices, grid.shape), strict=True))
    parts = []
    for entry in (*spec, *[None] * (2 - len(spec))):
        part = np.zeros(len(devices), int)
        for name in (entry,) if isinstance(entry, str) else entry or ():
            part = part * mesh_shape[name] + places[name]
        parts.append(part.tolist())
    return parts
