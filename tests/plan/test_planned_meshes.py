"""Plans for meshes of the user's (`mesh=`): they use the axes whole, by name, and run on the user's devices."""

from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import fewer
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import unity
from unity.base.errors import ConstraintError, OptionError, PlanError
from unity.exec.hosts.device_order import check_order
from unity.machine.hardware import MachineError

pytestmark = pytest.mark.usefixtures("own_cache")

LAYERS, BATCH, WIDTH = 2, 24, 48


def array(*shape):
    return np.random.default_rng(prod(shape)).normal(size=shape).astype("float32") / 4


def mlp(params, x):
    for up, down in params:
        x = x + jax.nn.gelu(x @ up) @ down
    return (x**2).mean(), x


def attention(w, x):
    batch, length, width = x.shape
    query, key, value = jnp.moveaxis((x @ w).reshape(batch, length, 3, 4, width // 4), 2, 0)
    weights = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", query, key), -1)
    out = jnp.einsum("bhst,bthd->bshd", weights, value).reshape(x.shape)
    return (out**2).mean(), out


def convolution(w, x):
    out = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return (jax.nn.relu(out) ** 2).mean(), out


def scanned(params, x):
    def layer(x, weights):
        up, down = weights
        return x + jnp.tanh(x @ up) @ down, None

    return (jax.lax.scan(layer, x, params)[0] ** 2).mean(), x


FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "mlp": (mlp, [(array(WIDTH, 4 * WIDTH), array(4 * WIDTH, WIDTH))] * LAYERS, array(BATCH, WIDTH)),
    "attention": (attention, array(WIDTH, 3 * WIDTH), array(4, BATCH, WIDTH)),
    "convolution": (convolution, array(3, 3, 4, 8), array(2, BATCH, BATCH, 4)),
    "scan": (scanned, (array(4, WIDTH, WIDTH), array(4, WIDTH, WIDTH)), array(BATCH, WIDTH)),
}
MESHES = [
    {"data": 2, "tensor": 4}, {"tensor": 4, "one": 1, "data": 2}, {"all": 8}, {"data": 2, "fsdp": 2, "tensor": 2}, {"all": 6},
    {"data": 2, "tensor": 3}, {"data": 3, "time": 2},
]  # fmt: skip


def planned(name, mesh, machine=None, **options):
    """Return the plan of a function for a mesh, or without one, and the function's arguments."""
    fn, *args = FUNCTIONS[name]
    machine = machine or unity.Machine.grid(1, mesh.size, "a100")
    return unity.optimize(fn, *args, machine=machine, mesh=mesh, progress=False, budget=0, **options), tuple(args)


def close(found, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), found, wanted)


@given(st.sampled_from(sorted(FUNCTIONS)), st.sampled_from([(2, 2), (2, 3), (1, 7), (5, 1), (3, 2)]), st.booleans())
@settings(max_examples=fewer(8))
def test_a_mesh_of_a_machines_own_prime_axes_changes_no_plan(name, sizes, lean):
    nodes, devices = sizes
    machine = unity.Machine.grid(nodes, devices, "v100")
    options = {"objective": "memory"} if lean else {}
    plain, _ = planned(name, None, machine, **options)
    own, _ = planned(name, AbstractMesh(sizes, ("node", "device")), machine, **options)
    assert (own.time, own.memory) == (plain.time, plain.memory)
    assert own.in_specs == plain.in_specs
    assert own.out_specs == plain.out_specs


@given(st.sampled_from(sorted(FUNCTIONS)), st.sampled_from([(4, 2), (2, 4), (8,), (2, 2, 2)]))
@settings(max_examples=fewer(5))
def test_larger_axes_allow_no_faster_plan(name, sizes):
    machine = unity.Machine.grid(2, 4, "v100")
    plain, _ = planned(name, None, machine)
    own, _ = planned(name, AbstractMesh(sizes, tuple("abc")[: len(sizes)]), machine)
    assert own.time >= plain.time * (1 - 1e-9)


@st.composite
def requests(draw):
    """Draw a function, a mesh of devices in any order, and a sharding for each argument that its dimensions allow."""
    name = draw(st.sampled_from(sorted(FUNCTIONS)))
    shape = draw(st.sampled_from(MESHES))
    devices = draw(st.permutations(jax.devices()[: prod(shape.values())]))
    types = draw(st.sampled_from([AxisType.Auto, AxisType.Explicit]))
    mesh = Mesh(np.array(devices).reshape(tuple(shape.values())), tuple(shape), axis_types=(types,) * len(shape))
    pins = []
    for path, x in jax.tree.leaves_with_path(FUNCTIONS[name][1:]):
        left = [axis for axis in shape if draw(st.booleans())]
        entries = []
        for size in x.shape:
            chosen = [axis for axis in left if draw(st.booleans())]
            if size % prod(shape[axis] for axis in chosen):
                chosen = []
            left = [axis for axis in left if axis not in chosen]
            entries.append(tuple(chosen) if len(chosen) > 1 else chosen[0] if chosen else None)
        if draw(st.booleans()):
            pins.append((f"args{jax.tree_util.keystr(path)}", P(*entries)))
    return name, mesh, pins


@given(requests())
@settings(max_examples=fewer(8))
def test_a_plan_runs_in_the_users_mesh_as_its_function(tmp_path_factory: pytest.TempPathFactory, request_) -> None:
    name, mesh, pins = request_
    fn = FUNCTIONS[name][0]
    try:
        plan, args = planned(name, mesh, constraints=[unity.pin(path, spec) for path, spec in pins])
    except unity.InfeasibleError:  # a function, such as the convolution, may not go with a sharding
        return
    assert plan.inspect.mesh == mesh
    assert plan.inspect.abstract_mesh == mesh.abstract_mesh
    assert plan.mesh_shape == dict(mesh.shape)
    specs = dict(
        zip(plan.program.family.captured.paths, jax.tree.leaves(plan.in_specs, is_leaf=lambda x: isinstance(x, P)), strict=True)
    )
    shapes = dict(zip(plan.program.family.captured.paths, map(np.shape, jax.tree.leaves(args)), strict=True))
    for path, spec in pins:
        one, other = (NamedSharding(mesh, s) for s in (spec, specs[path]))
        assert one.is_equivalent_to(other, len(shapes[path])), path
    placed = plan.shard(*args)
    for x, sharding in zip(jax.tree.leaves(placed), jax.tree.leaves(plan.in_shardings), strict=True):
        assert x.sharding.mesh == mesh
        assert x.sharding == sharding
    wanted = jax.value_and_grad(fn, has_aux=True)(*args)
    step = jax.jit(jax.value_and_grad(plan, has_aux=True))
    close(step(*placed), wanted)
    with jax.set_mesh(mesh):
        found = step(*placed)
        close(found, wanted)
        assert jax.tree.map(jax.typeof, found[1]) == jax.tree.map(jax.typeof, placed[0])
    assert plan.check().agrees()
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    plan.files.save(path)
    loaded = unity.load(path, fn, *args)
    assert (loaded.program.pcg.key, loaded.inspect.machine, loaded.mesh_shape) == (
        plan.program.pcg.key,
        plan.inspect.machine,
        plan.mesh_shape,
    )
    assert loaded.on(mesh).inspect.mesh == mesh
    assert loaded.on(mesh).in_shardings == plan.in_shardings


def test_results_of_a_function_that_explicit_axes_do_not_admit_stay_where_the_plan_leaves_them():
    mesh = jax.make_mesh((2, 4), ("data", "tensor"))

    def product(w, x):
        return x @ w  # whose contracted dimension is ambiguous to JAX if both have it on one axis

    w, x = array(16, 32), array(8, 16)
    pins = [unity.pin("w", P("tensor", None)), unity.pin("x", P("data", "tensor"))]
    machine = unity.Machine.grid(1, 8, "a100")
    plan = unity.optimize(product, w, x, machine=machine, mesh=mesh, constraints=pins, training=False, progress=False)
    out = jax.jit(plan)(*plan.shard(w, x))
    close(out, x @ w)
    assert plan.out_specs != P()
    assert out.sharding.mesh == mesh
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, plan.out_specs), 2)


def test_every_message_and_table_has_the_users_names(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    mesh = AbstractMesh((2, 2, 8), ("replica", "fsdp", "tensor"))
    pins = [unity.pin("params[*][0]", P("fsdp", "tensor")), unity.pin("x", P("replica"))]
    plan, _ = planned("mlp", mesh, unity.Machine.grid(4, 8, "h100"), constraints=pins)
    assert plan.in_specs[0][0][0] == P("fsdp", "tensor")
    plan.explain()
    plan.explain("params[0][0]")
    print(plan, plan.inspect.diff(), repr(plan.inspect.abstract_mesh))
    text = capsys.readouterr().out
    assert "dimension 0 over fsdp (2), dimension 1 over tensor (8)" in text
    assert not any(f"{letter}{k}" in text.replace(".", " ").split() for letter in "nd" for k in range(5))
    plan.files.report(tmp_path / "report.html")
    plan.files.export(tmp_path / "plain.py")
    assert "AXES = {'replica': 2, 'fsdp': 2, 'tensor': 8}" in (tmp_path / "plain.py").read_text().replace('"', "'")


def test_levels_of_whole_axes_keep_their_names_in_constraints():
    machine, mesh = unity.Machine.grid(2, 4, "a100"), AbstractMesh((2, 2, 2), ("node", "fsdp", "tensor"))
    plan, _ = planned("mlp", mesh, machine, constraints=[unity.pin("params[*][0]", P(None, "device"))])
    assert plan.in_specs[0][0][0] == P(None, ("fsdp", "tensor"))
    with pytest.raises(ConstraintError, match="'device' is no level or axis of this machine: it has data, tensor"):
        planned("mlp", AbstractMesh((4, 2), ("data", "tensor")), machine, constraints=[unity.pin("x", P("device"))])


def test_stated_shardings_are_kept_by_the_names_of_the_mesh():
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def fn(w, x):
        return (jax.lax.with_sharding_constraint(jnp.tanh(x @ w), NamedSharding(mesh, P("tensor", "data"))) ** 2).mean()

    w, x = (jax.device_put(array(16, 16), NamedSharding(mesh, P("tensor", "data"))) for _ in range(2))
    machine = unity.Machine.grid(1, 8, "a100")
    plan = unity.optimize(fn, w, x, machine=machine, mesh=mesh, constraints=unity.keep_shardings(), progress=False)
    assert plan.in_specs == (P("tensor", "data"), P("tensor", "data"))
    close(jax.value_and_grad(plan)(w, x), jax.value_and_grad(fn)(w, x))


def test_a_pipelines_stages_are_an_axis_of_the_mesh():
    mesh = jax.make_mesh((4, 2), ("time", "data"))  # a name that micro-batches do not have
    plan, args = planned("scan", mesh, pipeline=unity.PipelineShape(4, 4))
    assert plan.in_specs[0][0][0] == "time"
    close(jax.jit(jax.value_and_grad(plan, has_aux=True))(*plan.shard(*args)), jax.value_and_grad(scanned, has_aux=True)(*args))


def test_without_a_machine_the_mesh_is_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    described = []
    monkeypatch.setattr(
        unity.Machine,
        "local",
        classmethod(lambda cls, devices=None: described.append(devices) or unity.Machine.grid(1, len(devices), "a100")),
    )
    fn, params, x = FUNCTIONS["mlp"]
    mesh = Mesh(np.array(jax.devices()[:5:-1]), ("data",))
    for given_mesh in (mesh, mesh.abstract_mesh):
        plan = unity.optimize(fn, params, x, mesh=given_mesh, progress=False, budget=0)
        assert plan.inspect.mesh.shape == {"data": 2}
    assert described == [jax.devices()[:5:-1], jax.devices()[:2]]


def test_a_line_announces_that_devices_are_measured_where_there_is_no_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(unity.Machine, "local", lambda devices=None: unity.Machine.grid(1, 8, "a100"))
    fn, params, x = FUNCTIONS["mlp"]
    for machine, progress, lines in ((None, True, 1), (None, False, 0), (unity.Machine.grid(1, 8, "a100"), True, 0)):
        unity.optimize(fn, params, x, budget=0, machine=machine, progress=progress)
        printed = capfd.readouterr()
        assert printed.out == ""
        assert printed.err.count("unity: measuring this machine's devices") == printed.err.count("\n") == lines


def test_meshes_that_cannot_be_planned_for_are_refused():
    machine = unity.Machine.grid(2, 3, "a100")
    with pytest.raises(MachineError, match=r"mesh \(a: 3 × b: 2\) does not fit the levels of machine 'a100-2x3'"):
        planned("mlp", AbstractMesh((3, 2), ("a", "b")), machine)
    with pytest.raises(MachineError, match="has 8 devices, and machine 'a100-2x3' has 6"):
        planned("mlp", AbstractMesh((8,), ("a",)), machine)
    with pytest.raises(OptionError, match=r"mesh=\{'a': 6\}: expected a jax.sharding.Mesh or AbstractMesh"):
        planned("mlp", {"a": 6}, machine)
    with pytest.raises(OptionError, match="objective='devices' do not go together"):
        planned("mlp", AbstractMesh((6,), ("a",)), machine, objective="devices")


def test_a_plan_is_on_devices_alone():
    mesh = AbstractMesh((8,), ("all",))
    plan, _ = planned("mlp", mesh)
    wrong: list[Any] = [8, list(range(8)), mesh, np.array(jax.devices()).reshape(2, 4)]
    for devices in wrong:
        for take in (plan.on, lambda devices: plan.check(devices=devices)):
            with pytest.raises(PlanError, match=r"(?s)expected a list of devices.*, got"):
                take(devices)


class OnHost:
    """A device of a host."""

    platform = "gpu"

    def __init__(self, host: int) -> None:
        self.slice_index = self.process_index = host


def test_a_mesh_whose_hosts_are_not_units_of_the_machine_is_refused():
    machine = unity.Machine.grid(2, 2, "a100")
    hosts = [OnHost(0), OnHost(0), OnHost(1), OnHost(1)]
    check_order(machine, hosts)
    check_order(unity.Machine.grid(1, 4, "a100"), hosts[:2] * 2)
    with pytest.raises(PlanError, match="several hosts among 0 to 1, which are within a host in a100-2x2"):
        check_order(machine, [hosts[k] for k in (0, 2, 1, 3)])
    plan, _ = planned("mlp", AbstractMesh((2, 2), ("data", "tensor")), machine)
    orders = [np.array([hosts[k] for k in order], object).reshape(2, 2) for order in ((0, 1, 2, 3), (0, 2, 1, 3))]
    in_order, crossed = (plan.on(Mesh(devices, ("data", "tensor"))) for devices in orders)
    assert list(in_order.inspect.mesh.devices.flat) == hosts
    with pytest.raises(PlanError, match="several hosts among 0 to 1"):
        _ = crossed.inspect.mesh
