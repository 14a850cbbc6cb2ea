"""Side effects of planned functions: each runs once, on the values of the function, or is dropped with a warning."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import CI, fewer, in_turn
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental import checkify, io_callback
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import unity
from unity.pcg.capture.capture import capture
from unity.pcg.capture.observations import SMALL
from unity.pcg.jaxprs.effects import dropped, warn
from unity.plan.stream import Stream

pytestmark = pytest.mark.usefixtures("own_cache")  # derivative rules are read while a plan is searched

MACHINE = unity.Machine.grid(1, 8, "a100")
LOG: list[tuple[str, float]] = []


def note(name: str) -> Callable[..., None]:
    """Return a host function that logs its operands under a name."""
    return lambda *values: LOG.extend((name, round(float(v), 3)) for value in values for v in np.ravel(value))


def arguments() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(4, 16, 16)) / 4, "head": rng.normal(size=(16, 8)) / 4}
    return jax.tree.map(lambda x: jnp.asarray(x, "float32"), (params, rng.normal(size=(64, 16))))


def planned(fn: Any, *args: Any, **options: Any) -> unity.Plan:
    return unity.optimize(fn, *(args or arguments()), machine=MACHINE, budget=0, progress=False, **options)


def logged(run: Callable[[], Any]) -> tuple[Any, list[tuple[str, float]]]:
    """Return the result of a call, and the sorted log of its effects."""
    LOG.clear()
    result = jax.block_until_ready(run())
    jax.effects_barrier()
    return result, sorted(LOG)


def agrees(fn: Any, plan: unity.Plan, *args: Any) -> None:
    """Check values and gradients against the function's, and the effects of a call and of steps against those of its call."""
    args = args or arguments()
    _, effects = logged(lambda: fn(*args))
    assert effects
    for run in (lambda f: f(*args), lambda f: jax.jit(jax.value_and_grad(f))(*args), lambda f: jax.value_and_grad(f)(*args)):
        value, (planned_value, planned_effects) = run(fn), logged(partial(run, plan))
        jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6), planned_value, value)
        same(planned_effects, effects)


def same(planned_effects: list[tuple[str, float]], effects: list[tuple[str, float]]) -> None:
    """Check the effects of a plan against the function's."""
    assert [n for n, _ in planned_effects] == [n for n, _ in effects]
    np.testing.assert_allclose([v for _, v in planned_effects], [v for _, v in effects], rtol=1e-3, atol=1e-2)


def model(params: Any, x: Any, effect: Callable[[str, Any], None]) -> Any:
    """Return a loss that logs norms in a scan, and parts of itself."""

    def layer(h: Any, w: Any) -> Any:
        h = h + jnp.tanh(h @ w)
        effect("norm", jnp.linalg.norm(h))
        return h, h.mean()

    h, means = lax.scan(layer, x, params["w"])
    y = h @ params["head"]
    effect("classes", (y**2).mean(0))
    loss = (y**2).mean()
    effect("loss", loss)
    return loss + means.sum()


def unused(_: Any) -> None:
    """Ignore a result."""


EFFECTS: dict[str, Callable[[str, Any], None]] = {
    "debug.callback": lambda name, v: jax.debug.callback(note(name), v),
    "io_callback": lambda name, v: io_callback(note(name), None, v),
    "io_callback with an unused result": lambda name, v: unused(
        io_callback(lambda v: note(name)(v) or np.float32(0), jax.ShapeDtypeStruct((), "float32"), v)
    ),
    "nested in a jit": lambda name, v: jax.jit(lambda v: jax.debug.callback(note(name), v))(v),
    "in a conditional": lambda name, v: lax.cond(
        v.sum() > 1, lambda v: jax.debug.callback(note(name), v), lambda v: jax.debug.callback(note(name + "-"), v + 1), v
    ),
    "in a conditional that is decided": lambda name, v: lax.cond(
        True, lambda v: jax.debug.callback(note(name), v), lambda v: jax.debug.callback(note(name + "-"), v + 1), v
    ),
    "in a scan, backward": lambda name, v: unused(
        lax.scan(lambda c, s: (c + 1, jax.debug.callback(note(name), c * v, s)), 0.0, jnp.arange(3), reverse=True)
    ),
    "under vmap": lambda name, v: unused(jax.vmap(lambda s: jax.debug.callback(note(name), s * v))(jnp.arange(2.0))),
    "of a literal": lambda name, v: jax.debug.callback(note(name), 3.0, v),
}


@pytest.mark.parametrize("kind", in_turn(EFFECTS))
def test_an_effect_runs_once_with_the_value_of_the_function(kind: str) -> None:
    fn = partial(model, effect=EFFECTS[kind])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = planned(fn)
    without_jvp = lambda name, v: EFFECTS[kind](name, lax.stop_gradient(v))  # JAX does not differentiate an io_callback  # noqa: E731
    agrees(partial(model, effect=without_jvp), plan)


def test_effects_leave_the_plan_as_it_is() -> None:
    """The loss is a result anyway, so its print changes nothing of what is planned."""
    silent = planned(lambda params, x: model(params, x, lambda name, v: None))

    def loss(params: Any, x: Any) -> Any:
        value = model(params, x, lambda name, v: None)
        jax.debug.print("loss {}", value)
        return value

    assert planned(loss).program.pcg.key == silent.program.pcg.key


def test_a_print_shows_the_whole_value_once(capsys: pytest.CaptureFixture[str]) -> None:
    def loss(params: Any, x: Any) -> Any:
        def layer(h: Any, w: Any) -> Any:
            jax.debug.print("step {}", jnp.round(h.sum()).astype(int))
            return jnp.tanh(h @ w), None

        h = jax.checkpoint(lambda x: lax.scan(layer, x, params["w"])[0])(x)
        value = (h**2).mean()
        jax.debug.print("loss {value:.4f} of {n}", value=value, n=len(x), ordered=False)
        return value

    plan, args = planned(loss), arguments()
    jax.jit(loss)(*args)
    jax.effects_barrier()
    expected = capsys.readouterr().out
    assert len(expected.splitlines()) == 5
    jax.jit(jax.value_and_grad(plan))(*args)
    jax.effects_barrier()
    assert sorted(capsys.readouterr().out.splitlines()) == sorted(expected.splitlines())


def test_all_plans_of_a_frontier_have_the_effects_of_the_function() -> None:
    fn = partial(model, effect=EFFECTS["debug.callback"])
    frontier = planned(fn).frontier
    for point in frontier[-1:] if CI else frontier[::4]:
        agrees(fn, point)


def test_a_rewritten_program_has_the_effects_of_the_function() -> None:
    def loss(params: Any, x: Any) -> Any:
        y = x @ params["a"] @ params["b"]  # which a rule computes from the right
        jax.debug.callback(note("classes"), (y**2).mean(0))
        value = jnp.mean(jnp.tanh(y) ** 2)
        jax.debug.callback(note("loss"), value)
        return value

    rng = np.random.default_rng(0)
    a, b, x = (jnp.asarray(rng.normal(size=shape) / 8, "float32") for shape in ((64, 256), (256, 8), (4096, 64)))
    plan = unity.optimize(loss, {"a": a, "b": b}, x, machine=MACHINE, budget=10, progress=False)
    assert plan.program.rewriting
    agrees(loss, plan, {"a": a, "b": b}, x)


def test_a_saved_plan_has_the_effects(tmp_path: Path) -> None:
    fn = partial(model, effect=EFFECTS["debug.callback"])
    planned(fn).files.save(tmp_path / "plan.json")
    agrees(fn, unity.load(tmp_path / "plan.json", fn, *arguments()))


def test_an_export_leaves_effects_out(tmp_path: Path) -> None:
    fn = partial(model, effect=EFFECTS["debug.callback"])
    plan = planned(fn)
    with pytest.warns(UserWarning, match=r"test_effects\.py:\d+ .*jax\.debug\.callback is left out of the exported file"):
        plan.files.export(tmp_path / "plan.py")
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu", "PATH": ""}
    done = subprocess.run([sys.executable, tmp_path / "plan.py"], env=flags, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_check_raises_where_the_plan_is_checkified() -> None:
    def loss(params: Any, x: Any) -> Any:
        y = x @ params["head"]
        checkify.check(jnp.all(x < 10), "too large: {}", x.max())
        return (y**2).mean()

    params, x = arguments()
    plan = planned(loss, params, x)
    np.testing.assert_allclose(plan(params, x), (np.asarray(x @ params["head"]) ** 2).mean(), rtol=1e-5)
    assert checkify.checkify(plan)(params, x)[0].get() is None
    error, value = checkify.checkify(jax.jit(plan))(params, x + 20)
    assert "too large: " in (error.get() or "")
    np.testing.assert_allclose(value, (np.asarray((x + 20) @ params["head"]) ** 2).mean(), rtol=1e-4)


def test_the_sharding_of_a_result_is_inspected() -> None:
    seen = []

    def loss(params: Any, x: Any) -> Any:
        value = (x @ params["head"]).sum()
        jax.debug.inspect_array_sharding(value, callback=seen.append)
        return value

    planned(loss)(*arguments())
    assert [s.is_fully_replicated for s in seen] == [True]


# In a shard_map

REGION = AbstractMesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)


@jax.custom_vjp
def bent(x: Any) -> Any:
    return jnp.sin(x)


bent.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.cos(x) * g,))


def piece(x: Any) -> Any:
    """Log values of one device's piece: of those devices alone that take a branch, and in loops and branches around it."""
    here = note("first"), note("large"), note("even")

    def even(x: Any, k: Any) -> Any:
        y = bent(x) + k
        jax.debug.callback(here[2], y.sum())
        return lax.cond(y.sum() > 4, lambda y: (jax.debug.callback(here[1], y.max()), y)[1], lambda y: y + 1, y)

    def step(x: Any, k: Any) -> Any:
        return lax.cond((i + k) % 2 == 0, even, lambda x, k: x - 1, x, k), None

    i = lax.axis_index("x")
    lax.cond(i == 0, lambda x: jax.debug.callback(here[0], x.sum()), lambda x: None, x)
    return lax.scan(step, x, jnp.arange(3))[0]


@pytest.mark.parametrize("checked", [True, False])
def test_a_device_of_a_shard_map_has_the_effects_of_the_branches_that_it_takes(checked: bool) -> None:
    x = np.asarray(np.random.default_rng(0).normal(size=(8, 8)), "float32")
    mapped = jax.shard_map(piece, mesh=REGION, in_specs=P("x", "y"), out_specs=P("x", "y"), check_vma=checked)
    expected = []
    for i, j in np.ndindex(2, 2):  # device by device, without JAX
        y = x[4 * i : 4 * i + 4, 4 * j : 4 * j + 4]
        expected += [("first", y.sum())] if i == 0 else []
        for k in range(3):
            if (i + k) % 2:
                y = y - 1
                continue
            y = np.sin(y) + k
            expected += [("even", y.sum())]
            expected, y = ([*expected, ("large", y.max())], y) if y.sum() > 4 else (expected, y + 1)
    assert {"first", "large", "even"} == {name for name, _ in expected}
    fn = lambda x: (mapped(x) ** 2).sum()  # noqa: E731
    for run in (jax.jit, jax.grad):
        same(logged(lambda run=run: run(planned(fn, x))(x))[1], sorted(expected))


def test_an_effect_in_a_branch_that_communicates_is_dropped() -> None:
    def piece(x: Any) -> Any:
        i = lax.axis_index("x")
        return lax.cond(i == 0, lambda x: (jax.debug.callback(note("x"), lax.psum(x.sum(), "y")), 2 * x)[1], jnp.sin, x)  # here

    mapped = jax.shard_map(piece, mesh=REGION, in_specs=P("x", "y"), out_specs=P("x", "y"))
    x, here = jnp.ones((4, 4)), next(k for k, line in enumerate(Path(__file__).read_text().splitlines(), 1) if "lax.psum" in line)
    with pytest.warns(UserWarning, match=rf"test_effects\.py:{here} .*only some devices of a shard_map take") as caught:
        plan = planned(lambda x: mapped(x).sum(), x)
    assert len(caught) == 1
    value, effects = logged(lambda: plan(x))
    assert not effects
    np.testing.assert_allclose(value, 8 * 2 + 8 * np.sin(1), rtol=1e-6)


# Dropped


def in_a_while(params: Any, x: Any) -> Any:
    def step(carry: Any) -> Any:
        k, x = carry
        jax.debug.callback(note("while"), k)  # here
        return k + 1, x

    return (lax.while_loop(lambda carry: carry[0] < 2, step, (0, 0.0))[1] + x @ params["head"]).sum()


@jax.custom_vjp
def doubled(x: Any) -> Any:
    return 2 * x


def doubled_back(_: None, g: Any) -> Any:
    jax.debug.callback(note("gradient"), g)
    return (2 * g,)


doubled.defvjp(lambda x: (2 * x, None), doubled_back)


def in_a_backward_rule(params: Any, x: Any) -> Any:
    return (doubled(x @ params["head"]) ** 2).sum()  # here


@jax.custom_jvp
def tripled(x: Any) -> Any:
    jax.debug.callback(note("tripled"), x)  # here
    return 3 * x


tripled.defjvp(lambda x, t: (3 * x[0], 3 * t[0]))


def in_a_ruled_function(params: Any, x: Any) -> Any:
    return (tripled(x @ params["head"]) ** 2).sum()


def of_a_large_value(params: Any, x: Any) -> Any:
    y = jnp.tile(x, (SMALL // x.nbytes * 4, 1)) @ params["head"]
    jax.debug.callback(note("large"), y)  # here
    return (y**2).sum()


def of_an_intermediate_sharding(params: Any, x: Any) -> Any:
    y = x @ params["head"]
    jax.debug.inspect_array_sharding(y, callback=print)  # here
    return (y**2).sum()


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (in_a_while, "a while cannot return its values"),
        (in_a_backward_rule, "it is in a derivative rule"),
        (in_a_ruled_function, "it is in a function with a derivative rule of its own"),
        (of_a_large_value, "would have to be gathered"),
        (of_an_intermediate_sharding, r"plan\.explain\(\) shows"),
    ],
)
def test_a_dropped_effect_is_warned_of_once_for_each_plan_with_its_line(fn: Any, reason: str) -> None:
    source = Path(__file__).read_text().splitlines()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = planned(fn)
        planned(fn)  # from the cache
    warning, again = caught
    assert (str(again.message), again.filename, again.lineno) == (str(warning.message), warning.filename, warning.lineno)
    assert warning.category is UserWarning
    assert warning.filename == __file__
    assert source[warning.lineno - 1].endswith("# here")
    assert re.search(rf"jax\.debug\.\w+ is dropped from the plan: .*{reason}", str(warning.message))
    silent, effects = logged(lambda: jax.value_and_grad(plan)(*arguments()))
    assert not effects
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5), silent, jax.value_and_grad(fn)(*arguments()))


def test_a_warning_is_at_its_line_in_a_folder_of_any_name() -> None:
    with pytest.warns(UserWarning, match="dropped") as caught:
        warn([dropped("debug_print", "/models (old)/net.py:7 (loss)", "of its size")])
    assert [(w.filename, w.lineno) for w in caught] == [("/models (old)/net.py", 7)]


def test_a_large_result_is_read_where_it_is_replicated() -> None:
    """Otherwise a warning says that the plan divides it."""

    def fn(x: Any) -> Any:
        y = jnp.tanh(x)
        jax.debug.callback(note("y"), y)
        return y

    x, odd = jnp.zeros((64, SMALL // 64)), jnp.zeros((9, SMALL // 9))
    with pytest.warns(UserWarning, match="the plan divides its values"):
        plan = planned(fn, x, training=False)
    assert logged(lambda: plan(x))[1] == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = planned(fn, odd, training=False)  # which no axis divides
    assert len(logged(lambda: whole(odd))[1]) == odd.size


def test_an_order_that_devices_do_not_keep_is_warned_of() -> None:
    def fn(x: Any) -> Any:
        jax.debug.callback(note("x"), x.sum(), ordered=True)
        io_callback(note("y"), None, x.sum(), ordered=True)
        return x.sum()

    with pytest.warns(UserWarning, match=r"runs without its order") as caught:
        plan = planned(fn, jnp.ones(16))
    assert len(caught) == 2
    assert logged(lambda: plan(jnp.ones(16)))[1] == [("x", 16.0), ("y", 16.0)]


# Refused


@pytest.mark.parametrize("ordered", [False, True])
def test_an_effect_whose_result_is_used_is_refused_with_its_line(ordered: bool) -> None:
    def fn(x: Any) -> Any:
        return x.sum() * io_callback(lambda: np.float32(2), jax.ShapeDtypeStruct((), "float32"), ordered=ordered)

    with pytest.raises(unity.CaptureError, match=r"(?s)test_effects\.py:\d+ .*io_callback is used.*jax\.pure_callback"):
        capture(fn, jnp.ones(16))


# Any nesting


@st.composite
def nestings(draw: st.DrawFn) -> list[str]:
    return draw(st.lists(st.sampled_from(["scan", "cond", "remat", "jit"]), max_size=3))


def nested(kinds: list[str], x: Any) -> Any:
    """Return a value that is computed, and logged, inside of nested control flow."""
    if not kinds:
        jax.debug.callback(note("in"), x.sum())
        return jnp.sin(x)
    inner = partial(nested, kinds[1:])
    if kinds[0] == "scan":
        return lax.scan(lambda c, k: (inner(c + k), None), x, jnp.arange(2.0))[0]
    if kinds[0] == "cond":
        return lax.cond(x.sum() > 0, inner, lambda x: nested(kinds[1:], -x) + 1, x)
    return (jax.checkpoint if kinds[0] == "remat" else jax.jit)(inner)(x)


@settings(max_examples=fewer(6))
@example(["scan", "cond"], 1.0)  # the residuals of a conditional in a scan
@example(["scan", "remat", "cond"], -1.0)
@given(nestings(), st.sampled_from([1.0, -1.0]))
def test_effects_in_any_nesting_run_as_often_as_in_the_function(kinds: list[str], sign: float) -> None:
    x = sign * jnp.linspace(0.1, 1, 16)
    fn = lambda x: nested(kinds, x).sum()  # noqa: E731
    plan = planned(fn, x)
    value, effects = logged(lambda: jax.jit(fn)(x))
    planned_value, planned_effects = logged(lambda: jax.jit(plan)(x))
    np.testing.assert_allclose(planned_value, value, rtol=1e-5)
    same(planned_effects, effects)
    np.testing.assert_allclose(jax.grad(plan)(x), jax.grad(fn)(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "2bw"])
def test_a_pipeline_shows_its_loss_once_a_step(schedule: str) -> None:
    def loss(params: Any, x: Any) -> Any:
        h = lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, params["w"])[0]
        value = ((h @ params["head"]) ** 2).mean()
        jax.debug.callback(note("loss"), value)
        return value

    args = arguments()
    plan = planned(loss, *args, pipeline=unity.PipelineShape(2, 4, schedule))
    if schedule != "2bw":
        agrees(loss, plan)
        return
    stream = Stream(plan)
    (_, (first, _)), effects = logged(lambda: stream.step(stream.start(*args), *args))
    assert effects == [("loss", pytest.approx(float(first), abs=1e-3))]
    assert effects == logged(lambda: stream.finish(stream.start(*args)))[1]
