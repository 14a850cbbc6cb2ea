"""Strategies that people choose by hand: which tensors they split and how, and which collectives that takes."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from ci_cases import fewer
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import MODELS

from benchmarks.models import tiny
from unity.base.errors import InfeasibleError
from unity.baselines.by_hand import megatron_space
from unity.baselines.restricted import Structure
from unity.baselines.tensoropt import TensorOpt
from unity.baselines.tofu import mesh_frontier, mesh_space
from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture
from unity.pcg.parallel.check import check
from unity.pcg.parallel.parallelize import parallelize
from unity.pcg.parallel.traffic import traffic
from unity.search.cost.cost import Training
from unity.search.published import Asked, algorithm
from unity.search.session import Search

ROOMY = Asked(math.inf)
EVERY = ("data-parallel", "fsdp", "model-parallel", "megatron", "tofu", "mesh-tensorflow", "tensoropt")
MACHINE = Machine.grid(2, 2, "v100")


def search_of(loss, params, batch, machine=MACHINE) -> Search:
    captured = capture(loss, params, batch)
    return Search(captured.graph, captured.differentiated, machine, Training())


def small(name: str, machine=MACHINE) -> Search:
    model = MODELS[name]()
    return search_of(model.loss, model.params, model.batch, machine)


def collectives(search: Search, candidate) -> Counter:
    """How often each collective runs in a step, by kind and direction; inside of composites too."""
    graph = parallelize(search.graph, candidate.assignment)
    check(graph)
    found = Counter()
    for c in traffic(graph, search.differentiated):
        found[c.kind, c.direction] += c.count
    return found


def stored(search: Search, candidate) -> tuple[list, list]:
    """The types in which weights lie, and other arguments."""
    graph = parallelize(search.graph, candidate.assignment)
    types = [node.types[0] for node in graph.inputs]
    weights = [t for k, t in enumerate(types) if k in search.differentiated]
    return weights, [t for k, t in enumerate(types) if k not in search.differentiated]


def f(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def perceptron(params, x):
    for w in params:
        x = jax.nn.relu(x @ w)
    return jnp.mean(x**2)


DENSE = perceptron, [f(1024, 1024), f(1024, 512), f(512, 512)], f(4096, 1024)


def test_data_parallelism_stores_weights_whole_and_reduces_their_gradients_alone() -> None:
    search = search_of(*DENSE)
    candidate = algorithm("data-parallel")(search, ROOMY)
    weights, data = stored(search, candidate)
    assert all(state.kind == "U" for t in weights for state in t)
    assert all(state.kind == "P" and state.dim == 0 for t in data for state in t)
    found = collectives(search, candidate)
    assert set(found) <= {("all-reduce", "backward"), ("all-reduce", "forward")}
    assert found["all-reduce", "backward"] == len(weights)
    assert found["all-reduce", "forward"] == 1  # the mean of the loss


@st.composite
def micro_batches(draw: st.DrawFn) -> tuple[Callable[..., Any], jax.ShapeDtypeStruct, int]:
    """A loss over micro-batches in loops: the function, the argument, and the argument's dimension of samples."""
    loops, remat, carried = draw(st.integers(0, 2)), draw(st.booleans()), draw(st.booleans())
    sizes = [*(2, 3)[:loops], 16, 8]  # steps, samples, features
    order = draw(st.permutations(range(len(sizes) - 1)))  # where the argument has them, features last
    joined = loops > 0 and draw(st.booleans())  # the samples of all steps are one dimension, which the function cuts

    def one(w: Any, x: Any) -> Any:
        return (jnp.tanh(x @ w) ** 2).mean()

    def looped(w: Any, x: Any, depth: int) -> Any:
        if not depth:
            return (jax.checkpoint(one) if remat else one)(w, x)
        if carried:
            return jax.lax.scan(lambda total, part: (total + looped(w, part, depth - 1), None), 0.0, x)[0]
        return jax.lax.map(lambda part: looped(w, part, depth - 1), x).sum()

    def loss(w: Any, x: Any) -> Any:
        stacked = x.reshape(sizes) if joined else jnp.transpose(x, (*map(order.index, range(len(order))), len(order)))
        return looped(w, stacked, loops)

    shape = (math.prod(sizes[:-1]), sizes[-1]) if joined else (*(sizes[k] for k in order), sizes[-1])
    return loss, f(*shape), 0 if joined else order.index(loops)


@settings(max_examples=fewer(10))
@given(micro_batches())
def test_the_samples_of_micro_batches_are_split_and_not_their_steps(
    case: tuple[Callable[..., Any], jax.ShapeDtypeStruct, int],
) -> None:
    loss, x, samples = case
    search = search_of(loss, f(8, 8), x)
    candidate = algorithm("data-parallel")(search, ROOMY)
    _, (given_,) = stored(search, candidate)
    assert {(s.kind, s.dim) for s in given_} == {("P", samples)}
    graph = parallelize(search.graph, candidate.assignment)
    (product,) = (node for node, _ in graph.walk() if node.kind == "dot_general")
    assert {(s.kind, s.dim) for s in product.types[0]} == {("P", 0)}


def test_fsdp_stores_weights_in_pieces_gathers_them_and_scatters_their_gradients() -> None:
    search = search_of(*DENSE)
    candidate = algorithm("fsdp")(search, ROOMY)
    weights, _ = stored(search, candidate)
    assert all(state.kind == "P" for t in weights for state in t)
    found = collectives(search, candidate)
    assert found["all-gather", "forward"] == len(weights)
    assert found["reduce-scatter", "backward"] == len(weights)
    assert candidate.memory < algorithm("data-parallel")(search, ROOMY).memory


def test_model_parallelism_splits_every_weight_among_all_devices() -> None:
    search = search_of(*DENSE)
    weights, _ = stored(search, algorithm("model-parallel")(search, ROOMY))
    assert all(state.kind == "P" for t in weights for state in t)


def test_one_weird_trick_is_data_parallel_in_convolutions_and_splits_dense_weights() -> None:
    model = tiny("vgg16", batch=16)
    search = search_of(model.loss, model.params, model.batch)
    candidate = algorithm("one-weird-trick")(search, ROOMY)
    graph = parallelize(search.graph, candidate.assignment)
    for k, node in enumerate(graph.inputs):
        if k in search.differentiated and node.tensors[0].ndim == 4:
            assert all(state.kind == "U" for state in node.types[0])
        if k in search.differentiated and node.tensors[0].ndim == 2 and node.tensors[0].shape[1] > 10:
            assert all(state.kind == "P" for state in node.types[0])
    with pytest.raises(InfeasibleError, match="no convolution"):
        algorithm("one-weird-trick")(search_of(*DENSE), ROOMY)


@pytest.mark.parametrize("layers", [1, 2])
def test_megatron_reduces_twice_a_layer_and_direction(layers: int) -> None:
    """Cotangents are added up where it takes least: behind a block, or before the product, behind the norm. Those of the first
    norm are added up as the tables' gradients, which are smaller. Those of the last block's result are the head's, which takes
    slices of it: where the result is unused rather than replicated, an all-gather is enough."""
    model = MODELS["gpt"](layers=layers, d=64, b=8, s=32)
    ours = [search_of(model.loss, model.params, model.batch, Machine.grid(1, n, "v100")) for n in (2, 4)]
    for search in ours:
        structure = Structure(search)
        space = megatron_space(structure, 0)
        point = space.at(0.0)
        assert point is not None
        candidate = search.candidate(space.assembled, point)
        graph = parallelize(search.graph, candidate.assignment)
        check(graph)
        wide = [c for c in traffic(graph, search.differentiated) if c.elements == 8 * 32 * 64]
        inside = [c for c in wide if c.kind == "all-reduce" and "(gpt" not in c.node.source]
        head = [c for c in wide if c.kind == "all-gather" and c.direction == "backward"]
        forward = sum(c.count for c in inside if c.direction == "forward")
        backward = sum(c.count for c in [*inside, *head] if c.direction == "backward")
        assert forward == backward == 2 * layers
        assert len(head) < 2
        assert not any(c.kind in ("reduce-scatter", "all-to-all") for c in traffic(graph, search.differentiated))


def test_experts_split_tables_alone() -> None:
    model = tiny("dlrm", tables=(64, 32, 128), batch=64)
    search = search_of(model.loss, model.params, model.batch)
    candidate = algorithm("expert")(search, ROOMY)
    graph = parallelize(search.graph, candidate.assignment)
    tables = {(64, 8), (32, 8), (128, 8)}
    for k, node in enumerate(graph.inputs):
        if k in search.differentiated:
            wanted = "P" if node.tensors[0].shape in tables else "U"
            assert all(state.kind == wanted for state in node.types[0])


def test_expert_strategies_that_cannot_be_expressed_are_refused() -> None:
    with pytest.raises(InfeasibleError, match="every layer a device of its own"):
        algorithm("expert")(small("lstm"), ROOMY)
    with pytest.raises(InfeasibleError, match="no strategy of experts"):
        algorithm("expert")(search_of(*DENSE), ROOMY)


def test_a_restriction_that_leaves_an_operator_no_value_names_it_and_its_line() -> None:
    structure = Structure(search_of(perceptron, [f(8, 8)], f(3, 8), Machine.grid(1, 2, "v100")))
    with pytest.raises(InfeasibleError, match=r"test_published_baselines.py:\d+.*: dot_general of float32\[3,8\]: no way"):
        mesh_space(structure, 1)  # three samples on two devices
    assert mesh_space(structure, 0).at(0.0) is not None


@pytest.mark.parametrize("name", ["gpt", "lstm", "cnn"])
def test_everything_is_well_typed_and_unity_is_no_slower(name: str) -> None:
    search = small(name)
    for kind in EVERY:
        candidate = algorithm(kind)(search, ROOMY)
        check(parallelize(search.graph, candidate.assignment))
        assert search.fastest.time <= candidate.time * (1 + 1e-9), kind


def test_tofu_splits_every_weight_and_needs_the_least_memory_of_the_single_strategies() -> None:
    search = search_of(*DENSE)
    candidate = algorithm("tofu")(search, ROOMY)
    weights, data = stored(search, candidate)
    assert all(state.kind == "P" for t in (*weights, *data) for state in t)
    others = {kind: algorithm(kind)(search, ROOMY).memory for kind in ("data-parallel", "fsdp", "mesh-tensorflow")}
    assert candidate.memory <= min(others.values())


@pytest.mark.parametrize("name", ["gpt", "cnn"])
def test_mesh_tensorflow_is_never_below_tensoropt(name: str) -> None:
    search = small(name, Machine.grid(1, 4, "v100"))
    own = TensorOpt(search, most=None, cumulative=None)
    found = [(p.time, p.memory) for _, frontier in mesh_frontier(search) for p in frontier.points]
    assert found
    for time, memory in found:
        assert any(p.time <= time * (1 + 1e-9) and p.memory <= memory * (1 + 1e-9) for p in own.tracked.points)


def test_mesh_tensorflow_splits_a_dimension_everywhere_or_nowhere() -> None:
    search = search_of(*DENSE)
    structure = Structure(search)
    for space, frontier in mesh_frontier(search):
        assembled = space.assembled
        for point in frontier.points:
            split: dict[int, set[bool]] = {}
            for s, value in enumerate(point.values[: len(assembled.domains)]):
                site = assembled.opened.sites[s]
                if site.kind == "input" and not site.weight:  # loaded by samples, whatever the layout
                    continue
                rank = {c.states: r for c, r in zip(structure.choices[s], structure.rank[s], strict=True)}
                taken = [assembled.domains[s].choices[i] for i in assembled.domains[s].picks[value]]
                for choice in structure.choices[s]:
                    if choice.name not in ("unused", "replicated") and all(o.kind != "S" for o in choice.operands):
                        split.setdefault(rank[choice.states], set()).add(any(rank[t.states] == rank[choice.states] for t in taken))
            assert all(len(found) == 1 for found in split.values())


def test_features_are_no_samples_where_a_loop_takes_one_sample_at_a_time() -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(jax.lax.map(lambda row: jnp.tanh(row @ w), x) ** 2)

    search = search_of(loss, f(128, 64), f(64, 128))
    _, (samples,) = stored(search, algorithm("data-parallel")(search, ROOMY))
    assert {(s.kind, s.dim) for s in samples} == {("P", 0)}
