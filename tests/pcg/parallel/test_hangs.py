"""No plan has a collective inside of control flow that some of its devices do not reach."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_branches
import unlike_models
from ci_cases import by_hand, fewer
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from small_models import random_point

import unity
from unity.base.errors import InfeasibleError, ParallelTypeError
from unity.exec.compiled.divergence import argument_labels, disagreements
from unity.exec.planned_step import compiler_options
from unity.machine.machine import Machine
from unity.machine.resharding_tables import Types, stationary_pairs
from unity.pcg.capture.capture import capture
from unity.pcg.ir.graph import BRANCHES, PARALLELIZATION, PCG, PIPELINE, STAGES, TAIL, Node, Value, reserved_axes
from unity.pcg.ir.payloads import ScheduleKind
from unity.pcg.parallel.check import check
from unity.pcg.parallel.parallelize import parallelize
from unity.pcg.parallel.resharding import absolute, kind_of, stationary, steps
from unity.pcg.parallel.stages import GPIPE, ONE_F_ONE_B, TWO_BW
from unity.pcg.parallel.traffic import TRAFFIC, traffic
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, UNUSED, State, digits, partitioned
from unity.plan.plan import Plan
from unity.plan.plan_family import PlanFamily
from unity.plan.step import step_of
from unity.search.cost import assembly as assembling
from unity.search.cost.cost import Training
from unity.search.session import Search
from unity.transforms.pipelining import PipelineSource, pipelined

TREE = Machine.grid(2, 4)
SLOW = unity.Device("slow", {"float32": 1e6}, 10**9, 1e9, 0.5, 0.0)  # so that all that can be is shared
SHARING = replace(TREE, device=SLOW)
INNER = TREE.axes[1:2]  # not the first axis: those before it may take, or leave, the samples
REGIONS = (PIPELINE, TAIL, BRANCHES, STAGES)

pytestmark = pytest.mark.usefixtures("own_cache")


def language(params: Any, tokens: Any, target: Any) -> Any:
    """A language model whose loss ignores an index: the number of what counts is made before the tail."""

    def layer(h: Any, w: Any) -> Any:
        a = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", h @ w["q"], h))
        return h + jax.nn.gelu((a @ h) @ w["u"]) @ w["d"], None

    h, counted = lax.scan(jax.checkpoint(layer), params["words"][tokens], params["layers"])[0], target >= 0
    picked = jnp.take_along_axis(jax.nn.log_softmax(h @ params["out"]), jnp.maximum(target, 0)[..., None], -1)[..., 0]
    return -(picked * counted).sum() / counted.sum()


def language_arguments(batch: int = 32, length: int = 4, width: int = 8, words: int = 16) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-1]), jnp.float32)

    layers = {"q": normal(4, width, width), "u": normal(4, width, 2 * width), "d": normal(4, 2 * width, width)}
    tokens, target = (rng.integers(-1, words, (batch, length)).astype(np.int32) for _ in range(2))
    return {"layers": layers, "words": normal(words, width), "out": normal(width, words)}, np.maximum(tokens, 0), target


def normal_arguments(make: Callable[[], Any]) -> tuple[Any, ...]:
    """Arguments in single precision."""
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32), make())


def like_stages(kind: ScheduleKind) -> Plan:
    captured = capture(language, *language_arguments())
    made = pipelined(PipelineSource(captured), 0, 0, INNER, 2, kind)
    search = Search(made.after.graph, captured.differentiated, SHARING, Training())
    return Plan(PlanFamily(language, made.before, search, 0.0, transformations=(made,)), search.fastest)


def unlike_stages(model: str, kind: ScheduleKind) -> Plan:
    fn, make = unlike_models.MODELS[model]
    return unlike_models.planned(fn, normal_arguments(make), INNER, machine=SHARING, kind=kind)


def branches(case: str, pack: bool) -> Plan:
    fn, args = test_branches.CASES[case]()
    return test_branches.planned(fn, args, SHARING, INNER, pack=pack)


PLANS: dict[str, Callable[[], Plan]] = {
    **{f"layers by {kind}": lambda kind=kind: like_stages(kind) for kind in (GPIPE, ONE_F_ONE_B, TWO_BW)},
    **{f"{model} by {kind}": lambda model=model, kind=kind: unlike_stages(model, kind)
       for model, kind in (("mlp", GPIPE), ("mlp", ONE_F_ONE_B), ("vgg", GPIPE), ("translated", ONE_F_ONE_B))},
    **{f"branches of {case}": lambda case=case: branches(case, case == "towers") for case in ("towers", "summed", "inception")},
}  # fmt: skip


def regions(graph: PCG) -> Iterator[Node]:
    """The outermost operators of a parallel graph whose inside not all devices run together."""
    for node in graph.nodes:
        if node.kind in REGIONS:
            yield node
        elif node.inside is not None:
            yield from regions(node.inside)


def crossing(graph: PCG) -> list[str]:
    """The collectives inside of such operators, forward or backward, that join devices which are not there together; and changes of
    type along their axes without any."""
    found = []
    for region in regions(graph):
        assert region.inside is not None
        over = {k for k, a in enumerate(graph.axes) if a.name in reserved_axes(region)}
        inside = region.inside
        everything = [k for k, n in enumerate(inside.inputs) if n.tensors[0].floating]
        sent = [c for c in traffic(inside, everything) if over & set(c.axes) or c.kind == "collective-permute"]
        found += [f"{region.kind}: {c.kind} of {c.node.kind} along {c.axes}" for c in sent]
        for node, _ in inside.walk():
            if node.kind in PARALLELIZATION:
                (operand,) = node.operands
                places = zip(digits(operand.type, graph.axes), digits(node.types[0], graph.axes), strict=True)
                found += [f"{region.kind}: {node.kind}" for k, (a, b) in enumerate(places) if k in over and a != b]
    return found


WHOLE = ("layers by gpipe", "layers by 1f1b", "branches of towers")  # frontiers that are made in a few seconds


@pytest.mark.parametrize("name", PLANS)
def test_whatever_the_search_can_choose_reaches_all_its_devices(name: str) -> None:
    """Of both ends of a frontier, or all of it, and of plans that are drawn whatever they cost."""
    plan = PLANS[name]()
    search = plan.program.family.search
    ends = [Plan(plan.program.family, candidate) for candidate in (search.fastest, search.leanest)]
    graphs = [point.program.pcg for point in (plan.frontier if name in WHOLE else ends)]
    for seed in range(fewer(6)):
        found = search.assembled.assignment(random_point(search.assembled, np.random.default_rng(seed)))
        graphs.append(parallelize(plan.program.serial, found))
    for graph in graphs:
        assert any(regions(graph))
        check(graph)
        assert crossing(graph) == []


def without_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was searched, and believed, before there was a rule."""
    monkeypatch.setattr(assembling, "stationary_pairs", lambda before, after, *_: np.ones((len(before), len(after)), bool))
    monkeypatch.setattr("unity.plan.planned_program.check_by_names", lambda graph, names: None)


@pytest.mark.parametrize("name", [name for name in PLANS if "branches" not in name])
def test_without_the_rule_there_are_plans_that_hang_and_the_checker_refuses_just_these(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_the_rule(monkeypatch)
    plan = PLANS[name]()
    search, bad = plan.program.family.search, 0
    for seed in range(4):
        found = search.assembled.assignment(random_point(search.assembled, np.random.default_rng(seed)))
        graph = parallelize(plan.program.serial, found)
        if crossing(graph):
            bad += 1
            with pytest.raises(ParallelTypeError, match=r"inside of the \w+.*wait for the others for ever"):
                check(graph)
        else:
            check(graph)
    assert bad


def first(graph: PCG, kind: str) -> Node:
    """The first operator of a kind, wherever it is."""
    return next(node for node, _ in graph.walk() if node.kind == kind)


def with_inside(graph: PCG, node: Node, inside: PCG) -> PCG:
    """The graph with another graph inside of one of its operators, wherever that is."""
    values: dict[Value, Value] = {}
    for old in graph.nodes:
        if old is node:
            new = replace(old, inside=inside, operands=tuple(values[v] for v in old.operands))
        elif old.kind == "input":
            new = old
        else:
            within = old.inside if old.inside is None else with_inside(old.inside, node, inside)
            new = replace(old, inside=within, operands=tuple(values[v] for v in old.operands))
        values.update(zip(old.results, new.results, strict=True))
    return PCG(graph.inputs, tuple(values[v] for v in graph.outputs), graph.axes)


def changed(v: Value, type_: tuple[State, ...], axes: Any) -> Value:
    """A value, changed to another type by parallelization operators."""
    for step in steps(v.type, type_, axes):
        v = Value(Node(step.kind, (v,), (v.tensor,), types=(step.after,), source="here.py:1"))
    return v if v.type == type_ else Value(Node("view", (v,), (v.tensor,), types=(type_,)))


def there_and_back(v: Value, k: int, axes: Any) -> Value:
    """A value that changes its type along an axis, and back again."""
    other = REPLICATED if v.type[k].kind == "P" else partitioned(0)
    return changed(changed(v, (*v.type[:k], other, *v.type[k + 1 :]), axes), v.type, axes)


def applied(fn: Callable[..., Any], v: Value) -> Value:
    """An operator on a value, its result of the same type."""
    graph = capture(fn, jax.ShapeDtypeStruct(v.tensor.shape, v.tensor.dtype)).graph
    (node,) = [n for n in graph.nodes if n.kind != "input"]
    assert node.tensors == (v.tensor,)
    return Value(replace(node, operands=(v,), types=(v.type,), source="here.py:1"))


def spoiled(plan: Plan, kind: str, change: Callable[[Value, int], Value]) -> PCG:
    """A plan's graph, a value inside of its first operator of a kind changed: the first operand of samples' size, or else any."""
    region = first(plan.program.pcg, kind)
    assert region.inside is not None
    graph, inside = plan.program.pcg, region.inside
    (k,) = [k for k, a in enumerate(graph.axes) if a.name in reserved_axes(region)]
    samples = [n for n in inside.inputs if n.types[0][k].kind == "P"] or [n for n in inside.inputs if n.tensors[0].ndim == 2]
    old = Value(samples[-1])
    new = change(old, k)
    values: dict[Value, Value] = {Value(n): Value(n) for n in inside.inputs} | {old: new}
    for node in inside.nodes:
        if node.kind != "input":
            made = replace(node, operands=tuple(values[v] for v in node.operands))
            values.update(zip(node.results, made.results, strict=True))
    return with_inside(graph, region, PCG(inside.inputs, tuple(values[v] for v in inside.outputs), graph.axes))


CONSTRUCTS = {
    "a stage by GPipe": (lambda: like_stages(GPIPE), PIPELINE),
    "a stage by 1F1B": (lambda: like_stages(ONE_F_ONE_B), PIPELINE),
    "a tail": (lambda: like_stages(ONE_F_ONE_B), TAIL),
    "stages that are unlike": (lambda: unlike_stages("mlp", GPIPE), STAGES),
    "a branch": (lambda: branches("towers", False), BRANCHES),
}


@cache
def constructed(construct: str) -> tuple[Plan, str]:
    """A plan with a construct, and the kind of its operator: planned once for all that is then spoiled there."""
    make, kind = CONSTRUCTS[construct]
    return make(), kind


@pytest.mark.parametrize("construct", CONSTRUCTS)
def test_the_checker_refuses_a_change_of_type_in(construct: str) -> None:
    plan, kind = constructed(construct)
    check(plan.program.pcg)
    around = PIPELINE if kind == STAGES else kind
    with pytest.raises(ParallelTypeError, match=rf'here.py:1: .*along axis "d0" it changes .* inside of the {around}') as error:
        check(spoiled(plan, kind, lambda v, k: there_and_back(v, k, plan.program.pcg.axes)))
    assert error.value.link == "types#control-flow"
    assert "Communicate outside" in str(error.value)


@pytest.mark.parametrize("fn", [lambda x: jax.nn.softmax(x, 0), lambda x: lax.while_loop(lambda c: (c > 2).any(), jnp.sin, x)])
@pytest.mark.parametrize("construct", [name for name, (_, kind) in CONSTRUCTS.items() if kind != BRANCHES])
def test_the_checker_refuses_operators_that_reduce_or_agree_inside(construct: str, fn: Callable[..., Any]) -> None:
    """In a whole batch such an operator may be divided along the samples; not where these are on their way."""
    plan, kind = constructed(construct)
    with pytest.raises(ParallelTypeError, match=r'here.py:1: .*along axis "d0" it reduces, or agrees on a number, inside of'):
        check(spoiled(plan, kind, lambda v, k: applied(fn, v)))


@pytest.mark.parametrize("construct", CONSTRUCTS)
def test_the_checker_refuses_halos_inside(construct: str) -> None:
    """Also along another axis than the region's: a collective-permute waits for all devices."""
    plan, kind = constructed(construct)
    axes = plan.program.pcg.axes

    def smoothed(x: jax.Array) -> jax.Array:
        window = tuple(3 if d == 1 else 1 for d in range(x.ndim))
        return lax.reduce_window(x, 0.0, lax.add, window, (1,) * x.ndim, "SAME")

    def change(v: Value, k: int) -> Value:
        last = len(axes) - 1  # which comes after the region's: what it leaves moves nothing else
        here, there = ((*v.type[:last], state) for state in (REPLICATED, partitioned(1)))
        back = changed(applied(smoothed, changed(changed(v, here, axes), there, axes)), here, axes)
        return changed(back, v.type, axes)

    with pytest.raises(ParallelTypeError, match=r'here.py:1: .*along axis "d1" it exchanges halos.*inside of'):
        check(spoiled(plan, kind, change))


def test_the_checker_wants_branches_replicated_inside() -> None:
    """What is unused there would be summed up inside, backward."""
    plan, _ = constructed("a branch")
    region = first(plan.program.pcg, BRANCHES)
    assert region.inside is not None
    (k,) = [k for k, a in enumerate(plan.program.pcg.axes) if a.name in reserved_axes(region)]
    inside = region.inside
    start = next(n for n in inside.inputs if n.types[0][k] == REPLICATED)
    new = replace(start, types=((*start.types[0][:k], UNUSED, *start.types[0][k + 1 :]),))
    values: dict[Value, Value] = {Value(n): Value(new if n is start else n) for n in inside.inputs}
    values[Value(start)] = changed(Value(new), start.types[0], plan.program.pcg.axes)
    for node in inside.nodes:
        if node.kind != "input":
            made = replace(node, operands=tuple(values[v] for v in node.operands))
            values.update(zip(node.results, made.results, strict=True))
    inputs = tuple(new if n is start else n for n in inside.inputs)
    spoiled = PCG(inputs, tuple(values[v] for v in inside.outputs), plan.program.pcg.axes)
    with pytest.raises(ParallelTypeError, match="inside, but must be replicated for use along d0"):
        check(with_inside(plan.program.pcg, region, spoiled))


STATES = [UNUSED, REPLICATED, PARTIAL, *(partitioned(dim, outer) for dim in (0, 1) for outer in (1, 2, 4))]


@given(st.lists(st.tuples(*[st.sampled_from(STATES)] * 3), min_size=1, max_size=6), st.sets(st.integers(0, 2)))
def test_the_search_and_the_checker_mean_the_same(types: list[tuple[State, ...]], over: set[int]) -> None:
    found = stationary_pairs(Types.of(types), Types.of(types[::-1]), TREE.axes, sorted(over))
    for row, before in zip(found, types, strict=True):
        for good, after in zip(row, types[::-1], strict=True):
            old, new = absolute(before, TREE.axes), absolute(after, TREE.axes)
            assert good == all(stationary(old[k], new[k]) for k in over)


def test_what_stays_where_it_is_sends_nothing() -> None:
    """But constants may become replicated: they have no gradient."""
    for before, after in product(STATES, STATES):
        silent = before == after or TRAFFIC.get(kind_of(before, after)) == ("", "all-reduce")
        assert stationary(before, after) is silent


def hung(plan: Plan, gradient: bool = True) -> list[Any]:
    """The collectives of a plan's compiled step that not all devices reach."""
    compiled = step_of(plan, Training(gradient)).compile()
    return disagreements(compiled.as_text(), argument_labels(compiled))


def sent_inside(text: str, plan: Plan) -> int:
    """How many collectives a compiled program has inside of conditionals, none of which may join devices of different stages.

    Read off the text by other means than the library's: groups as lists of numbers, conditionals by JAX's names of operations.
    """
    (region, *_) = regions(plan.program.pcg)
    shape, names = tuple(a.size for a in plan.program.pcg.axes), reserved_axes(region)
    over = [k for k, a in enumerate(plan.program.pcg.axes) if a.name in names]
    count = 0
    for line in text.splitlines():
        found = re.search(r" = .*?\b(all-to-all|collective-permute|all-gather|reduce-scatter|all-reduce)(?:-start)?\(", line)
        if found is None or not re.search(r'op_name="[^"]*(?:cond/branch|branch_\d+_fun)', line):
            continue
        assert found[1] != "collective-permute", line
        count += 1
        if mesh := re.search(r"replica_groups=mesh\[[^]]*\] \{([^}]*)\}", line):
            assert not set(re.findall(r"\w+", mesh[1])) & set(names), line
            continue
        for group in groups_of(line):
            at = np.array(np.unravel_index(group, shape))[over]
            assert (at == at[:, :1]).all(), line
    return count


def groups_of(line: str) -> list[list[int]]:
    """The devices of a collective, as `{{0,1},{2,3}}` or `[2,2]<=[4]T(0)`."""
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        sizes = [int(n) for n in iota[3].split(",")]
        order = [int(n) for n in iota[4].split(",")] if iota[4] else range(len(sizes))
        return np.arange(np.prod(sizes)).reshape(sizes).transpose(order).reshape(int(iota[1]), int(iota[2])).tolist()
    listed = re.search(r"replica_groups=\{((?:\{[\d,]+\},?)+)\}", line)
    assert listed is not None, line
    return [[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", listed[1])]


COMPILED = ["layers by 2bw", "branches of summed", *by_hand("layers by 1f1b", "layers by gpipe", "mlp by 1f1b")]


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_programs_have_no_collective_that_not_all_devices_reach(name: str) -> None:
    """Of drawn plans, which communicate more than good ones."""
    plan = PLANS[name]()
    search, inside = plan.program.family.search, 0
    for seed in range(2):
        point = random_point(search.assembled, np.random.default_rng(seed))
        drawn = Plan(plan.program.family, search.candidate(search.assembled, point))
        compiled = step_of(drawn, Training()).compile()
        assert disagreements(compiled.as_text(), argument_labels(compiled)) == []
        inside += sent_inside(compiled.as_text() or "", drawn)
    assert inside


@pytest.mark.parametrize(("name", "seeds"), [*by_hand(("layers by gpipe", (0, 1))), ("layers by 1f1b", (0, 1))])
def test_the_check_says_of_compiled_programs_what_the_checker_says_of_graphs(
    name: str, seeds: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_the_rule(monkeypatch)
    plan = PLANS[name]()
    search, bad = plan.program.family.search, set[bool]()
    for seed in seeds:
        point = random_point(search.assembled, np.random.default_rng(seed))
        drawn = Plan(plan.program.family, search.candidate(search.assembled, point))
        found = drawn.check()
        bad.add(bool(crossing(drawn.program.pcg)))
        assert bool(found.disagreements) is bool(crossing(drawn.program.pcg))
        if found.disagreements:
            assert not found.agrees(1.0)
            assert "may hang, not all devices reach it" in str(found)
            assert re.search(r"test_hangs.py:\d+: [a-z-]+ among devices", str(found.disagreements[0]))
    assert True in bad


@pytest.mark.parametrize("name", ["layers by 1f1b", "branches of summed", *by_hand("layers by gpipe")])
def test_drawn_plans_run_and_compute_the_function(name: str) -> None:
    plan = PLANS[name]()
    args = test_branches.CASES["summed"]()[1] if "summed" in name else language_arguments()
    wanted = jax.jit(jax.value_and_grad(plan.program.family.fn))(*args)
    search = plan.program.family.search
    point = random_point(search.assembled, np.random.default_rng(0))
    for one in (Plan(plan.program.family, search.candidate(search.assembled, point)), Plan(plan.program.family, search.leanest)):
        sharded = one.shard(*args)
        compiled = jax.jit(jax.value_and_grad(one)).lower(*sharded).compile(compiler_options=compiler_options())
        assert disagreements(compiled.as_text() or "", argument_labels(compiled)) == []  # or the process would end
        value, gradient = compiled(*sharded)
        found = value, one.shard.unpack(gradient)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def test_default_plans_for_a_named_machine_have_no_such_collective() -> None:
    """A language model with an ignored index on 4 nodes of 2 V100s."""
    args = language_arguments(batch=64, width=64, words=512)
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    for pipeline in (None, unity.PipelineShape(2, 4)):
        plan = unity.optimize(language, *structs, machine=Machine.grid(4, 2, "v100"), pipeline=pipeline, budget=0, progress=False)
        points = plan.frontier
        for point in [*points[:: max(1, len(points) // fewer(8))], points[-1]]:
            check(point.program.pcg)
            assert crossing(point.program.pcg) == []


def test_a_saved_plan_that_hangs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = language_arguments()
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    with monkeypatch.context() as patch:
        without_the_rule(patch)
        plan = like_stages(ONE_F_ONE_B)
        search = plan.program.family.search
        drawn = (random_point(search.assembled, np.random.default_rng(seed)) for seed in range(12))
        plans = (Plan(plan.program.family, search.candidate(search.assembled, point)) for point in drawn)
        next(plan for plan in plans if crossing(plan.program.pcg)).files.save(tmp_path / "plan.json")
    with pytest.raises(unity.PlanError, match=r"plan.json .*cannot be used here.*wait for the others for ever"):
        unity.load(tmp_path / "plan.json", language, *structs)


def test_loops_whose_rows_end_apart_agree_on_nothing_inside() -> None:
    """A device takes as many steps as its own rows need; inside of it nothing may ask all rows."""

    def rows_of(x: jax.Array, limit: jax.Array, ask: bool) -> jax.Array:
        def step(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            x, going = carry
            more = lax.cond((x > 3).any(), lambda x: 1.5 + jnp.sin(x), lambda x: 1.5 + jnp.cos(x), x) if ask else 1.5 + jnp.cos(x)
            x = jnp.where(going[:, None], x + more, x)
            return x, going & (x.sum(1) < limit)

        return lax.while_loop(lambda c: c[1].any(), step, (x, x.sum(1) < limit))[0]

    def loss(ask: bool, w: jax.Array, x: jax.Array, limit: jax.Array) -> jax.Array:
        return jnp.sin(lax.stop_gradient(rows_of(x @ w, limit, ask)) @ w).sum()

    rng = np.random.default_rng(0)
    w, x, limit = (jnp.asarray(rng.normal(size=n), jnp.float32) for n in ((8, 8), (16, 8), (16,)))
    args = w, x, 30 * limit
    for ask in (False, True):
        fn = partial(loss, ask)
        plan = unity.optimize(fn, *args, machine=SHARING, pipelines=False, branches=False, budget=0, progress=False)
        (loop,) = [n for n in plan.program.pcg.nodes if n.kind == "while"]
        assert any(s.kind == "P" for s in loop.types[0]) is not ask
        assert hung(plan) == []
        for a, b in zip(jax.value_and_grad(plan)(*args), jax.value_and_grad(fn)(*args), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def test_layers_that_agree_on_something_are_no_stages() -> None:
    """In micro-batches there are no other devices to ask: the reason is given."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return lax.cond((h > 2).any(), lambda h: h + jnp.tanh(h @ w), lambda h: jnp.sin(h @ w), h), None

        return (lax.scan(layer, x, params)[0] ** 2).mean()

    args = jax.ShapeDtypeStruct((4, 8, 8), jnp.float32), jax.ShapeDtypeStruct((16, 8), jnp.float32)
    with pytest.raises(InfeasibleError, match=r"over the samples|looks at all samples"):
        unity.optimize(loss, *args, machine=TREE, pipeline=unity.PipelineShape(2, 4), budget=0, progress=False)
