"""What a user constrains holds in every plan, costs nothing but what it forbids, and is blamed by name where it leaves no plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import fewer
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from msgspec import structs
from small_functions import Function, functions
from small_models import MODELS, Small, arrays, counted, made, random_point

import unity
from unity.base.documents import encoded, parsed, typed
from unity.base.errors import PlanError
from unity.constraints.bound_constraints import BoundConstraints, BoundRecord, bind
from unity.constraints.conflicts import smallest
from unity.constraints.kinds import Constraint, OperatorPin, Passed
from unity.constraints.paths import matching
from unity.exec import lowering
from unity.pcg.capture.capture import Captured, capture
from unity.pcg.ir.graph import PCG
from unity.pcg.parallel.check import check
from unity.pcg.parallel.marks import marks
from unity.pcg.parallel.parallelize import parallelize
from unity.pcg.parallel.sharding_spec import satisfies, sharding_spec
from unity.pcg.parallel.traffic import traffic
from unity.pcg.propagation.choice import Choice
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import UNUSED, Type, degrees, misfit, partitioned
from unity.search.cost.assembly import Assembled
from unity.search.cost.cost import Training
from unity.search.cost.prediction import predict
from unity.search.joint.pricing import Prices
from unity.search.memory.memory import predict_memory
from unity.search.session import Search
from unity.search.solver.minimizer import Minimizer
from unity.search.space.masks import Pinned, names_of

FOUR = unity.Machine.grid(2, 2, "a100")  # small enough that every value is listed: what is found is the best there is
EIGHT = unity.Machine.grid(1, 8, "a100")  # too large for that
ENTRIES = (None, "node", "device", ("node", "device"), P.UNCONSTRAINED, 2, 4)

pytestmark = pytest.mark.usefixtures("own_cache")


def planned(fn: Callable[..., Any], *args: Any, machine: unity.Machine = FOUR, **options: Any) -> unity.Plan:
    options = {"search": "captured", **options}
    return unity.optimize(fn, *args, machine=machine, progress=False, **options)


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


def loss(params: dict[str, Any], batch: dict[str, Any]) -> Any:
    hidden = jnp.tanh(batch["x"] @ params["w1"] + params["b"])
    return ((hidden @ params["w2"] - batch["y"]) ** 2).mean()


def arguments(rows: int = 32) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"w1": f32(64, 256), "b": f32(256), "w2": f32(256, 16)}, {"x": f32(rows, 64), "y": f32(rows, 16)}


def same_as(fn: Callable[..., Any], plan: unity.Plan, params: Any, batch: Any) -> None:
    """Values and gradients are those of the function."""
    expected = jax.jit(jax.value_and_grad(fn))(params, batch)
    got = jax.jit(jax.value_and_grad(plan))(*plan.shard(params, batch))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4), got, expected)


def spec_of(plan: unity.Plan, path: str) -> P:
    """Return the specification of an argument over the axes of the search."""
    (node,) = (n for n in plan.program.pcg.inputs if n.name == path)
    return lowering.spec_of(node.types[0], plan.program.pcg.axes, node.tensors[0].ndim)


def obeys(entry: Any, names: Sequence[str], machine: unity.Machine) -> bool:
    """Whether a dimension that is sliced over some axes is as an entry says, read off the machine's own axes."""
    sizes = {a.name: a.size for a in machine.axes}
    level = {a.name: machine.levels[a.level].name for a in machine.axes}
    if entry is P.UNCONSTRAINED:
        return True
    if isinstance(entry, int):
        return int(np.prod([sizes[n] for n in names])) == entry
    own = (entry,) if isinstance(entry, str) else entry or ()
    return set(names) == {a for a in sizes if a in own or level[a] in own}


def axes_at(plan: unity.Plan, path: str, dim: int) -> tuple[str, ...]:
    entry = (*spec_of(plan, path), *(None,) * 9)[dim]
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def entries_of(rank: int) -> st.SearchStrategy[tuple[Any, ...]]:
    def possible(entries: tuple[Any, ...]) -> bool:
        """No level twice, and no more slices than axes that are left."""
        named = [n for e in entries if isinstance(e, (str, tuple)) for n in ((e,) if isinstance(e, str) else e)]
        count = sum({2: 1, 4: 2}[e] for e in entries if isinstance(e, int))
        return len(named) == len(set(named)) and len(named) + count <= 2

    return st.tuples(*(st.sampled_from(ENTRIES) for _ in range(rank))).filter(possible)


@st.composite
def pinned(draw: st.DrawFn) -> tuple[Function, dict[str, tuple[Any, ...]]]:
    """A function, and specifications of some of its arguments."""
    f = draw(functions)
    leaves = {f"args[0][{k}]": w.shape for k, w in enumerate(f.params)} | {"args[1]": f.batch.shape}
    chosen = draw(st.lists(st.sampled_from(sorted(leaves)), min_size=1, max_size=2, unique=True))
    return f, {path: draw(entries_of(len(leaves[path]))) for path in chosen}


def needs_no_less_than_the_bound(plan: unity.Plan) -> bool:
    """Whether the lower bound on memory, which counts constraints on arguments, holds for the leanest strategy that obeys them."""
    search = plan.program.family.search
    return search.least_memory.total <= search.leanest.memory * (1 + 1e-9)


# Laws


@settings(max_examples=fewer(4))
@given(pinned())
def test_a_pinned_plan_obeys_computes_the_same_and_is_never_faster(case: tuple[Function, dict[str, tuple[Any, ...]]]) -> None:
    f, specs = case
    plan = planned(f.loss, f.params, f.batch, constraints=[unity.pin(path, spec) for path, spec in specs.items()])
    for path, spec in specs.items():
        assert all(obeys(entry, axes_at(plan, path, dim), FOUR) for dim, entry in enumerate(spec))
    assert plan.time >= planned(f.loss, f.params, f.batch).time * (1 - 1e-9)
    assert needs_no_less_than_the_bound(plan)
    params, batch = (arrays(x) for x in (f.params, f.batch))
    same_as(f.loss, plan, params, batch)


@settings(max_examples=fewer(6))
@given(functions)
def test_pinned_to_what_the_free_search_chose_the_plan_is_the_same(f: Function) -> None:
    free = planned(f.loss, f.params, f.batch)
    specs = {n.name: spec_of(free, n.name) for n in free.program.pcg.inputs}
    plan = planned(f.loss, f.params, f.batch, constraints=[unity.pin(path, spec) for path, spec in specs.items()])
    assert (plan.time, plan.memory) == pytest.approx((free.time, free.memory), rel=1e-9)
    assert plan.in_shardings == free.in_shardings


@settings(max_examples=fewer(4))
@given(functions, st.data())
def test_a_marked_value_has_its_type_and_nothing_else_changes(f: Function, data: st.DataObject) -> None:
    entries = data.draw(entries_of(2))

    def marked(params: Any, x: Any) -> Any:
        return f.loss(params, unity.constrain(jnp.sin(x), P(*entries)))

    def plain(params: Any, x: Any) -> Any:
        return f.loss(params, jnp.sin(x))

    plan, free = planned(marked, f.params, f.batch), planned(plain, f.params, f.batch)
    (node,) = marks(plan.program.pcg)
    names = [
        [a.name for a, s in zip(plan.program.pcg.axes, node.types[0], strict=True) if s.kind == "P" and s.dim == d] for d in (0, 1)
    ]
    assert all(obeys(entry, on, FOUR) for entry, on in zip(entries, names, strict=True))
    assert plan.time >= free.time * (1 - 1e-9)
    params, batch = (arrays(x) for x in (f.params, f.batch))
    same_as(plain, plan, params, batch)


@settings(max_examples=fewer(6))
@given(functions)
def test_a_mark_that_says_nothing_costs_nothing(f: Function) -> None:
    def marked(params: Any, x: Any) -> Any:
        return f.loss(params, unity.constrain(x, P(P.UNCONSTRAINED, P.UNCONSTRAINED)))

    plan, free = planned(marked, f.params, f.batch), planned(f.loss, f.params, f.batch)
    assert (plan.time, plan.memory) == pytest.approx((free.time, free.memory), rel=1e-9)


@settings(max_examples=fewer(6))
@given(functions, st.sampled_from(["only", "forbid tensor", "forbid samples", "forbid weights", "require"]))
def test_levels(f: Function, word: str) -> None:
    constraint = {
        "only": unity.only("samples", across="node"),
        "forbid tensor": unity.forbid("tensor", across="node"),
        "forbid samples": unity.forbid("samples", across="node"),
        "forbid weights": unity.forbid("weights", across="node"),
        "require": unity.require("samples", across="node"),
    }[word]
    plan, free = planned(f.loss, f.params, f.batch, constraints=[constraint]), planned(f.loss, f.params, f.batch)
    assert plan.time >= free.time * (1 - 1e-9)
    assert needs_no_less_than_the_bound(plan)
    weights = [degrees(n.types[0][:1], plan.program.pcg.axes[:1], n.tensors[0].ndim) for n in plan.program.pcg.inputs[:-1]]
    batch = plan.program.pcg.inputs[-1].types[0][0]
    if word in ("only", "forbid weights"):
        assert all(set(d) == {1} for d in weights)
    if word in ("only", "forbid tensor"):
        assert batch.kind == "U" or batch.dim == 0
    if word == "forbid samples":
        assert batch.kind == "U" or batch.dim == 1
    if word == "require":
        assert (batch.kind, batch.dim) == ("P", 0)


def test_data_parallel_between_nodes_means_that_only_gradients_are_sent_there() -> None:
    model = MODELS["gpt"]()
    levels = [unity.only("samples", across="node"), unity.require("samples", across="node")]
    plan = planned(model.loss, model.params, model.batch, machine=unity.Machine.grid(2, 4, "a100"), constraints=levels)
    between = [
        c
        for c in traffic(plan.program.pcg, plan.program.family.captured.differentiated)
        if any(plan.program.pcg.axes[i].level == 0 for i in c.axes)
    ]
    assert between
    assert {c.kind for c in between} == {"all-reduce"}


@pytest.mark.parametrize(
    "constant",
    [
        lambda: jnp.tril(jnp.ones((64, 64))) * 2,
        lambda: jnp.linspace(-1.0, 1.0, 64)[:, None],
        lambda: np.linspace(-1.0, 1.0, 64, dtype=np.float32)[:, None],
    ],
)
def test_a_constant_may_be_constrained(constant: Callable[[], Any]) -> None:
    def fn(w: Any, x: Any) -> Any:
        mask = unity.constrain(constant(), P("device"))
        return jnp.sum(jnp.where(mask > 0, x @ w, 0.0) ** 2)

    w, x = (jax.random.normal(jax.random.key(k), (64, 64)) for k in (0, 1))
    plan = unity.optimize(fn, w, x, machine=unity.Machine.grid(1, 8, "a100"), progress=False)
    (node,) = (n for n, _ in plan.program.pcg.walk() if n.kind == "constrain")
    assert node.types[0] == (partitioned(0),) * 3
    np.testing.assert_allclose(jax.jit(plan)(*plan.shard(w, x)), fn(w, x), rtol=1e-5)


def test_a_dimension_by_its_path() -> None:
    model = MODELS["gpt"]()
    plan = planned(model.loss, model.params, model.batch, constraints=[unity.require(("batch**", 1), across="device")])
    assert {axes_at(plan, n.name, 1) for n in plan.program.pcg.inputs if n.tensors[0].shape == (8, 16)} == {("d0",)}


# The search and the parallel graph mean the same by marks


@cache
def marked_model() -> tuple[Captured, Assembled]:
    """Layers, the second one scanned with a remat, with values marked in both, and a marked weight."""

    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(unity.constrain(x @ w, P(P.UNCONSTRAINED, P.UNCONSTRAINED)))

    def loss(params: Any, x: Any) -> Any:
        x = layer(x, unity.constrain(params["w"], P(P.UNCONSTRAINED)))
        x, _ = jax.lax.scan(lambda x, w: (jax.checkpoint(layer)(x, w), None), x, params["deep"])
        x = unity.constrain(x, P(P.UNCONSTRAINED, P.UNCONSTRAINED))
        return (x * x + jnp.sin(x)).mean()

    return made(Small(loss, {"w": f32(16, 16), "deep": f32(3, 16, 16)}, f32(8, 16)))


@settings(max_examples=fewer(15))
@given(seed=st.integers(0, 2**32 - 1))
def test_marked_programs_cost_no_more_than_the_search_counts(seed: int) -> None:
    captured, assembled = marked_model()
    point = random_point(assembled, np.random.default_rng(seed))
    graph = parallelize(captured.graph, assembled.assignment(point))
    check(graph)
    memory = predict_memory(graph, captured.differentiated, assembled.training)
    assert counted(assembled, point, "memory") >= memory.additive * (1 - 1e-9)
    time = predict(graph, assembled.machine, captured.differentiated).time
    assert counted(assembled, point, "time") >= time * (1 - 1e-9)


@pytest.mark.parametrize("weight", [0.0, np.inf])
def test_and_of_the_best_ones_exactly_that(weight: float) -> None:
    captured, assembled = marked_model()
    (point,) = Minimizer(assembled.problem).at([weight])
    graph = parallelize(captured.graph, assembled.assignment(point))
    assert point.memory == pytest.approx(predict_memory(graph, captured.differentiated, assembled.training).additive)
    assert point.time == pytest.approx(predict(graph, assembled.machine, captured.differentiated).time)


# Values that lists leave out


@pytest.mark.parametrize("spec", [P("d2", "d0"), P(("d0", "d2"), "d1"), P(None, ("d1", "d2"))])
def test_what_is_not_listed_otherwise_is_listed_when_it_is_pinned(spec: P) -> None:
    params, batch = arguments()
    plan = planned(loss, params, batch, machine=EIGHT, constraints=[unity.pin("params['w1']", spec)])
    assert spec_of(plan, "args[0]['w1']") == spec
    real = arrays((params, batch))
    same_as(loss, plan, *real)


def test_marks_inside_of_scans_and_remats() -> None:
    def layer(x: Any, w: Any) -> tuple[Any, None]:
        return jnp.tanh(unity.constrain(x @ w, P(None, "device"))), None

    def deep(params: Any, batch: Any) -> Any:
        x, _ = jax.lax.scan(jax.checkpoint(layer), batch, params)
        return (x**2).mean()

    params, batch = jax.ShapeDtypeStruct((3, 32, 32), "float32"), jax.ShapeDtypeStruct((16, 32), "float32")
    plan = planned(deep, params, batch)
    (node,) = marks(plan.program.pcg)
    assert [(s.kind, s.dim) for s in node.types[0]] in ([("U", -1), ("P", 1)], [("R", -1), ("P", 1)])
    assert plan.check().agrees()
    same_as(deep, plan, *arrays((params, batch)))


def test_rewriting_goes_around_marks() -> None:
    def two(params: Any, x: Any) -> Any:
        return (unity.constrain(x @ params["a"] @ params["b"], P()) ** 2).mean()

    args = {"a": f32(64, 256), "b": f32(256, 8)}, f32(4096, 64)
    machine = unity.Machine.grid(1, 8, "v100")
    free = planned(two, *args, search="unity", machine=machine)
    assert free.program.rewriting
    free.program.check_derivation()
    plan = planned(two, *args, search="unity", machine=machine, constraints=[unity.pin("params['a']", P(None, "d1"))])
    assert spec_of(plan, "args[0]['a']") == P(None, "d1")
    plan.program.check_derivation()
    assert plan.time >= free.time * (1 - 1e-9)
    rules = [way.rule for way, _ in free.program.rewriting.applied]
    without = planned(two, *args, search="unity", machine=machine, constraints=[unity.without_rules(*rules)])
    assert not {way.rule for way, _ in without.program.rewriting.applied} & set(rules)
    for p in (free, plan, without):
        (node,) = marks(p.program.pcg)
        assert {s.kind for s in node.types[0]} <= {"U", "R"}
        same_as(two, p, *arrays(args))


# Operators


def scoped(params: Any, batch: Any) -> Any:
    def layer(x: Any, w: Any) -> tuple[Any, None]:
        with jax.named_scope("up"):
            x = jnp.tanh(x @ w)
        with jax.named_scope("down"), jax.named_scope("product"):
            return x @ w.T, None

    x, _ = jax.lax.scan(jax.checkpoint(layer), batch, params)
    return (x**2).mean()


SCOPED = jax.ShapeDtypeStruct((3, 32, 64), "float32"), jax.ShapeDtypeStruct((16, 32), "float32")
LINE = scoped.__code__.co_firstlineno + 3  # of the first product
BY_NAME = {
    "dot_general": ("up", "down"),
    f"dot_general at test_constraints.py:{LINE}": ("up",),
    "dot_general at up": ("up",),
    "dot_general at down": ("down",),
    "down/product": ("down",),
}


@pytest.mark.parametrize(("name", "scopes"), BY_NAME.items())
@pytest.mark.parametrize("spec", [P("node", "device"), P("device", "node"), P(None, 4), P()])
def test_pinned_operators_have_their_type_wherever_they_are(name: str, scopes: tuple[str, ...], spec: P) -> None:
    plan = planned(scoped, *SCOPED, constraints=[unity.pin(name, spec)])
    products = [node for node, _ in plan.program.pcg.walk() if node.kind == "dot_general" and node.scope.split("/")[0] in scopes]
    assert len(products) == len(scopes)
    for node in products:
        for dim, entry in enumerate((*spec, None)[:2] if len(spec) else (None, None)):
            names = [a.name for a, s in zip(FOUR.axes, node.types[0], strict=True) if s.kind == "P" and s.dim == dim]
            assert obeys(entry, names, FOUR)
    assert plan.time >= planned(scoped, *SCOPED).time * (1 - 1e-9)
    assert plan.check().agrees()
    same_as(scoped, plan, *arrays(SCOPED))


def test_a_program_without_a_pinned_operator_is_not_taken() -> None:
    def two(params: Any, x: Any) -> Any:
        return ((x @ params["a"] @ params["b"]) ** 2).mean()

    args = {"a": f32(64, 256), "b": f32(256, 8)}, f32(4096, 64)
    machine = unity.Machine.grid(1, 8, "v100")
    assert planned(two, *args, search="unity", machine=machine).program.rewriting
    plan = planned(two, *args, search="unity", machine=machine, constraints=[unity.pin("dot_general", P("device"))])
    captured = [node.tensors for node, _ in plan.program.original.walk() if node.kind == "dot_general"]
    assert [node.tensors for node, _ in plan.program.pcg.walk() if node.kind == "dot_general"] == captured
    same_as(two, plan, *arrays(args))


def test_pinned_operators_are_spoken_of_like_other_constraints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pin = unity.pin("dot_general at up", P("node", "device"))
    plan = planned(scoped, *SCOPED, constraints=[pin])
    plan.explain("dot_general at up")
    assert f"constrained by {pin}" in capsys.readouterr().out
    plan.files.save(tmp_path / "plan.json")
    again = unity.load(tmp_path / "plan.json", scoped, *SCOPED)
    assert (again.time, again.program.pcg.key) == (plan.time, plan.program.pcg.key)
    with pytest.raises(unity.UnityError, match="constrains the function"):
        planned(scoped, *SCOPED, constraints=[pin], pipeline=unity.PipelineShape(2, 2))


def test_what_no_operator_can_be_is_refused_by_name() -> None:
    def refused(*constraints: Constraint) -> str:
        with pytest.raises((unity.ConstraintError, unity.InfeasibleError)) as error:
            planned(scoped, *SCOPED, constraints=constraints)
        return str(error.value)

    assert "no operator the name; the nearest operators are dot_general at up" in refused(unity.pin("dot_general at upp", P()))
    assert "3 entries, for a tensor of 2 dimensions" in refused(unity.pin("dot_general at up", P(None, None, "node")))
    assert "dimension 0 of size 16 is not divisible by 32" in refused(unity.pin("dot_general at up", P(32)))
    together = refused(unity.pin("dot_general at up", P("node")), unity.only("tensor", across="node"))
    assert "unity.pin(\"dot_general at up\", P('node'))" in together
    assert "unity.only" in together


# Inner digits


def indices(type_: Type, axes: Sequence[Axis], where: Sequence[int], size: int) -> set[int]:
    """Which indices of the only dimension the device at a place of the mesh holds: by the definition of digits."""
    rest = set(range(size))
    for outer in {s.outer for s in type_ if s.kind == "P"}:
        parts, part = 1, 0
        for state, axis, place in zip(type_, axes, where, strict=True):
            if state == partitioned(0, outer):
                parts, part = parts * axis.size, part * axis.size + place
        rest &= {i for i in range(size) if i // (size // (outer * parts)) % parts == part}
    return rest


def test_what_is_wanted_is_met_by_every_type_of_that_layout_and_no_other() -> None:
    axes, size = (Axis("a", 2, 0), Axis("b", 3, 0), Axis("c", 2, 0)), 24
    states = [UNUSED, *(partitioned(0, outer) for outer in (1, 2, 3, 4, 6))]
    types = [t for t in product(states, repeat=3) if misfit((size,), t, axes) is None]
    places = list(product(*(range(a.size) for a in axes)))
    choices = [Choice(str(s), (), (s,), 0, 0.0) for s in states]
    picks = np.array([[states.index(s) for s in t] for t in types], np.int16)
    wants = [frozenset(k for k in range(3) if bits >> k & 1) for bits in range(8)]
    for want in (*wants, 1, 2, 3, 4, 6, 12):
        rule = Pinned(0, (want,), tuple(a.size for a in axes))
        left_ = rule.allows(choices, picks, axes)
        for t, flag in zip(types, left_, strict=True):
            held = {where: indices(t, axes, where, size) for where in places}
            if isinstance(want, int):
                width = size // want
                right = {frozenset(h) for h in held.values()} == {frozenset(range(k, k + width)) for k in range(0, size, width)}
            else:
                plain = tuple(partitioned(0) if k in want else UNUSED for k in range(3))
                right = held == {where: indices(plain, axes, where, size) for where in places}
            assert flag == satisfies((want,), t, axes) == right, (want, t)
            assert not right or all(rule.may_use(choices[states.index(s)], k) for k, s in enumerate(t))


@pytest.mark.parametrize("marked_", [False, True])
def test_a_dimension_that_a_reshape_cuts_is_pinned_over_more_devices_than_its_first_part_has(marked_: bool) -> None:
    def grouped(w: Any, x: Any) -> Any:
        groups = jnp.tanh(x.reshape(4, 4, 16, 8) @ w)
        with jax.named_scope("residual"):
            y = groups.reshape(4, 64, 8) + x
        y = unity.constrain(y, P(None, "device")) if marked_ else y
        return ((y @ w + jax.nn.softmax(y) @ w) ** 2).mean()

    args = f32(8, 8), f32(4, 64, 8)
    pins = [] if marked_ else [unity.pin("residual", P(None, "device"))]
    plan = planned(grouped, *args, machine=EIGHT, constraints=pins)
    (node,) = marks(plan.program.pcg) if marked_ else [n for n, _ in plan.program.pcg.walk() if n.scope == "residual"]
    assert degrees(node.types[0], EIGHT.axes, 3) == (1, 8, 1)
    assert plan.check().agrees()
    same_as(grouped, plan, *arrays(args))


# Outside of plans a mark is the value


@pytest.mark.parametrize(
    "constraint",
    [unity.pin("params['w1']", P("node", "device")), unity.pin("params['w2']", P(4)), unity.require("weights", across="node")],
    ids=str,
)
def test_whole_programs_are_priced_under_the_constraints(constraint: Constraint) -> None:
    captured = capture(loss, *arguments())
    restrict = bind([constraint], captured, loss)
    free, prices = Prices(FOUR, Training()), Prices(FOUR, Training(), restrict=restrict)
    price = prices.whole(captured.body, captured.differentiated)
    search = Search(captured.graph, captured.differentiated, FOUR, Training(), restrict=restrict)
    assert price == pytest.approx(search.minimizer.least(0.0))
    assert price > free.whole(captured.body, captured.differentiated) * (1 + 1e-6)
    assert prices.of(captured.body, captured.differentiated) == free.of(captured.body, captured.differentiated)


def test_a_program_that_constraints_leave_nothing_of_has_no_price() -> None:
    captured = capture(loss, *arguments())
    for one in (unity.pin("params['b']", P(3)), unity.require(("params['b']", 0), across="node")):
        restrict = bind([one, unity.pin("params['b']", P())], captured, loss)
        assert Prices(FOUR, Training(), restrict=restrict).whole(captured.body, captured.differentiated) == np.inf


def test_a_mark_is_an_identity() -> None:
    def marked(x: Any) -> Any:
        return jnp.sin(unity.constrain(x * 2, P("node"))).sum()

    def plain(x: Any) -> Any:
        return jnp.sin(x * 2).sum()

    x = jnp.arange(6.0).reshape(2, 3)
    for transform in (
        lambda f: f, jax.jit, jax.grad, lambda f: jax.jit(jax.grad(f)), jax.vmap, jax.checkpoint,
        lambda f: jax.vmap(jax.grad(f), in_axes=1),
    ):  # fmt: skip
        np.testing.assert_array_equal(transform(marked)(x), transform(plain)(x))
    _, tangent = jax.jvp(marked, (x,), (x,))
    assert tangent == jax.jvp(plain, (x,), (x,))[1]
    assert "constrain" not in jax.jit(marked).lower(x).as_text()


def test_mapped_over_a_batch_the_other_dimensions_are_constrained() -> None:
    traced = jax.make_jaxpr(jax.vmap(lambda x: unity.constrain(x, P("node", None)), in_axes=1))(jnp.ones((4, 3, 2)))
    (e,) = (e for e in traced.eqns if e.primitive.name == "constrain")
    assert e.params["entries"] == (("node",), None, ())


# What is wrong


def refusal(constraints: list[Any], **options: Any) -> str:
    with pytest.raises(unity.UnityError) as caught:
        planned(options.pop("fn", loss), *arguments(options.pop("rows", 32)), constraints=constraints, **options)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_constraint_that_matches_nothing_names_the_nearest() -> None:
    assert "no argument has the path params['w3']; the nearest are params['w" in refusal([unity.pin("params['w3']", P())])
    assert "no argument has the path w1; the nearest are args[0]['w1'], params['w1']" in refusal([unity.pin("w1", P())])
    assert "'nodes' is no level or axis of this machine: it has node, device; did you mean 'node'?" in refusal(
        [unity.pin("params['w1']", P("nodes"))]
    )
    assert "3 entries, for a tensor of 2 dimensions" in refusal([unity.pin("params['w1']", P(None, None, "node"))])
    for repeated in (P("node", "n0"), P(("device", "node", "device"))):
        assert "an axis can slice a tensor only once" in refusal([unity.pin("params['w1']", repeated)])
    assert "outermost first: write ('node', 'device')" in refusal([unity.pin("params['w1']", P(("device", "node")))])
    assert "no level or axis" in refusal([unity.only("samples", across="rack")])
    assert "no dimension 7" in refusal([unity.forbid(("batch['x']", 7), across="node")])
    assert "no rule of the library is named" in refusal([unity.without_rules("no-such-rule")], search="unity")


def test_what_says_nothing_is_refused_where_it_is_said() -> None:
    for wrong in ("device", [1.5], [0], [True], 3):
        with pytest.raises(unity.ConstraintError):
            unity.pin("params['w1']", wrong)
    with pytest.raises(unity.ConstraintError, match="is no dimension"):
        unity.forbid("batch", across="node")
    with pytest.raises(unity.ConstraintError, match="says nothing of arguments"):
        unity.require("tensor", across="node")
    with pytest.raises(unity.ConstraintError, match="3 entries, but the value has 1 dimensions"):
        unity.constrain(jnp.ones(3), P(None, None, "node"))


def test_marks_where_no_type_can_be_chosen() -> None:
    def branching(params: Any, batch: Any) -> Any:
        x = batch["x"] @ params["w1"]
        return jax.lax.cond(x.sum() > 0, lambda x: unity.constrain(x, P("node")), jnp.tanh, x).mean()

    assert "inside of cond" in refusal([], fn=branching)


def test_other_searches_refuse_constraints_by_name() -> None:
    for search in ("optcnn", "unity-rules", "megatron", "sequential"):
        with pytest.raises(ValueError, match=f"search='{search}' knows no constraints, and would break unity.pin"):
            planned(loss, *arguments(), search=search, constraints=[unity.pin("params['w1']", P())])
    with pytest.raises(ValueError, match=r"would break unity\.constrain"):
        planned(lambda p, b: unity.constrain(loss(p, b), P()), *arguments(), search="optcnn")


# What leaves no plan


def test_the_smallest_set_that_conflicts_is_named() -> None:
    whole, sliced, other = unity.pin("params['w1']", P()), unity.pin("**['w1']", P("node")), unity.pin("params['w2']", P())
    message = refusal([other, whole, unity.only("samples", across="device"), sliced])
    assert str(whole) in message
    assert str(sliced) in message
    assert str(other) not in message
    assert "samples" not in message


def test_what_does_not_divide_is_said() -> None:
    message = refusal([unity.pin("batch['x']", P("node"))], rows=33)
    assert "args[1]['x']: dimension 0 of size 33 is not divisible by 2 (the nearest that is: 34)" in message
    assert "no axes of this machine make 8 slices" in refusal([unity.pin("batch['x']", (8,))])


def test_what_does_not_fit_is_blamed_on_the_constraint_that_does_it() -> None:
    free = planned(loss, *arguments(), objective="memory")
    whole = unity.pin("params['w1']", P())
    assert planned(loss, *arguments(), memory_limit=free.memory * 1.01).memory <= free.memory * 1.01
    message = refusal([unity.pin("params['b']", P("device")), whole], memory_limit=free.memory * 1.01)
    assert "leaves no plan that fits" in message
    assert str(whole) in message
    assert "params['b']" not in message
    assert "the leanest plan needs" in refusal([whole], memory_limit=100)


def layered(params: dict[str, Any], x: Any) -> Any:
    """A loop over layers, which a plan may run as a pipeline or over micro-batches."""
    hidden = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x @ params["in"], params["w"])[0]
    return (hidden**2).mean()


LAYERED = {"w": f32(4, 8, 8), "in": f32(12, 8)}, f32(16, 12)


def refusal_of_layers(machine: unity.Machine, *constraints: Any, **options: Any) -> str:
    with pytest.raises(unity.InfeasibleError) as caught:
        unity.optimize(layered, *LAYERED, machine=machine, constraints=constraints, progress=False, budget=5, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"micro_batches": 2},
        {"micro_batches": True},
        {"pipeline": unity.PipelineShape(2, 4)},
        {"branch_groups": 2},
        {"padding": True, "pack": True},
        {"offload": True},
        {"memory_limit": 2000},
        {"objective": "memory"},
    ],
)
def test_an_impossible_pin_is_said_whatever_the_plan_must_or_may_have(options: dict[str, Any]) -> None:
    message = refusal_of_layers(EIGHT, unity.pin("params['in']", P("device")), **options)
    assert message == refusal_of_layers(EIGHT, unity.pin("params['in']", P("device")))
    assert "dimension 0 of size 12 is not divisible by 8 (the nearest that is: 16)" in message


def test_a_limit_that_only_a_pipeline_meets_is_blamed_on_the_pins_that_exclude_it() -> None:
    machine, whole, other = unity.Machine.grid(2, 4, "a100"), unity.pin("params**", P()), unity.pin("x", P("node"))
    shape = unity.PipelineShape(2, 16, "1f1b")
    for options, means in ({}, ""), ({"pipeline": shape}, f" with pipeline={shape}"):
        message = refusal_of_layers(machine, other, whole, memory_limit=1500, **options)
        assert f"this constraint leaves no plan{means} that fits 1.5 kB:\n    {whole}\n" in message
        assert "as many devices" not in message
        assert "offload" not in message


def test_ways_out_of_a_limit_hold_under_the_constraints() -> None:
    machine, weights, batch = unity.Machine.grid(2, 4, "a100"), 4 * (4 * 8 * 8 + 12 * 8), 4 * 16 * 12
    state = 4 * weights  # as many bytes of gradients, and twice as many of the optimizer's state
    assert f"{(state + batch) / 8 / 100:.1f} times as many devices" in refusal_of_layers(machine, memory_limit=100)
    message = refusal_of_layers(machine, unity.pin("params**", P()), memory_limit=100)
    assert f"Nearest: memory_limit={state + batch // 8} at least" in message  # no number of devices divides what is pinned
    message = refusal_of_layers(machine, unity.pin("x", P()), memory_limit=batch + 22)
    assert f"at least {state / 8 / 22:.1f} times as many devices, or memory_limit={state // 8 + batch} at least" in message


@given(st.sets(st.frozensets(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=4))
def test_a_deletion_filter_gives_a_smallest_set(conflicts: set[frozenset[int]]) -> None:
    every: list[Constraint] = [unity.pin(str(k), P()) for k in range(6)]

    def feasible(some: Sequence[Constraint]) -> bool:
        there = {every.index(c) for c in some}
        return not any(c <= there for c in conflicts)

    found = smallest(every, feasible)
    assert not feasible(found)
    assert all(feasible(list(rest)) for rest in combinations(found, len(found) - 1))


# Kept


def test_constraints_are_part_of_what_is_remembered_and_saved(tmp_path: Path) -> None:
    pin = unity.pin("params['w1']", P(None, "node"))
    free, plan = planned(loss, *arguments()), planned(loss, *arguments(), constraints=[pin])
    assert spec_of(free, "args[0]['w1']") != spec_of(plan, "args[0]['w1']")
    again = planned(loss, *arguments(), constraints=[pin])
    assert again.program.pcg.key == plan.program.pcg.key
    plan.files.save(tmp_path / "plan.json")
    loaded = unity.load(tmp_path / "plan.json", loss, *arguments())
    assert loaded.program.pcg.key == plan.program.pcg.key
    with pytest.raises(unity.PlanError, match="no argument has the path"):
        unity.load(tmp_path / "plan.json", lambda weights, data: loss(weights, data), *arguments())
    every = [*loaded.frontier, *again.frontier]
    assert len(every) > 2
    assert {spec_of(p, "args[0]['w1']") for p in every} == {P(None, "n0")}


def test_explain_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    planned(loss, *arguments(), constraints=unity.pin("params['w1']", P(None, "node"))).explain()
    assert "constrained by:\n    unity.pin(\"params['w1']\", P(None, 'node'))\n" in capsys.readouterr().out


def test_a_plan_that_breaks_a_constraint_is_refused() -> None:
    free = planned(loss, *arguments())
    plan = planned(loss, *arguments(), constraints=[unity.pin("params['w1']", P("node", "device"))])
    bound = plan.program.family.bound
    bound.check(plan.program.serial, plan.program.pcg, FOUR)
    with pytest.raises(unity.PlanError, match=r"does not obey.*unity\.pin"):
        bound.check(free.program.serial, free.program.pcg, FOUR)
    samples = planned(loss, *arguments(), constraints=[unity.only("samples", across="device")]).program.family.bound
    tensor: PCG = planned(loss, *arguments(), constraints=[unity.pin("params['w1']", P(None, "device"))]).program.pcg
    with pytest.raises(unity.PlanError, match=r"does not obey.*unity\.only"):
        samples.check(free.program.serial, tensor, FOUR)


def test_on_fewer_devices_too() -> None:
    plan = planned(loss, *arguments(), objective="devices", constraints=[unity.pin("batch['x']", P("device"))])
    assert plan.inspect.machine.devices == 1
    two = planned(loss, *arguments(), objective="devices", constraints=[unity.pin("batch['x']", (2,))])
    assert two.inspect.machine.devices == 2


@pytest.mark.parametrize(
    "constraint",
    [
        unity.pin("params['w']", P(None, ("node", "d0"), 4, P.UNCONSTRAINED)),
        unity.only("samples", across="node"),
        unity.forbid(("batch['x']", 1), across="device"),
        unity.without_rules("a", "b-*"),
        OperatorPin("dot_general at up", sharding_spec(P("node", 4)), ("float32[16,64]",)),
    ],
)
def test_json(constraint: Passed) -> None:
    record = BoundConstraints((constraint,)).record
    assert typed(parsed(encoded(record)), BoundRecord) == record


def test_patterns() -> None:
    known = [("args[0]['layers'][0]['w']", "p['layers'][0]['w']"), ("args[0]['layers'][11]['b']",), ("args[1]",)]
    assert matching("p['layers'][*]['w']", known) == (0,)
    assert matching("args[0]['layers'][*][*]", known) == (0, 1)
    assert matching("args[*]", known) == (2,)
    assert matching("**", known) == (0, 1, 2)
    assert matching("args[0]['layers'][1]['b']", known) == ()


def test_a_pin_whose_operators_a_plan_lacks_is_not_obeyed() -> None:
    plan = planned(scoped, *SCOPED, constraints=[unity.pin("dot_general at up", P("node", "device"))])
    bound = plan.program.family.bound
    (pin,) = bound.passed
    bound.check(plan.program.original, plan.program.pcg, plan.inspect.machine)
    renamed = replace(bound, passed=(structs.replace(pin, name="dot_general at nowhere"),))
    with pytest.raises(PlanError, match="no operator has this name"):
        renamed.check(plan.program.original, plan.program.pcg, plan.inspect.machine)
    other = replace(bound, passed=(structs.replace(pin, sharding=unity.pin("dot_general", P("device", "node")).sharding),))
    with pytest.raises(PlanError, match="dot_general at"):
        other.check(plan.program.original, plan.program.pcg, plan.inspect.machine)


def test_a_specification_that_a_plan_prints_can_be_pinned() -> None:
    eight = unity.Machine.grid(1, 8, "a100")
    pins = {"params['w1']": P(None, "d2"), "params['w2']": P("d2"), "batch['x']": P(("d0", "d1"))}
    first = planned(loss, *arguments(), machine=eight, constraints=[unity.pin(path, spec) for path, spec in pins.items()])
    assert first.mesh_shape == {"device_a": 4, "device_b": 2}
    assert first.in_specs[0]["w1"] == P(None, "device_b")
    weights, data = first.in_specs
    printed = {"params['w1']": weights["w1"], "params['w2']": weights["w2"], "batch['x']": data["x"]}
    for mesh in (first.mesh_shape, first.inspect.abstract_mesh):
        constraints = [unity.pin(path, spec, mesh=mesh) for path, spec in printed.items()]
        again = planned(loss, *arguments(), machine=eight, constraints=constraints)
        assert (again.in_specs, again.program.pcg.key) == (first.in_specs, first.program.pcg.key)
    with pytest.raises(unity.UnityError) as caught:
        planned(loss, *arguments(), machine=eight, constraints=[unity.pin("params['w1']", P(None, "device_b"))])
    assert "or the sizes of the parts that you mean, outermost first, such as mesh={'device_a': 2," in str(caught.value)


@pytest.mark.parametrize(
    ("text", "mesh"),
    [
        ("P(None, 'device_b'), mesh={'device_a': 4, 'device_b': 2}", {"node": 2, "device_a": 4, "device_b": 2}),
        ("P(None, 'device_b'), mesh={'device_a': 4, 'device_b': 2}", {"device_a": 4, "device_b": 2, "device_c": 3}),
        ("P(None, 'device_b')", None),
    ],
)
def test_a_pin_with_a_mesh_prints_as_one_that_means_the_same(text: str, mesh: dict[str, int] | None) -> None:
    pin = unity.pin("x", P(None, "device_b"), mesh=mesh)
    assert str(pin) == f'unity.pin("x", {text})'
    assert eval(str(pin), {"unity": unity, "P": P}) == pin


def test_a_mesh_goes_with_a_specification_inside_of_a_function() -> None:
    eight, mesh = unity.Machine.grid(1, 8, "a100"), {"device_a": 4, "device_b": 2}

    def fn(w, x):
        return (unity.constrain(x @ w, P("device_a", "device_b"), mesh=mesh) ** 2).mean()

    args = [jax.ShapeDtypeStruct((64, 64), "float32")] * 2
    (mark,) = planned(fn, *args, machine=eight).program.family.bound.marked
    assert str(mark.sharding) == f"P('device_a', 'device_b'), mesh={mesh}"
    with pytest.raises(unity.UnityError, match="no axes of this machine cut 'device' from 1 into 4 slices: it has "):
        planned(fn, *args, machine=unity.Machine.grid(1, 3, "a100"))


def test_axes_of_the_users_mesh_may_be_named_like_parts_of_a_level() -> None:
    mesh = {"x_a": 2, "x_b": 4}
    names = names_of(unity.Machine.grid(1, 8, "a100").with_mesh(mesh))
    assert unity.pin("x", P("x_a", "x_b"), mesh=mesh).sharding.slices(2, names) == (frozenset({0}), frozenset({1}))
