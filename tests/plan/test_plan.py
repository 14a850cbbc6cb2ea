"""Plans as a user meets them: calling, placing, saving, and being told what is wrong."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import unity
from unity.base.atomic_files import write
from unity.base.errors import OptionError, PlanError
from unity.pcg.operators.table.elementwise import elementwise
from unity.pcg.types.factors import TABLE, Entry, Factor, Facts, Spec
from unity.plan.files import cache
from unity.plan.files.plan_file import sealed

pytestmark = pytest.mark.usefixtures("own_cache")


MACHINE = unity.Machine.grid(1, 8, "a100")


def loss(params: dict[str, Any], batch: dict[str, Any]) -> Any:
    hidden = jnp.tanh(batch["x"] @ params["w1"] + params["b"])
    return ((hidden @ params["w2"] - batch["y"]) ** 2).mean()


def arguments(rows: int = 32) -> tuple[dict[str, Any], dict[str, Any]]:
    rng = np.random.default_rng(0)
    params = {"w1": rng.normal(size=(64, 256)), "b": np.zeros(256), "w2": rng.normal(size=(256, 16))}
    batch = {"x": rng.normal(size=(rows, 64)), "y": rng.normal(size=(rows, 16))}
    return jax.tree.map(lambda x: jnp.asarray(x, "float32"), (params, batch))


def planned(**options: Any) -> unity.Plan:
    return unity.optimize(loss, *arguments(), machine=MACHINE, progress=False, **options)


def test_a_plan_is_checked_for_devices_that_are_given() -> None:
    """In their order; and the plan stays one for the devices that are here."""
    plan, devices = planned(), jax.devices()[::-1]
    for chosen in (devices, Mesh(devices, "d")):
        assert plan.check(devices=chosen).lines == plan.check().lines
    assert list(plan.inspect.mesh.devices.flat) == jax.devices()[:8]
    with pytest.raises(PlanError, match=r"is for 8 devices .*, but 3 are given"):
        plan.check(devices=devices[:3])


def test_a_plan_is_a_drop_in() -> None:
    params, batch = arguments()
    plan = planned()
    wanted = jax.jit(jax.value_and_grad(loss))(params, batch)
    params_, batch_ = plan.shard(params, batch)
    value, gradient = jax.jit(jax.value_and_grad(plan), donate_argnums=0)(params_, batch_)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), (value, gradient), wanted)
    flat = jnp.concatenate([g.ravel() for g in jax.tree.leaves(gradient)])
    assert flat.shape == (64 * 256 + 256 + 256 * 16,)
    assert jax.tree.structure(plan.in_shardings) == jax.tree.structure(arguments())


def test_a_scan_of_no_steps_is_planned_and_runs() -> None:
    def fn(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, w)[0].sum()

    w, x = jnp.zeros((0, 8, 8)), jnp.ones((16, 8))
    plan = unity.optimize(fn, w, x, machine=MACHINE, progress=False)
    assert plan(*plan.shard(w, x)) == 128
    assert np.isfinite([plan.time, plan.inspect.simulate().makespan]).all()
    assert plan.check().agrees()


def test_arguments_that_lie_elsewhere_are_moved_with_one_warning() -> None:
    params, batch = arguments()
    plan = planned(memory_limit=planned().memory)
    with pytest.warns(UserWarning, match=r"plan\.shard"):
        value = plan(params, batch)
    np.testing.assert_allclose(value, loss(params, batch), rtol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan(params, batch)


def elsewhere() -> dict[str, Any]:
    """Where arguments may lie but not as the plan wants them: on one device, on some, on all in other orders."""
    devices = np.asarray(jax.devices())
    rows, table = PartitionSpec("a"), Mesh(devices[:8].reshape(2, 4), ("a", "b"))
    return {
        "one": devices[0],
        "another": devices[3],
        "some": NamedSharding(Mesh(devices[:4], "a"), rows),
        "reversed": NamedSharding(Mesh(devices[:8][::-1], "a"), rows),
        "two axes": NamedSharding(table, PartitionSpec(("b", "a"))),
        "other axis": NamedSharding(table, PartitionSpec("b")),
    }


TRANSFORMATIONS: dict[str, Callable[[Any], Callable[[Any, Any], Any]]] = {
    "value": lambda f: f,
    "grad": jax.grad,
    "value_and_grad": lambda f: jax.value_and_grad(f, argnums=(0, 1)),
    "vjp": lambda f: lambda w, x: jax.vjp(f, w, x)[1](jnp.float32(2)),
    "jvp": lambda f: lambda w, x: jax.jvp(f, (w, x), (w, x)),
    "linearize": lambda f: lambda w, x: jax.linearize(f, w, x)[1](w, x),
    "second": lambda f: lambda w, x: jax.grad(lambda w: (jax.grad(f)(w, x) ** 2).sum())(w),
    "closed over": lambda f: lambda w, x: jax.jit(jax.value_and_grad(lambda w: f(w, x)))(np.asarray(w)),
}


@pytest.mark.parametrize("place", elsewhere())
def test_committed_arguments_are_moved_wherever_jax_says_where_they_lie(place: str) -> None:
    def fn(w: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    rng = np.random.default_rng(0)
    here = [jnp.asarray(rng.normal(size=s) / 4, jnp.float32) for s in ((16, 16), (64, 16))]
    there = jax.device_put(here, elsewhere()[place])
    for name, transformed in TRANSFORMATIONS.items():
        plan = unity.optimize(fn, *here, machine=MACHINE, progress=False)
        with pytest.warns(UserWarning, match=r"plan\.shard"):
            found = transformed(plan)(*there)
        wanted = transformed(fn)(*here)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), found, wanted)
        if name in ("grad", "value_and_grad"):  # gradients lie where the weights do, so an eager step goes on there
            gradient = found if name == "grad" else found[1][0]
            jax.block_until_ready(there[0] - gradient)


def test_a_plan_that_divides_a_whole_value_is_differentiated_forward_by_its_transposes() -> None:
    """The gradient of such a value is gathered, by a rule for reverse alone: the error says so, and its way out is right."""

    def fn(w: Any, x: Any) -> Any:
        h = jnp.tanh(x @ w)
        return jnp.mean(h**2), h.mean(0)

    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.normal(size=s) / 4, jnp.float32) for s in ((16, 16), (24, 16)))
    plan = unity.optimize(fn, w, x, machine=MACHINE, constraints=unity.pin("w", PartitionSpec()), progress=False)
    assert "partition" in {node.kind for node in plan.program.pcg.nodes}
    with pytest.raises(unity.PlanError, match=r"(?s)differentiated forward.*each takes a part.*jax\.vjp of jax\.vjp"):
        jax.jvp(plan, (w, x), (w, x))
    results, pull = jax.vjp(plan, w, x)
    (along,) = jax.vjp(pull, jax.tree.map(jnp.zeros_like, results))[1]((w, x))
    tangent = jax.jvp(fn, (w, x), (w, x))[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), along, tangent)


def test_inside_of_a_jit_jax_refuses_devices_that_differ_and_the_way_out_is_in_its_error() -> None:
    """It compiles one program for the devices of its arguments, and tells nobody which these are: no plan can move them there."""
    plan, (params, batch) = planned(), jax.device_put(arguments(), jax.devices()[3])
    for run in (jax.jit(plan), jax.jit(jax.grad(plan))):
        with pytest.raises(ValueError, match=r"incompatible devices.*placed_by_plan_shard"):
            run(params, batch)
        jax.tree.map(np.testing.assert_array_equal, run(*plan.shard(params, batch)), run(*plan.shard(*arguments())))


def test_a_mesh_that_the_user_has_set_is_no_plans(tmp_path: Path) -> None:
    def fn(params: Any, batch: Any) -> Any:  # with a derivative rule, which is read when it is planned
        return loss({name: jax.nn.relu(w) for name, w in params.items()}, batch)

    params, batch = arguments()
    wanted = jax.grad(fn)(params, batch)
    auto, explicit = (jax.make_mesh((8,), ("mine",), axis_types=(kind,)) for kind in (AxisType.Auto, AxisType.Explicit))
    with jax.set_mesh(auto):
        plan = unity.optimize(fn, params, batch, machine=MACHINE, objective="memory", progress=False)
        for given in ((params, batch), jax.device_put((params, batch), NamedSharding(auto, PartitionSpec()))):
            got = jax.jit(jax.grad(plan))(*given)
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), got, wanted)
    with jax.set_mesh(explicit):
        assert plan.check().agrees()
        assert plan.inspect.memory_timeline().peak > 0
        plan.files.export(tmp_path / "exported.py")
        got = jax.jit(jax.grad(plan))(params, batch)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), got, wanted)
    with pytest.raises(PlanError, match=r"inside of a jax\.shard_map"):
        jax.shard_map(plan, mesh=auto, in_specs=PartitionSpec(), out_specs=PartitionSpec())(params, batch)


def test_models_that_name_the_axes_of_a_mesh_are_planned_where_it_is_set() -> None:
    """Their sharding constraints are for the compiler, and a plan says what lies where by itself."""

    def fn(w: Any, x: Any) -> Any:
        h = jax.lax.with_sharding_constraint(jax.nn.relu(x @ w), PartitionSpec("mine"))

        def step(h: Any, _: Any) -> Any:
            return jax.lax.with_sharding_constraint(jax.nn.silu(h @ w), PartitionSpec(None, "mine")), None

        return (jax.nn.softmax(jax.lax.scan(step, h, None, length=2)[0]) ** 2).sum()

    w, x = (jax.random.normal(jax.random.key(n), (n, 16)) for n in (16, 32))
    with jax.set_mesh(jax.make_mesh((8,), ("mine",), axis_types=(AxisType.Auto,))):
        wanted = jax.jit(jax.value_and_grad(fn))(w, x)
        plan = unity.optimize(fn, w, x, machine=MACHINE, objective="memory", progress=False)
        inside = jax.jit(jax.value_and_grad(plan))(*plan.shard(w, x))
    outside = jax.jit(jax.value_and_grad(plan))(*plan.shard(w, x))
    for got in inside, outside:
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), got, wanted)


def test_auxiliary_outputs_any_pytree() -> None:
    def with_aux(params: Any, batch: Any) -> Any:
        hidden = batch["x"] @ params["w1"]
        return (hidden**2).mean(), {"mean": hidden.mean(0), "same": batch["y"], "none": None, "three": 3}

    params, batch = arguments()
    plan = unity.optimize(with_aux, params, batch, machine=MACHINE, progress=False)
    (value, aux), gradient = jax.jit(jax.value_and_grad(plan, has_aux=True))(*plan.shard(params, batch))
    (wanted, wanted_aux), wanted_gradient = jax.jit(jax.value_and_grad(with_aux, has_aux=True))(params, batch)
    assert aux["none"] is None
    assert int(aux["three"]) == 3
    for got, right in (
        (value, wanted), (aux["mean"], wanted_aux["mean"]), (aux["same"], batch["y"]), (gradient["w1"], wanted_gradient["w1"]),
    ):  # fmt: skip
        np.testing.assert_allclose(got, right, rtol=1e-3, atol=1e-4)


def test_the_same_search_again_comes_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    first = planned()
    monkeypatch.setattr("unity.search.session.assemble", lambda *a, **k: pytest.fail("searched again"))
    second = planned()
    assert (second.time, second.memory) == (first.time, first.memory)
    assert second.program.pcg.key == first.program.pcg.key


def test_a_damaged_cache_entry_is_set_aside(own_cache: Path) -> None:
    planned()
    (entry,) = (own_cache / "unity" / "plans").glob("*.json")
    entry.write_text(entry.read_text()[:100])
    planned()
    assert entry.exists()
    assert entry.with_suffix(".corrupt").exists()


def test_a_cache_that_may_not_be_written_or_looked_into_is_gone_without(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = planned()
    (entry,) = (own_cache / "unity" / "plans").glob("*.json")
    entry.write_text(entry.read_text()[:100])
    (entry.with_suffix(".corrupt") / "in the way").mkdir(parents=True)  # the file cannot be moved there, whoever runs this
    assert planned().program.pcg.key == found.program.pcg.key
    monkeypatch.setenv("XDG_CACHE_HOME", str(own_cache / ("long" * 100)))  # no such name can be looked up
    assert planned().program.pcg.key == found.program.pcg.key


def test_the_frontier_trades_time_for_memory() -> None:
    frontier = planned().frontier
    times, memories = [p.time for p in frontier], [p.memory for p in frontier]
    assert times == sorted(times)
    assert memories == sorted(memories, reverse=True)
    assert len(frontier[1:3]) == 2
    assert "point" in str(frontier)
    assert frontier.plot() is not None
    with pytest.raises(IndexError, match="frontier has"):
        frontier[len(frontier)]


def test_objectives() -> None:
    fastest, leanest = planned(), planned(objective="memory")
    assert leanest.memory <= fastest.memory
    assert fastest.time <= leanest.time
    fewest = unity.optimize(loss, *arguments(), machine=MACHINE, progress=False, objective="devices")
    assert fewest.inspect.machine.devices == 1
    limit = planned().memory * 1.01
    fewer = unity.optimize(loss, *arguments(), machine=MACHINE, progress=False, objective="devices", memory_limit=limit)
    assert fewer.memory <= limit


def test_no_plan_fits() -> None:
    with pytest.raises(unity.InfeasibleError, match=r"leanest plan needs .* limit is 1 kB.*\n.*Nearest") as caught:
        planned(memory_limit=1000)
    assert "memory_limit=" in str(caught.value)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"search": "alpa"}, "search='alpa'"),
        ({"search": "optcnn", "objective": "memory"}, "search='optcnn' has an objective of its own"),
        ({"objective": "speed"}, "objective='speed'"),
        ({"budget": -3}, "budget="),
        ({"rules": 3}, "rules="),
        ({"constraints": [1]}, "constraints="),
        ({"memory_limit": "16GB"}, "memory_limit='16GB'.*bytes"),
        ({"memory_limit": 0}, "memory_limit=0"),
        ({"memory_limit": float("nan")}, "memory_limit=nan"),
        ({"optimizer_slots": "adam"}, "optimizer_slots='adam'"),
        ({"optimizer_slots": -1}, "optimizer_slots=-1"),
        ({"optimizer_slots": float("inf")}, "optimizer_slots=inf"),
    ],
)
def test_options_that_are_not_there_are_refused_by_name(option: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planned(**option)


def test_a_machine_by_its_name_is_refused_with_the_way_out() -> None:
    with pytest.raises(OptionError, match=r"machine='dgx-h100' is a str: .*Machine\.preset"):
        unity.optimize(loss, *arguments(), machine="dgx-h100", progress=False)  # pyright: ignore[reportArgumentType]


def test_other_shapes_than_planned_for() -> None:
    plan = planned()
    params, batch = arguments(rows=16)
    with pytest.raises(unity.PlanError, match=r"args\[1\]\['x'\]: planned for float32\[32,64\], called with float32\[16,64\]"):
        plan(params, batch)
    with pytest.raises(unity.PlanError, match="structure"):
        plan(params, [batch])
    with pytest.raises(unity.PlanError, match="takes 2 arguments"):
        plan.shard(params, batch, batch)
    with pytest.raises(unity.PlanError, match=r"args\[1\]\['x'\]: planned for \[32, 64\], given \[16, 64\]"):
        plan.shard(params, batch)


class Layer(NamedTuple):
    w: Any
    rest: Any


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda p, b: (p,), r"args\[1\] is missing"),
        (lambda p, b: (p, b, b), r"args\[2\] is not known to the plan"),
        (lambda p, b: (p, b | {"id": p}), r"args\[1\]\['id'\] is not known to the plan"),
        (lambda p, b: (Layer(p.w, None), b), r"args\[0\]\.rest: planned for a list, given None"),
        (lambda p, b: (Layer(p.w, p.rest[:1]), {}), r"(?s)args\[0\]\.rest\[1\] is missing.*args\[1\]\['x'\] is missing"),
        (lambda p, b: (p, {"x": jax.tree_util.Partial(jnp.tanh)}), r"args\[1\]\['x'\]: planned for an array, given a Partial"),
        (lambda p, b: (p._replace(w=jax.tree_util.Partial(jnp.cos, b["x"])), b), r"args\[0\]\.w: a Partial, planned with .*sin"),
    ],
)  # fmt: skip
def test_another_structure_than_planned_for_is_named_where_it_is(given: Any, words: str) -> None:
    x = jnp.ones(8)
    params, batch = Layer(jax.tree_util.Partial(jnp.sin, x), [x, x]), {"x": x}
    plan = unity.optimize(lambda p, b: (p.w() * b["x"] * p.rest[0]).sum(), params, batch, machine=MACHINE, progress=False)
    for refused in (plan, jax.jit(plan)):
        with pytest.raises(unity.PlanError, match=words):
            refused(*given(params, batch))


def test_a_plan_runs_under_checkify() -> None:
    params, batch = arguments()
    error, value = checkify.checkify(planned(), errors=checkify.float_checks)(params, batch)
    assert error.get() is None
    np.testing.assert_allclose(value, loss(params, batch), rtol=1e-5)


def test_a_checked_plan_has_a_gradient() -> None:
    params, batch = arguments()
    checked = checkify.checkify(planned(), errors=checkify.float_checks)
    run = jax.jit(jax.value_and_grad(lambda *args: checked(*args)[::-1], has_aux=True))
    (_, error), gradients = run(params, batch)
    assert error.get() is None
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), gradients, jax.grad(loss)(params, batch))
    (_, error), _ = run(jax.tree.map(lambda w: w * jnp.nan, params), batch)
    assert "nan" in (error.get() or "")


def test_a_plan_is_copied_as_itself_and_kept_in_a_file_alone() -> None:
    plan = planned()
    assert copy.copy(plan) is copy.deepcopy({"loss": plan})["loss"] is plan
    with pytest.raises(unity.PlanError, match=r"plan\.files\.save.*unity\.load"):
        pickle.dumps(plan)


def test_arguments_by_name() -> None:
    plan = planned()
    params, batch = plan.shard(*arguments())
    assert plan(params, batch=batch) == plan(batch=batch, params=params) == plan(params, batch)
    named = plan.shard(batch=arguments()[1], params=arguments()[0])
    assert jax.tree.map(lambda x: x.sharding, named) == plan.in_shardings
    with pytest.raises(unity.PlanError, match=r"loss cannot be called with batch: missing a required argument: 'params'"):
        plan.shard(batch=batch)
    assert jax.jit(jax.grad(plan))(params, batch=batch)["b"].shape == (256,)
    with pytest.raises(unity.PlanError, match=r"loss cannot be called with rate: .*unexpected keyword"):
        plan(params, batch, rate=1.0)
    fixed = unity.optimize(lambda x, *, scale=2.0: x * scale, params["b"], argnums=(), machine=MACHINE, progress=False)
    with pytest.raises(unity.PlanError, match=r"takes scale by name alone: fix such values with functools\.partial"):
        fixed(params["b"], scale=3.0)


def test_fewer_devices_than_planned_for() -> None:
    params, batch = arguments()
    plan = unity.optimize(loss, params, batch, machine=unity.Machine.grid(4, 8, "h100"), progress=False)
    assert plan.program.pcg.axes
    with pytest.raises(unity.PlanError, match=r"for 32 devices .* JAX sees 8"):
        plan(params, batch)


def test_devices_and_batches_that_divide_nothing() -> None:
    """Seven devices, a batch of 5: nothing can be split by samples, and the plan is right all the same."""
    params, batch = arguments(rows=5)
    plan = unity.optimize(loss, params, batch, machine=unity.Machine.grid(1, 7, "a100"), progress=False)
    np.testing.assert_allclose(plan(*plan.shard(params, batch)), loss(params, batch), rtol=1e-5)


def test_forward_only() -> None:
    plan = planned(training=False)
    params, batch = arguments()
    np.testing.assert_allclose(plan(*plan.shard(params, batch)), loss(params, batch), rtol=1e-5)
    assert plan.memory < planned().memory


def test_save_and_load(tmp_path: Path) -> None:
    plan = planned()
    plan.files.save(tmp_path / "plan.json")
    again = unity.load(tmp_path / "plan.json", loss, *arguments())
    assert again.program.pcg.key == plan.program.pcg.key
    assert [p.time for p in again.frontier] == [p.time for p in plan.frontier]
    assert again.frontier[-1].program.pcg.key == plan.frontier[-1].program.pcg.key


def test_a_plan_of_a_program_that_was_captured_differently_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def single(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda c, a: (jnp.tanh(c @ a), None), x, w)[0].sum()

    args = jnp.ones((1, 8, 8)), jnp.ones((8, 8))
    with monkeypatch.context() as before:
        before.setattr("unity.pcg.capture.capture.with_straight_scans", lambda program: program)
        plan = unity.optimize(single, *args, machine=unity.Machine.grid(1, 2), search="captured", progress=False)
        plan.files.save(tmp_path / "plan.json")
    with pytest.raises(unity.PlanError, match=r"(?s)scan.*If it is the same function, another version of unity captured it"):
        unity.load(tmp_path / "plan.json", single, *args)


def test_foreign_plans_are_refused_with_the_difference(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    planned().files.save(path)
    with pytest.raises(unity.PlanError, match=r"args\[1\]\['x'\] is float32\[16,64\], was float32\[32,64\]"):
        unity.load(path, loss, *arguments(rows=16))
    with pytest.raises(unity.PlanError, match=r"another function than <lambda>: test_plan.py:\d+ \(loss\) .*mul"):
        unity.load(path, lambda p, b: loss(p, b) * 2, *arguments())
    params, batch = arguments()
    with pytest.raises(unity.PlanError, match=r"other arguments: args\[0\]\['a'\] \(float32\[2\]\) is new"):
        unity.load(path, loss, {**params, "a": jnp.ones(2)}, batch)
    fewer = {name: x for name, x in params.items() if name != min(params)}
    with pytest.raises(unity.PlanError, match=rf"other arguments: there is no args\[0\]\['{min(params)}'\] \(float32"):
        unity.load(path, lambda p, b: p[max(params)].sum() + b["x"].sum(), fewer, batch)
    whole = path.read_text()
    for damaged, message in (
        (whole[: len(whole) // 2], "cannot be read"),
        ("[1, 2]", "is not a plan"),
        (json.dumps(json.loads(whole) | {"schema": 99}), "schema 99"),
        (json.dumps(sealed(json.loads(whole) | {"types": []})), r"damaged at \$\.points\[0\]"),
        (json.dumps(sealed(json.loads(whole) | {"machine": {}})), r"damaged.* at \$\.machine"),
    ):
        path.write_text(damaged)
        with pytest.raises(unity.PlanError, match=message):
            unity.load(path, loss, *arguments())
    unity.Machine.grid(1, 8, "a100").save(path)
    with pytest.raises(unity.PlanError, match=r"plan\.json is a machine, not a plan"):
        unity.load(path, loss, *arguments())
    for unreadable, reason in ((tmp_path / "none.json", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(unity.PlanError, match=rf"^{re.escape(str(unreadable))} cannot be read: {reason} \(docs"):
            unity.load(unreadable, loss, *arguments())


def test_a_crash_while_saving_leaves_the_old_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    write(path, "old")

    def crash(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(KeyboardInterrupt):
        write(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_explain_names_what_was_decided(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned()
    plan.explain()
    text = capsys.readouterr().out
    for word in ("a step (", "args[0]['w1']", "dot_general", "test_plan.py", "collectives"):
        assert word in text, word


def test_explain_says_what_no_axis_divides(capsys: pytest.CaptureFixture[str]) -> None:
    params, batch = arguments()
    odd = dict(params, w2=jnp.ones((256, 33)))
    unity.optimize(lambda p, b: ((b["x"] @ p["w1"]) @ p["w2"]).mean(), odd, batch, machine=MACHINE, progress=False).explain()
    assert "size 33; the nearest size that all 8 devices divide is 40" in capsys.readouterr().out


def test_silent_without_progress(capfd: pytest.CaptureFixture[str]) -> None:
    planned()
    assert capfd.readouterr() == ("", "")


def test_plans_found_before_a_user_described_an_operator_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(factors: tuple) -> Entry:
        return Entry("mine", lambda params, operands, results: Spec(factors))

    codes = [cache._code_version()]
    own, built_in = (entry(()), entry((Factor("rows", 0, (), ()),))), TABLE["sin"]
    others = [elementwise(linear=group) for group in ((), ((0,),))]  # made by code of this package
    for e in (
        *own,
        *(replace(own[0], **change) for change in ({"exact": True}, {"facts": Facts(alone=True)}, {"facts": Facts(cheap=True)})),
        *(Entry("mine", spec) for spec in others),
        *(replace(built_in, spec=spec) for spec in others),
    ):
        monkeypatch.setitem(TABLE, e.name, e)
        codes.append(cache._code_version())
    monkeypatch.setitem(TABLE, "sin", built_in)
    monkeypatch.delitem(TABLE, "mine")
    assert cache._code_version() == codes[0]
    monkeypatch.delitem(TABLE, "sin")
    assert len({*codes, cache._code_version()}) == len(codes) + 1


def test_private_attributes_of_plans_are_read_nowhere_else() -> None:
    folder = Path(unity.__file__).parent
    face = folder / "plan" / "plan.py"
    private = set(re.findall(r"(?:def |self\.)(_[a-z]\w*)", face.read_text()))
    assert {"_devices", "_planned_call", "_program"} <= private
    reads = re.compile(rf"(?<!\bself)\.({'|'.join(private)})\b")
    assert not [path for path in folder.rglob("*.py") if path != face and reads.search(path.read_text())]


@pytest.mark.parametrize("objective", ["time", "memory"])
@pytest.mark.parametrize("elsewhere", [[0], [3], [4, 5, 6, 7]])
def test_a_committed_array_that_the_function_closes_over_may_lie_on_other_devices(objective: str, elsewhere: list[int]) -> None:
    def with_b(b: Any) -> Callable[..., Any]:
        return lambda w, i: jnp.tanh((b @ w)[i]).mean() + b.sum()

    with jax.enable_x64(True):
        mesh = Mesh([jax.devices()[k] for k in elsewhere], "d")
        b, w, i = jnp.linspace(0, 1, 1024).reshape(64, 16), jnp.ones((16, 16)) / 9, jnp.arange(16)
        loss = with_b(jax.device_put(b, NamedSharding(mesh, PartitionSpec("d"))))
        plan = unity.optimize(loss, w, i, machine=unity.Machine.grid(1, 8, "a100"), progress=False, objective=objective)
        for args in ((w, i), plan.shard(w, i)):
            for call in (lambda f: f, jax.grad, jax.jit, lambda f: jax.jit(jax.grad(f))):
                np.testing.assert_allclose(call(plan)(*args), call(with_b(b))(w, i), rtol=1e-10)
