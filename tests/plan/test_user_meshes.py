"""Programs that state shardings for a mesh of their own: what is captured, where its plans run, and what of it may be kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import permutations, product
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
from jax import lax
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    auto_axes,
    explicit_axes,
    reshard,
    use_abstract_mesh,
)
from jax.sharding import PartitionSpec as P

import unity
from unity.base.errors import ConstraintError, OptionError, PlanError
from unity.exec.context import on_mesh
from unity.exec.lowering import mesh_of
from unity.exec.measure import local_machine
from unity.pcg.capture.capture import capture
from unity.pcg.types.axis import Axis
from unity.pcg.types.mesh_axes import mesh_axes

pytestmark = pytest.mark.usefixtures("own_cache")

MACHINE = unity.Machine.grid(1, 8, "a100")
MESH = jax.make_mesh((2, 4), ("x", "y"))  # explicit, as JAX makes meshes by default
AUTO = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
SIZE = 16  # of every dimension
SPECS = (P(None, None), P("x", None), P(None, "x"), P("y", None), P("x", "y"), P("y", "x"), P(("x", "y"), None))
STEPS = (
    "product", "reshard", "tanh", "transpose", "reshape", "rows", "iota", "automatic", "loop", "vjp", "jvp", "jit", "put", "asked",
    "made", "remat", "branch",
)  # fmt: skip


def step(name: str, h: Any, w: Any, spec: P, stated: bool) -> Any:
    """Return one step of a program, with the shardings that it states or without them."""
    place = partial(reshard, out_shardings=spec) if stated else lambda x: x
    back = partial(reshard, out_shardings=P(None, None)) if stated else lambda x: x
    out: Any = {"out_sharding": spec} if stated else {}
    cut: Any = {"out_sharding": P("x")} if stated else {}
    if name == "product":
        return jnp.einsum("bd,df->bf", h, w, **out)
    if name == "reshard":
        return place(h)
    if name == "transpose":
        return h.T
    if name == "reshape":
        return jnp.reshape(jnp.reshape(back(h), (4, -1, 4), **cut), h.shape, **out)
    if name == "rows":
        return h.at[jnp.arange(SIZE)[::-1]].get(**out)
    if name == "iota":
        return place(h) * lax.broadcasted_iota(h.dtype, h.shape, 0, **out) / SIZE
    if name == "automatic":
        if not stated:
            return jnp.sin(h) * 2
        inner: Any = auto_axes(lambda x: jnp.sin(lax.with_sharding_constraint(x, P("y"))) * 2, out_sharding=spec)
        return inner(h)
    if name == "loop":
        return lax.scan(lambda x, _: (place(jnp.sin(back(x))), None), place(h), None, length=2)[0]
    if name in ("vjp", "jvp"):
        return (pulled if name == "vjp" else pushed)(place, stated)(h)
    if name == "jit":
        return jax.jit(lambda x: x + 1, out_shardings=NamedSharding(MESH, spec) if stated else None)(h)
    if name == "put":
        return jax.device_put(h, NamedSharding(MESH, spec)) if stated else h
    if name == "asked":
        return h + (jnp.ones(h.shape, h.dtype, out_sharding=jax.typeof(h).sharding.spec) if stated else jnp.ones(h.shape, h.dtype))
    if name == "made":
        return place(h) + jax.random.normal(jax.random.key(3), h.shape, h.dtype, **out)
    if name == "remat":
        return jax.checkpoint(lambda x: place(jnp.sin(x)))(h)
    if name == "branch":
        return lax.cond(jnp.sum(back(h)) > 0, lambda x: place(x * 2), place, h)
    return jnp.tanh(h)


def pulled(place: Callable[[Any], Any], stated: bool) -> Callable[[Any], Any]:
    """Return a function with a `custom_vjp` whose rules state shardings."""

    def backward(x: Any, g: Any) -> tuple[Any]:
        return (reshard(reshard(g, P("x", None)) * 3, jax.typeof(x).sharding.spec) if stated else g * 3,)

    run = jax.custom_vjp(lambda x: place(x) * 3)
    run.defvjp(lambda x: (place(x) * 3, x), backward)
    return run


def pushed(place: Callable[[Any], Any], stated: bool) -> Callable[[Any], Any]:
    """Return a function with a `custom_jvp` whose rule states shardings."""
    run = jax.custom_jvp(lambda x: place(x) * 3)
    run.defjvp(lambda primals, tangents: (place(primals[0]) * 3, place(place(tangents[0]) * 3)))
    return run


def program(steps: list[tuple[str, P]], stated: bool) -> Callable[..., Any]:
    """Return a loss of two matrices, and the matrix that it is of."""

    def run(w: Any, x: Any) -> Any:
        h = x
        for name, spec in steps:
            h = step(name, h, w, spec, stated)
        return ((reshard(h, P(None, None)) if stated else h) ** 2).mean(), h

    return run


def matrices() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    w, x = (rng.normal(size=(SIZE, SIZE)).astype("float32") / 4 for _ in range(2))
    return w, x


def placed(x: Any, spec: P, mesh: Mesh = MESH) -> Any:
    return jax.device_put(x, NamedSharding(mesh, spec))


def close(found: Any, wanted: Any) -> None:
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), found, wanted)


def types(tree: Any) -> Any:
    return jax.tree.map(jax.typeof, tree)


def programs(names: tuple[str, ...], most: int) -> st.SearchStrategy[list[tuple[str, P]]]:
    return st.lists(st.tuples(st.sampled_from(names), st.sampled_from(SPECS)), min_size=1, max_size=most)


KEYED = tuple(name for name in STEPS if name not in ("vjp", "jvp"))  # functions with rules have their code in their hash


@settings(max_examples=fewer(25))
@given(programs(KEYED, 6), st.sampled_from(SPECS))
def test_a_program_with_shardings_is_captured_as_the_one_without(steps: list[tuple[str, P]], spec: P) -> None:
    w, x = matrices()
    with jax.set_mesh(MESH):
        found = capture(program(steps, True), jnp.asarray(w), placed(x, spec))
    wanted = capture(program(steps, False), w, x)
    assert found.graph.key == wanted.graph.key


def runs_like_its_function(steps: list[tuple[str, P]], spec: P) -> None:
    """Compare a plan with its function: values, gradients, and the types of both."""
    w, x = matrices()
    with jax.set_mesh(MESH):
        fn, args = program(steps, True), (jnp.asarray(w), placed(x, spec))
        plan = unity.optimize(fn, *args, machine=MACHINE, objective="memory", budget=0, progress=False)
        wanted, found = (jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))(*args) for f in (fn, plan))
        close(found, wanted)
        assert types(found) == types(wanted)
    close(jax.value_and_grad(program(steps, False), (0, 1), has_aux=True)(jnp.asarray(w), jnp.asarray(x)), wanted)


@settings(max_examples=fewer(3))
@given(programs(STEPS, 4), st.sampled_from(SPECS))
def test_plans_of_programs_with_shardings_are_their_functions(steps: list[tuple[str, P]], spec: P) -> None:
    runs_like_its_function(steps, spec)


@pytest.mark.parametrize("several", [STEPS[:6], STEPS[6:11], STEPS[11:]])
def test_a_plan_of_every_kind_of_stated_sharding_is_its_function(several: tuple[str, ...]) -> None:
    runs_like_its_function([(name, SPECS[k % len(SPECS)]) for k, name in enumerate(several)], P("x", None))


def loss(w: Any, x: Any) -> Any:
    h = jax.nn.gelu(jnp.einsum("bd,df->bf", x, w["up"], out_sharding=P("x", "y")))
    return (reshard(h, P("x", None)) ** 2).mean() + reshard(w["down"], P(None)).sum(), reshard(h, P("y", None))


def free(w: Any, x: Any) -> Any:
    h = jax.nn.gelu(x @ w["up"])
    return (h**2).mean() + w["down"].sum(), h


def weights() -> tuple[Any, Any]:
    w, x = matrices()
    return {"up": w, "down": w[0]}, x


CALLS: dict[str, Callable[[Any], Any]] = {
    "called": lambda f: f,
    "jitted": jax.jit,
    "differentiated": lambda f: jax.value_and_grad(f, has_aux=True),
    "jitted gradient": lambda f: jax.jit(jax.value_and_grad(f, has_aux=True)),
    "mapped": lambda f: jax.jit(lambda w, x: jax.vmap(f, (None, 0))(w, jnp.stack([x, 2 * x]))),
}
UPDATED = {
    "step": lambda f: jax.jit(lambda w, x: jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(f, has_aux=True)(w, x)[0])),
    "eager step": lambda f: lambda w, x: jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(f, has_aux=True)(w, x)[0]),
}
FEW = {"called": CALLS["called"], "jitted gradient": CALLS["jitted gradient"], "eager step": UPDATED["eager step"]}
PLACES: dict[str, Callable[[Any], Any]] = {
    "NumPy arrays": lambda args: args,
    "whole on the mesh": lambda args: jax.tree.map(jnp.asarray, args),
    "along its axes": lambda args: (
        {"up": placed(args[0]["up"], P(None, "y")), "down": placed(args[0]["down"], P("x"))}, placed(args[1], P("x", None)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("where", PLACES)
def test_plans_run_under_the_users_mesh_with_the_types_of_the_function(where: str) -> None:
    with jax.set_mesh(MESH):
        args = PLACES[where](weights())
        plan = unity.optimize(loss, *args, machine=MACHINE, objective="memory", progress=False)
        for name, changed in (CALLS | UPDATED if where == "along its axes" else FEW).items():
            wanted, found = changed(loss)(*args), changed(plan)(*args)
            close(found, wanted)
            assert types(found) == types(wanted), name


def test_arguments_that_a_plan_places_are_of_the_users_mesh_and_a_step_goes_on_with_them() -> None:
    with jax.set_mesh(MESH):
        plan = unity.optimize(loss, *weights(), machine=MACHINE, objective="memory", progress=False)
        args = plan.shard(*weights())
        assert all(x.sharding.mesh == MESH for x in jax.tree.leaves(args))
        assert any(x.sharding.spec for x in jax.tree.leaves(args))
        assert jax.tree.leaves(plan.in_shardings) == [x.sharding for x in jax.tree.leaves(args)]
        assert jax.tree.leaves(plan.shard.shardings(args[0])) == [x.sharding for x in jax.tree.leaves(args[0])]
        for changed in (CALLS | UPDATED).values():
            close(changed(plan)(*args), changed(loss)(*weights()))
    own = plan.shard(*weights())
    assert all(x.sharding.mesh == plan.inspect.mesh for x in jax.tree.leaves(own))
    for changed in FEW.values():
        close(changed(plan)(*own), changed(free)(*weights()))
    with jax.set_mesh(MESH):  # arrays of the plan's own mesh are taken there, too
        close(jax.jit(jax.value_and_grad(plan, has_aux=True))(*own), jax.value_and_grad(free, has_aux=True)(*weights()))


def test_plans_take_arguments_of_a_mesh_that_is_not_set() -> None:
    with jax.set_mesh(MESH):
        args = PLACES["along its axes"](weights())
        plan = unity.optimize(loss, *args, machine=MACHINE, objective="memory", progress=False)
    for name in ("called", "jitted", "jitted gradient"):  # JAX refuses eager gradients of any result on a mesh that is not set
        close(CALLS[name](plan)(*args), CALLS[name](free)(*weights()))


def test_placements_that_the_function_does_not_admit_are_the_plans_business() -> None:
    """A plan may store weights in a way that JAX's types refuse in the function itself."""

    def fn(w: Any, x: Any) -> Any:
        return jnp.sum(x @ w, axis=0)  # whose operands must not both be split in the contracted dimension

    w, x = matrices()
    with jax.set_mesh(MESH):
        plan = unity.optimize(fn, w, x, machine=MACHINE, progress=False)
        args = placed(w, P("x", None)), placed(x, P(None, "x"))
        with pytest.raises(Exception, match="out_sharding"):
            jax.jit(fn)(*args)
        found = jax.jit(plan)(*args)
    close(found, (x @ w).sum(0))


def test_arrays_and_keys_that_are_closed_over_may_lie_on_the_mesh() -> None:
    w, x = matrices()
    with jax.set_mesh(MESH):
        few, many = placed(w[0], P("y")), placed(np.tile(w, (16, 16)), P("x", "y"))
        key = jax.random.key(0)

        def fn(w: Any, x: Any) -> Any:
            noise = jax.random.normal(key, x.shape)
            return jnp.sum((x @ w) * reshard(few, P(None)) + noise) * reshard(jnp.mean(many**2), P())

        plan = unity.optimize(fn, w, x, machine=MACHINE, progress=False)
        close(jax.jit(jax.value_and_grad(plan))(w, x), jax.jit(jax.value_and_grad(fn))(w, x))
        wanted = jax.value_and_grad(fn)(w, x)
    close(jax.jit(jax.value_and_grad(plan))(w, x), wanted)


def test_planning_runs_programs_on_devices_of_its_own_choice_under_a_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines are measured device by device, and plans for fewer devices than the mesh has are tried."""
    there: list[Any] = []

    def measured(devices: Any) -> unity.Machine:
        there.extend(jax.jit(lambda x: x + 1)(jax.device_put(np.float32(k), d)).device for k, d in enumerate(devices))
        return unity.Machine.grid(1, 4, "a100")

    monkeypatch.setattr(local_machine, "_load_or_measure", measured)
    w, x = matrices()
    with jax.set_mesh(MESH):
        plan = unity.optimize(lambda w, x: jnp.mean((x @ w) ** 2), w, x, measure=True, budget=0, pipelines=False, progress=False)
        assert jax.sharding.get_mesh() == MESH
    assert there == jax.devices()
    assert plan.inspect.machine.devices == 4


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_of_another_size_is_refused(kind: AxisType) -> None:
    w, x = matrices()
    plan = unity.optimize(lambda w, x: jnp.sum(x @ w), w, x, machine=MACHINE, progress=False)
    with jax.set_mesh(jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind,) * 2, devices=jax.devices()[:4])):
        with pytest.raises(PlanError, match="a mesh of 4 devices, where a plan for 8 cannot run"):
            plan(w, x)
        with pytest.raises(PlanError, match="a mesh of 4 devices, where a plan for 8 cannot run"):
            jax.jit(jax.grad(plan))(w, x)


def test_a_region_of_explicit_axes_under_an_automatic_mesh_is_read_too() -> None:
    def fn(w: Any, x: Any) -> Any:
        run = explicit_axes(lambda x: jnp.sin(reshard(x, P(None, "y"))), in_sharding=P("x", None))
        return jnp.sum(lax.with_sharding_constraint(run(x @ w), P("x")) ** 2)

    w, x = matrices()
    with jax.set_mesh(AUTO):
        plan = unity.optimize(fn, w, x, machine=MACHINE, progress=False)
        assert plan.program.original.key == capture(lambda w, x: jnp.sum(jnp.sin(x @ w) ** 2), w, x).graph.key
        close(jax.jit(jax.value_and_grad(plan))(w, x), jax.jit(jax.value_and_grad(fn))(w, x))


def test_kept_shardings_are_those_of_the_plan(tmp_path: Path) -> None:
    def deep(w: Any, x: Any) -> Any:
        h = jnp.einsum("bd,df->bf", x, w, out_sharding=P("x", "y"))
        h = lax.scan(lambda h, _: (reshard(jnp.tanh(h), P("x", "y")), None), h, None, length=2)[0]
        return jnp.mean(reshard(h, P(None, "y")) ** 2)

    machine = unity.Machine.grid(2, 4, "a100")
    mesh = AbstractMesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)  # no devices are needed
    w = jax.ShapeDtypeStruct((64, 64), "float32", sharding=NamedSharding(mesh, P(None, "y")))
    x = jax.ShapeDtypeStruct((64, 64), "float32")
    with use_abstract_mesh(mesh):
        kept = unity.optimize(deep, w, x, machine=machine, constraints=unity.keep_shardings(), progress=False)
        kept.files.save(tmp_path / "kept.json")
        assert unity.load(tmp_path / "kept.json", deep, w, x).program.pcg.key == kept.program.pcg.key
        plan = unity.optimize(deep, w, x, machine=machine, progress=False)
    assert plan.time <= kept.time
    assert kept.in_shardings[0].spec == P(None, ("d0", "d1"))
    stated = [str(c) for c in kept.program.family.bound.every]
    assert stated[0] == "unity.pin(\"args[0]\", P(None, ('d0', 'd1')))"
    assert [text[: text.index(" at ")] for text in stated[1:]] == [
        f"unity.keep_shardings() of {words}"  # as the function states them, for its own mesh
        for words in ("out_sharding=P('x', 'y')", "reshard(..., P('x', 'y'))", "reshard(..., P(None, 'y'))")
    ]
    assert "dim 0 over node, dim 1 over device" in str(kept.inspect.diff(plan))  # theirs against the plan's
    with pytest.raises(unity.PlanError, match=r"does not obey its constraints: unity\.pin\(\"args\[0\]\", P\(None, 'device'\)\)"):
        kept.program.family.bound.check(plan.program.serial, plan.program.pcg, machine)


def test_kept_constraints_for_the_compiler_leave_open_what_they_leave_open() -> None:
    def fn(w: Any, x: Any) -> Any:
        h = lax.with_sharding_constraint(x @ w, P(P.UNCONSTRAINED, "y"))
        return jnp.mean(lax.with_sharding_constraint(h * 2, NamedSharding(AUTO, P("x"))))

    w, x = matrices()
    with jax.set_mesh(AUTO):
        kept = unity.optimize(fn, w, placed(x, P("x"), AUTO), machine=MACHINE, constraints=unity.keep_shardings(), progress=False)
        close(jax.jit(kept)(w, x), fn(jnp.asarray(w), jnp.asarray(x)))
    stated = [str(c) for c in kept.program.family.bound.every]
    assert [text.partition(" at ")[0] for text in stated] == [
        "unity.pin(\"args[1]\", P('d0', None))",
        "unity.keep_shardings() of with_sharding_constraint(..., P(UNCONSTRAINED, 'y'))",
        "unity.keep_shardings() of with_sharding_constraint(..., P('x'))",
    ]


WIDE, HEADS, WORDS = 16, 4, 32


def transformer(params: Any, tokens: Any) -> Any:
    """A language model's loss, written for a mesh of samples (x) and heads (y)."""
    split, rows = P("x", None, "y", None), P("x", None, None)
    ones = reshard(jnp.ones((SIZE, SIZE), bool), P(None, None))  # a constant on the mesh

    @jax.checkpoint
    def layer(x: Any, w: Any) -> tuple[Any, None]:
        q, k, v = (jnp.einsum("bsd,dhk->bshk", x, w[name], out_sharding=split) for name in "qkv")
        scores = jnp.where(jnp.tril(ones), jnp.einsum("bshk,bthk->bhst", q, k), -1e9)
        mixed = jnp.einsum("bhst,bthk->bshk", jax.nn.softmax(scores, -1), v)
        return x + jnp.einsum("bshk,hkd->bsd", mixed, w["o"], out_sharding=rows), None

    x = params["words"].at[tokens].get(out_sharding=rows)
    x = lax.scan(layer, x, params["layers"])[0]
    logits = jnp.einsum("bsd,dv->bsv", x, params["out"], out_sharding=P("x", None, "y"))
    number = lax.broadcasted_iota(jnp.int32, logits.shape, 2, out_sharding=P("x", None, "y"))
    own = jnp.where(reshard(tokens, P("x", None))[..., None] == number, logits, 0).sum(-1)
    return jnp.mean(jax.nn.logsumexp(logits, -1) - own)


def transformer_arguments() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)

    def numbers(spec: P, *shape: int) -> Any:
        return placed(rng.normal(size=shape).astype("float32") / 4, spec)

    heads, back = P(None, None, "y", None), P(None, "y", None, None)
    layers = {name: numbers(heads, 2, WIDE, HEADS, 4) for name in "qkv"} | {"o": numbers(back, 2, HEADS, 4, WIDE)}
    params = {"words": numbers(P(), WORDS, WIDE), "layers": layers, "out": numbers(P(None, "y"), WIDE, WORDS)}
    return params, placed(rng.integers(WORDS, size=(8, SIZE)), P("x", None))


@pytest.mark.parametrize("constraints", [(), unity.keep_shardings()], ids=str)
def test_a_transformer_for_a_mesh_is_planned_and_trained_there(constraints: Any) -> None:
    with jax.set_mesh(MESH):
        args = transformer_arguments()
        options = {"machine": MACHINE, "search": "captured", "progress": False}
        plan = unity.optimize(transformer, *args, constraints=constraints, **options)
        wanted, found = (jax.jit(jax.value_and_grad(f))(*args) for f in (transformer, plan))
        close(found, wanted)
        assert types(found) == types(wanted)
    stated = [str(c) for c in plan.program.family.bound.every]
    assert len(stated) == (7 + 6 if constraints else 0)  # arguments, and lines that state a sharding of what is not an iota


def test_kept_shardings_are_saved_and_loaded(tmp_path: Path) -> None:
    def stated(w: Any, x: Any) -> Any:
        return jnp.mean(reshard(jax.nn.gelu(x @ w), P("x", None)) ** 2)

    def silent(w: Any, x: Any) -> Any:
        return jnp.mean(jax.nn.gelu(x @ w) ** 2)

    plain = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((64, 64), (256, 64))]
    with use_abstract_mesh(MESH.abstract_mesh):
        args = [s.update(sharding=NamedSharding(MESH.abstract_mesh, spec)) for s, spec in zip(plain, (P(), P("x")), strict=True)]
        for fn in (stated, silent):
            plan = unity.optimize(fn, *args, machine=MACHINE, constraints=unity.keep_shardings(), search="captured", progress=False)
            plan.files.save(tmp_path / "plan.json")
            loaded = unity.load(tmp_path / "plan.json", fn, *args)
            assert loaded.program.pcg.key == plan.program.pcg.key
            assert loaded.program.family.bound.every == plan.program.family.bound.every != ()
            loaded.files.save(tmp_path / "again.json")
            assert unity.load(tmp_path / "again.json", fn, *args).in_specs == plan.in_specs
    assert unity.load(tmp_path / "again.json", silent, *plain).in_specs == plan.in_specs  # a function that reads no mesh


def test_shardings_that_cannot_be_kept_are_refused_with_the_reason() -> None:
    def fn(x: Any) -> Any:
        return jnp.sum(reshard(x, P("x")) ** 2)

    def layers(ws: Any, x: Any) -> Any:
        for w in ws:
            x = jnp.tanh(jnp.einsum("bd,df->bf", x, w, out_sharding=P("x", None)))
        return jnp.sum(x)

    def branched(x: Any) -> Any:
        return jnp.sum(lax.cond(x[0, 0] > 0, lambda x: reshard(x, P("x", None)), lambda x: x * 2, reshard(x, P("x", None))))

    def ruled(x: Any) -> Any:
        return jnp.sum(pulled(lambda x: reshard(x, P("x", None)), True)(x) ** 2)

    def reordered(x: Any) -> Any:
        return jnp.sum(reshard(x, P(None, ("y", "x"))) ** 2)

    x = jnp.ones((24, 24))
    plan = partial(unity.optimize, constraints=unity.keep_shardings(), progress=False)
    with jax.set_mesh(MESH):
        with pytest.raises(ConstraintError, match=r"mesh \(x: 2, y: 4\) does not fit the axes of a100-1x6 \(device: 6\)"):
            plan(fn, x, machine=unity.Machine.grid(1, 6, "a100"))
        kept = r"unity\.keep_shardings\(\) of out_sharding=P\('x', None\) at test_user_meshes\.py:\d+ \(.*layers\) constrains"
        with pytest.raises(OptionError, match=kept):
            plan(layers, [jnp.ones((24, 24))] * 4, x, machine=MACHINE, pipeline=unity.PipelineShape(2, 4))
        with pytest.raises(ConstraintError, match=r"(?s)test_user_meshes\.py.*keeps, is inside of cond"):
            plan(branched, x, machine=MACHINE)
        with pytest.raises(ConstraintError, match=r"keeps, is inside of custom_vjp"):
            plan(ruled, x, machine=MACHINE)
        order = r"has the sharding P\({}\), but .*\n.*Write \('x', 'y'\) in the place of \('y', 'x'\)"
        with pytest.raises(
            ConstraintError, match=r"test_user_meshes\.py:\d+ \(.*reordered\) " + order.format(r"None, \('y', 'x'\)")
        ):
            plan(reordered, x, machine=MACHINE)
        with pytest.raises(ConstraintError, match=r"args\[0\] " + order.format(r"\('y', 'x'\)")):
            plan(jnp.sum, jax.device_put(x, NamedSharding(MESH, P(("y", "x")))), machine=MACHINE)
        with pytest.raises(OptionError, match="objective='devices'"):
            plan(fn, x, machine=MACHINE, objective="devices")


AXES = st.sampled_from([(2, 2, 2), (3, 2), (2, 3), (2,), ()])


@given(AXES, st.data())
def test_a_placement_on_the_users_mesh_holds_at_least_what_the_plan_wants_there(
    sizes: tuple[int, ...], data: st.DataObject
) -> None:
    axes = tuple(Axis(f"d{k}", size, 0) for k, size in enumerate(sizes))
    own = mesh_of(axes, jax.devices())
    cuts = data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    parts = np.split(np.array(sizes, int), [k for k, cut in enumerate(cuts) if cut])
    shape = tuple(int(part.prod()) for part in parts)
    user = Mesh(own.devices.reshape(shape), tuple(f"m{k}" for k in range(len(shape))))
    dims = data.draw(st.lists(st.integers(0, 1), min_size=len(sizes), max_size=len(sizes)))
    wanted = NamedSharding(own, P(*(tuple(a.name for a, d in zip(axes, dims, strict=True) if d == k) for k in (0, 1))))
    found = on_mesh(wanted, user, axes)
    assert found.mesh == user
    whole = found.devices_indices_map((24, 24))
    for device, index in wanted.devices_indices_map((24, 24)).items():
        for one, more in zip(index, whole[device], strict=True):
            assert set(range(24)[one]) <= set(range(24)[more])
    if shape == sizes:  # an axis each
        assert found.is_equivalent_to(wanted, 2)


@st.composite
def meshes(draw: st.DrawFn) -> tuple[list[int], unity.Machine]:
    """Draw a machine and the sizes of a mesh: products of the machine's axes in some order, or any sizes."""
    nodes, devices = draw(st.sampled_from([1, 2, 3, 4, 6])), draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
    machine = unity.Machine.grid(nodes, devices, "a100")
    if draw(st.booleans()):
        return draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), max_size=4)), machine
    order = draw(st.permutations([a.size for a in machine.axes]))
    cuts = draw(st.lists(st.booleans(), min_size=len(order), max_size=len(order)))
    return [int(part.prod()) for part in np.split(np.array(order, int), [k for k, cut in enumerate(cuts) if cut])], machine


def ends(sizes: Sequence[int]) -> set[int]:
    """Return the products of the first sizes, however many."""
    return {prod(sizes[:k]) for k in range(len(sizes) + 1)}


@given(meshes())
def test_a_mesh_fits_a_machine_if_its_axes_are_products_of_the_machines_in_an_order_within_levels(
    drawn: tuple[list[int], unity.Machine],
) -> None:
    sizes, machine = drawn
    levels = [[a.size for a in machine.axes if a.level == level] for level in sorted({a.level for a in machine.axes})]
    orders = [sum(order, ()) for order in product(*map(permutations, levels))]
    found = mesh_axes({f"m{k}": size for k, size in enumerate(sizes)}, machine.axes)
    assert (found is not None) == any(prod(sizes) == prod(order) and ends(sizes) <= ends(order) for order in orders)
    if found is None:
        return
    assert [prod(machine.axes[k].size for k in found[f"m{j}"]) for j in range(len(sizes))] == sizes
    assert sorted(k for part in found.values() for k in part) == list(range(len(machine.axes)))
    assert [machine.axes[k].level for part in found.values() for k in part] == [a.level for a in machine.axes]


def test_shardings_of_partial_sums_are_not_kept() -> None:
    def fn(w: Any, x: Any) -> Any:
        partial_sums = jnp.einsum("bd,df->bf", x, w, out_sharding=P("x", None, unreduced=frozenset({"y"})))
        return jnp.tanh(reshard(partial_sums, P("x", None)))

    with jax.set_mesh(MESH):
        w = jax.device_put(jnp.ones((SIZE, SIZE)), NamedSharding(MESH, P("y", None)))
        x = jax.device_put(jnp.ones((SIZE, SIZE)), NamedSharding(MESH, P("x", "y")))
        plan = unity.optimize(fn, w, x, machine=MACHINE, budget=0, constraints=unity.keep_shardings(), progress=False)
        np.testing.assert_array_equal(plan(w, x), fn(w, x))
        summed = jax.ShapeDtypeStruct(
            (SIZE, SIZE), "float32", sharding=NamedSharding(MESH, P("x", None, unreduced=frozenset({"y"})))
        )
        unity.optimize(
            lambda x: reshard(x, P("x", None)),
            summed,
            machine=MACHINE,
            budget=0,
            constraints=unity.keep_shardings(),
            progress=False,
        )


@pytest.mark.parametrize("kinds", list(product((AxisType.Explicit, AxisType.Auto), repeat=2)))
def test_every_plan_runs_under_a_mesh_some_of_whose_axes_are_explicit(kinds: tuple[AxisType, AxisType]) -> None:
    def fn(w: Any, x: Any) -> Any:
        return jnp.tanh(x @ w)

    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=kinds)
    with jax.set_mesh(mesh):
        w, x = (jax.device_put(a, NamedSharding(mesh, P())) for a in (jnp.ones((8, 8)) / 8, jnp.arange(128.0).reshape(16, 8)))
        plan = unity.optimize(fn, w, x, argnums=(0, 1), machine=MACHINE, budget=0, progress=False)
        changes = (jax.jit, lambda f: jax.jit(jax.grad(lambda w, x: f(w, x).sum(), argnums=(0, 1))), lambda f: f)
        for point in plan.frontier:
            for changed in changes:
                wanted, found = changed(fn)(w, x), changed(point)(w, x)
                close(found, wanted)
                assert AxisType.Explicit not in kinds or types(found) == types(wanted)
