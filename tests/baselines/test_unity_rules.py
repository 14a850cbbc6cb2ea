"""Parallelization by substitution alone: what it must find, what every step keeps, and what it promises of budgets."""

import io
import itertools
from collections import Counter
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models
from ci_cases import fewer
from hypothesis import given, settings
from hypothesis import strategies as st

import unity
from unity.base.errors import InfeasibleError, ParallelTypeError
from unity.machine.hardware import Device
from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture
from unity.pcg.parallel.check import check
from unity.pcg.parallel.parallelize import parallelize
from unity.pcg.parallel.serial_view import serial_graph
from unity.pcg.parallel.traffic import traffic
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, partitioned
from unity.search.cost.cost import Training
from unity.search.cost.prediction import predict
from unity.search.joint.joint import Budget
from unity.search.substitution.backtracking import Spent, canonical, hashes
from unity.search.substitution.levels import Reached, parts, rounds
from unity.search.substitution.space import GraphSpace
from unity.search.substitution.substitutions import after, steps
from unity.search.substitution.trace import simplified

# So slow that two devices are worth it at small sizes; a message takes some time, as it does everywhere.
SLOW = Device("slow", {"float32": 1e9, "float64": 1e9}, 10**9, 1e12, 1.0, 1e-6)
TWO = Machine.grid(1, 2, SLOW, intra=(1e9, 1e-5), inter=(1e9, 1e-5))
FOUR = Machine.grid(2, 2, SLOW, intra=(1e9, 1e-5), inter=(2e8, 1e-5))
EIGHT = Machine.grid(2, 4, SLOW, intra=(1e9, 1e-5), inter=(2e8, 1e-5))

pytestmark = pytest.mark.usefixtures("own_cache")


def f(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def plan(fn, *args, machine=TWO, search="unity-rules", **options):
    return unity.optimize(fn, *args, machine=machine, search=search, progress=False, **options)


def collectives(found):
    return Counter((c.kind, c.direction) for c in traffic(found.program.pcg, found.program.family.captured.differentiated))


def stored(found):
    """The state of every argument along the first axis, by the last part of its name."""
    return {n.name: n.types[0][0] for n in found.program.pcg.inputs}


def transformer_layer(p, x):
    """Unity figure 10: attention, heads apart, and an MLP, each with what it adds to."""
    y = small_models.norm(x, p["g1"], p["b1"])
    q, k, v = (jnp.einsum("bsd,dhe->bhse", y, p[n]) for n in "qkv")
    attended = jnp.einsum("bhst,bhte->bhse", jax.nn.softmax(jnp.einsum("bhse,bhte->bhst", q, k)), v)
    x = x + jnp.einsum("bhse,hed->bsd", attended, p["o"])
    y = small_models.norm(x, p["g2"], p["b2"])
    return jnp.mean((x + jax.nn.gelu(y @ p["up"]) @ p["down"]) ** 2)


def layer_args(d=64, h=4, s=17):
    heads = {n: f(d, h, d // h) for n in "qkv"} | {"o": f(h, d // h, d)}
    return {**heads, "up": f(d, 4 * d), "down": f(4 * d, d), **{n: f(d) for n in ("g1", "b1", "g2", "b2")}}, f(1, s, d)


def test_unity_figure_10():
    """Megatron's strategy, from the serial graph by substitutions alone: one sample, so no data parallelism."""
    found = plan(transformer_layer, *layer_args())
    assert {k: v for k, v in collectives(found).items() if k[1] == "forward"} == {("all-reduce", "forward"): 2}
    where = stored(found)
    assert all(where[f"args[0]['{n}']"] == partitioned(1) for n in "qkv"), "heads"
    assert where["args[0]['o']"] == partitioned(0)
    assert (where["args[0]['up']"], where["args[0]['down']"]) == (partitioned(1), partitioned(0)), "hidden"
    assert found.time == pytest.approx(plan(transformer_layer, *layer_args(), search="captured").time)


def test_unity_figures_1_and_2():
    """The MLP of figure 1 on 2 devices: reduction parallelism, and no more than the 131,072 elements of the paper's plan."""

    def mlp(params, x):
        return jnp.sum(jax.nn.relu(x @ params["1"]) @ params["2"])

    free = Machine.grid(1, 2, Device("slow", {"float32": 1e9}, 10**9, 1e12, 1.0, 0.0), intra=(1e9, 0.0), inter=(1e9, 0.0))
    found = plan(mlp, {"1": f(784, 512), "2": f(512, 10)}, f(64, 784), machine=free)
    where = stored(found)
    assert where["args[0]['2']"] == partitioned(0), "the contracted dimension"
    rounds_of_rings = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}
    sent = sum(
        rounds_of_rings[c.kind] * c.elements * c.count
        for c in traffic(found.program.pcg, found.program.family.captured.differentiated)
    )
    assert 0 < sent <= 131_072


def test_data_parallelism_where_there_are_many_samples():
    def mlp(params, x):
        for w in params:
            x = jax.nn.relu(x @ w)
        return jnp.mean(x**2)

    found = plan(mlp, [f(16, 16)] * 3, f(8192, 16), machine=EIGHT)
    samples = next(n for n in found.program.pcg.inputs if n.tensors[0].shape == (8192, 16))
    assert set(samples.types[0]) == {partitioned(0)}
    assert all(s.kind == "U" for n in found.program.pcg.inputs if n is not samples for s in n.types[0])
    # one for each weight's gradient, and the loss
    assert collectives(found) == {("all-reduce", "backward"): 3, ("all-reduce", "forward"): 1}
    assert found.time == pytest.approx(plan(mlp, [f(16, 16)] * 3, f(8192, 16), machine=EIGHT, search="captured").time)


@pytest.mark.parametrize("name", sorted(small_models.MODELS))
def test_plans_compute_the_same(name):
    """Values and gradients, on eight devices."""
    with jax.enable_x64(True):
        model = small_models.MODELS[name]()
        found = plan(model.loss, model.params, model.batch, machine=EIGHT, budget=5000)
        assert found.program.applications
        found.program.check_derivation()
        params, batch = small_models.arrays(model.params), small_models.arrays(model.batch)
        expected = jax.jit(jax.value_and_grad(model.loss))(params, batch)
        got = jax.value_and_grad(found)(*found.shard(params, batch))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("machine", [TWO, FOUR], ids=["2", "4"])
@pytest.mark.parametrize("name", ["gpt", "lstm"])
def test_larger_budgets_are_never_worse_and_no_budget_beats_the_exact_search(name, machine):
    with jax.enable_x64(True):
        model = small_models.MODELS[name]()
        args = (model.loss, model.params, model.batch)
        exact = plan(*args, machine=machine, search="captured").time
        found = [plan(*args, machine=machine, budget=budget) for budget in (0, 30, 300, 1000, 3000)]
    times = [p.time for p in found]
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in itertools.pairwise(times))
    assert times[-1] < times[0], "it found something"
    assert min(times) >= exact * (1 - 1e-9)
    assert found[0].program.applications == ()
    assert not collectives(found[0])
    for p in found:  # more, where two operators change a value in the same way: the graph has that once
        assert p.time >= predict(p.program.pcg, machine, p.program.family.captured.differentiated).time * (1 - 1e-9)


def test_it_is_deterministic(monkeypatch, tmp_path):
    found = []
    for folder in "ab":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / folder))
        found.append(plan(transformer_layer, *layer_args(), machine=FOUR, budget=2000))
    assert found[0].program.applications == found[1].program.applications
    assert found[0].program.pcg.key == found[1].program.pcg.key


@given(name=st.sampled_from(sorted(small_models.MODELS)), data=st.data())
@settings(max_examples=fewer(20))
def test_every_substitution_leads_to_a_well_typed_graph_that_computes_the_same(name, data):
    """And what it changes of the price is what the two graphs differ by."""
    captured, assembled = small_models.named(name)
    space = GraphSpace.of(captured.graph, captured.differentiated, assembled.machine, Training())
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    graph = space.serial
    for _ in range(data.draw(st.integers(1, 12))):
        part = rng.permutation(len(space.sites))[:6].tolist()
        possible = [(s, c) for s, c in steps(space, graph, part, space.degrees) if np.isfinite(space.difference(graph, c))]
        if possible:
            step, changed = possible[rng.integers(len(possible))]
            new, difference = after(space, graph, step), space.difference(graph, changed)
            assert space.price(new) == pytest.approx(space.price(graph) + difference, rel=1e-9)
            graph = new
    only, point = space.point(graph)
    assert point.time == pytest.approx(space.price(graph), rel=1e-9)
    parallel = parallelize(captured.graph, only.assignment(point))
    check(parallel)
    assert serial_graph(parallel).key == captured.graph.key


@given(name=st.sampled_from(sorted(small_models.MODELS)), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=fewer(10))
def test_no_substitution_that_types_allow_is_priced_as_impossible(name, seed):
    """Every choice of every operator, put into a serial graph, is a substitution; or the graph would not be well-typed.

    What the search refuses beside that (`search.space.contributions`) is left out.
    """
    captured, assembled = small_models.named(name)
    with patch("unity.search.space.opening.refuse_cancelling_contributions"):
        space = GraphSpace.of(captured.graph, captured.differentiated, assembled.machine, Training())
    rng = np.random.default_rng(seed)
    s = int(rng.integers(len(space.sites)))
    for step, changed in steps(space, space.serial, [s], space.degrees):
        if not np.isfinite(space.difference(space.serial, changed)):
            only, point = space.point(after(space, space.serial, step))
            with pytest.raises(ParallelTypeError):
                check(parallelize(captured.graph, only.assignment(point)))


def test_equal_layers_are_searched_once():
    """Twelve layers take as many candidates as six, and each as much less time."""
    priced, gained = [], []
    for layers in (6, 12):
        model = small_models.gpt(layers)
        captured = capture(model.loss, model.params, model.batch)
        space, spent = GraphSpace.of(captured.graph, captured.differentiated, TWO, Training()), Spent(Budget(None))
        first = Reached(space.serial, space.price(space.serial))
        every = parts(space)
        assert sorted(s for part in every for s in part) == list(range(len(space.sites)))
        *_, found = rounds(space, first, every, space.degrees, 8, spent)
        priced.append(spent.candidates)
        gained.append(first.price - found.price)
    assert priced[1] <= 1.2 * priced[0]
    assert gained[1] > 1.5 * gained[0]


def test_interchangeable_axes_are_one():
    """Graphs that differ only in which of two equal axes is which have one name."""
    captured, _ = small_models.named("gpt")
    space = GraphSpace.of(captured.graph, captured.differentiated, small_models.MACHINE, Training())
    first, second = space.groups[-1][:2]
    found = [(s, c) for s, c in steps(space, space.serial, range(len(space.sites)), [(first,), (second,)])]
    names = {}
    for step, changed in found:
        if np.isfinite(space.difference(space.serial, changed)):
            names.setdefault(canonical(space, hashes(space, after(space, space.serial, step))), []).append(step)
    assert all([s.axes for s in same] == [(first,), (second,)] for same in names.values())
    assert all(len({(s.site, s.choice) for s in same}) == 1 for same in names.values())


def test_a_plan_tells_its_rules_also_after_it_was_saved(tmp_path):
    args = layer_args()
    found = plan(transformer_layer, *args)
    lines = [a.rule for a in found.program.applications]
    assert "dot_general(x, y) = reduce(a, dot_general(partition(-1, a, x), partition(-2, a, y)))" in lines
    assert "partition(-1, a, combine(-1, a, x)) = x" in lines
    assert "partition(-1, a, x) = x, an argument that is stored so" in lines
    for p in (found, plan(transformer_layer, *args)):  # found now, and read from the cache
        assert [one.time for one in p.frontier] == [found.time], "what the search found, and nothing else"
    found.files.save(tmp_path / "plan.json")
    again = unity.load(tmp_path / "plan.json", transformer_layer, *args)
    assert again.program.applications == found.program.applications
    shown = io.StringIO()
    again.explain(file=shown)
    assert "parallelized by rules, from the serial graph" in shown.getvalue()
    assert "an argument that is stored so, at args[0]['up'], a = device" in shown.getvalue()


def test_neighbours_on_an_edge_are_fused():
    rows, columns = partitioned(0), partitioned(1)
    assert simplified(rows, rows, 2) == "partition(-2, a, combine(-2, a, x)) = x"
    assert simplified(rows, columns, 2) == "partition(-1, a, combine(-2, a, x)) = combine_partition(-2, -1, a, x)"
    assert simplified(rows, REPLICATED, 2) == "replicate(a, combine(-2, a, x)) = combine_replicate(-2, a, x)"
    assert simplified(PARTIAL, columns, 2) == "partition(-1, a, reduce(a, x)) = reduce_partition(-1, a, x)"
    assert simplified(PARTIAL, REPLICATED, 2) == "", "an all-reduce, and nothing more"


def test_memory_limits_are_met():
    """A limit that the fastest does not keep to is kept, or said to be too small."""
    args = {"1": f(256, 256), "2": f(256, 256)}, f(1024, 256)

    def mlp(params, x):
        return jnp.mean((jax.nn.relu(x @ params["1"]) @ params["2"]) ** 2)

    fastest = plan(mlp, *args, budget=2000)
    leanest = plan(mlp, *args, budget=2000, objective="memory")
    assert leanest.memory < fastest.memory
    between = (leanest.memory + fastest.memory) / 2
    assert plan(mlp, *args, budget=2000, memory_limit=between).memory <= between
    with pytest.raises(InfeasibleError, match="the leanest plan needs"):
        plan(mlp, *args, budget=2000, memory_limit=leanest.memory / 4)


@pytest.mark.parametrize("machine", [Machine.grid(1, 1, "v100"), TWO], ids=["1", "2"])
def test_a_graph_without_parallelism_stays_serial(machine):
    """One device; or a function without an operator."""
    small = f(8, 8), f(8, 8)
    for fn in (lambda p, x: jnp.mean(x @ p), lambda p, x: x):
        found = plan(fn, *small, machine=machine)
        assert found.time == pytest.approx(plan(fn, *small, machine=machine, search="captured").time)
        assert machine is TWO or found.program.applications == ()
