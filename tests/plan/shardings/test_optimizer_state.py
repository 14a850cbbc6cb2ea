"""The option `optimizer=`: what a plan counts of an optimizer's state is what its shardings place on a device."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import unity
from unity.pcg.capture.capture import capture
from unity.pcg.parallel.parallelize import parallelize
from unity.plan.shardings.optimizer_state import state_sizes
from unity.search.cost.cost import Training
from unity.search.cost.state_sizes import StateSizes
from unity.search.memory.memory import predict_memory
from unity.search.session import Search
from unity.search.space.live_buffers import SLOTS

MACHINE = unity.Machine.grid(1, 8, "a100")
WIDTH = 256


def f(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


WEIGHTS = {"layers": [f(WIDTH, WIDTH)] * 3, "scale": f(WIDTH, dtype="float32")}
BATCH = f(4096, WIDTH)
MATRIX, VECTOR = 2 * WIDTH * WIDTH, 4 * WIDTH  # bytes


def loss(weights: Any, x: Any) -> Any:
    for w in weights["layers"]:
        x = jax.nn.gelu(x @ w)
    return jnp.mean((x * weights["scale"]) ** 2)


def planned(optimizer: Any = None, **options: Any) -> unity.Plan:
    return unity.optimize(loss, WEIGHTS, BATCH, machine=MACHINE, optimizer=optimizer, budget=0, progress=False, **options)


def in_float32(weights: Any) -> Any:
    return {"average": jax.tree.map(lambda w: f(*w.shape, dtype="float32"), weights), "step": f(dtype="int32")}


OPTIMIZERS = {
    "sgd": optax.sgd(1e-3),
    "adam": optax.adam(1e-3),
    "adafactor": optax.adafactor(1e-3),
    "matrices and vectors": optax.multi_transform(
        {"one": optax.sgd(1e-3, momentum=0.9), "two": optax.adam(1e-3)}, {"layers": ["one"] * 3, "scale": "two"}
    ),
    "its function": optax.adam(1e-3).init,
    "a function of shapes": in_float32,
    "masters": unity.OptimizerState(2, master="float32"),
    "wide moments": unity.OptimizerState(2, dtype="float32"),
}


def structure(optimizer: Any) -> Any:
    if optimizer is in_float32 or isinstance(optimizer, unity.OptimizerState):
        return optimizer(WEIGHTS)
    return jax.eval_shape(getattr(optimizer, "init", optimizer), WEIGHTS)


def placed_bytes(plan: unity.Plan, state: Any) -> int:
    """Bytes of a state on one device, as the plan places it."""
    placed = zip(jax.tree.leaves(state), jax.tree.leaves(plan.shard.shardings(state)), strict=True)
    return sum(math.prod(s.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf, s in placed)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("search", ["fsdp", "data-parallel"])
def test_a_plan_counts_what_its_shardings_place_on_a_device(name: str, search: str) -> None:
    plan = planned(OPTIMIZERS[name], search=search)
    state = structure(OPTIMIZERS[name])
    nbytes = placed_bytes(plan, state)
    timeline = plan.inspect.memory_timeline()
    assert timeline.slots == nbytes
    assert plan.memory - planned(search=search, optimizer_slots=0).memory == nbytes
    for memory in plan.inspect.simulate().memory.values():
        assert memory.by_reason.get(SLOTS, np.zeros(1)).max() == nbytes


@pytest.mark.parametrize("options", [{"micro_batches": 4}, {"pipeline": unity.PipelineShape(2, 4)}])
def test_a_transformed_program_counts_the_state_of_the_same_weights(options: dict[str, Any]) -> None:
    def scanned(weights: Any, x: Any) -> Any:
        return jnp.mean((jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights["layers"])[0] * weights["scale"]) ** 2)

    weights = {"layers": f(4, WIDTH, WIDTH), "scale": f(WIDTH, dtype="float32")}
    plan = unity.optimize(
        scanned, weights, BATCH, machine=MACHINE, optimizer=OPTIMIZERS["masters"], budget=0, progress=False, **options
    )
    state = unity.OptimizerState(2, master="float32")(weights)
    assert plan.inspect.memory_timeline().slots == placed_bytes(plan, state)


def test_masters_are_of_narrow_weights_alone() -> None:
    plan = planned(OPTIMIZERS["masters"], search="data-parallel")
    matrices, vector = 3 * (3 * 2 * MATRIX), 2 * VECTOR  # a master and two moments; two moments
    assert plan.inspect.memory_timeline().slots == matrices + vector


def test_a_limit_between_narrow_and_wide_state_is_met_by_the_narrow_alone() -> None:
    plain: dict[str, Any] = {"search": "captured", "recompute": False, "pipelines": False, "branches": False}
    narrow = planned(objective="memory", **plain)
    assert planned(memory_limit=narrow.memory, **plain).memory <= narrow.memory
    with pytest.raises(unity.InfeasibleError, match="the leanest plan needs"):
        planned(OPTIMIZERS["masters"], memory_limit=narrow.memory, **plain)


UNLIKE = StateSizes(2, (("args[0]['layers'][2]", 7), ("args[0]['scale']", 0)), 1000)


@pytest.mark.parametrize("weight", [0.0, math.inf])
def test_the_search_counts_the_state_of_every_weight(weight: float) -> None:
    captured = capture(loss, WEIGHTS, BATCH)
    search = Search(captured.graph, captured.differentiated, MACHINE, Training(True, UNLIKE))
    (point,) = search.minimizer.at([weight])
    graph = parallelize(captured.graph, search.assembled.assignment(point))
    memory = predict_memory(graph, captured.differentiated, search.training)
    assert point.memory == pytest.approx(memory.additive)
    of_weights = [h.nbytes for h in memory.held if h.why == SLOTS]
    assert of_weights[-1] == 1000  # on every device, which is not of the sum that the search minimizes
    assert search.least_memory.total <= memory.total


def test_of_equal_weights_the_one_with_more_state_is_divided_under_a_limit() -> None:
    def heavy_last(weights: Any) -> Any:
        return [{"layers": [None, None, weights["layers"][2]]}] * 16

    whole = planned(heavy_last, search="data-parallel")
    # To divide both others and to keep no inner values would save less.
    plan = planned(heavy_last, memory_limit=whole.memory - 12 * MATRIX)
    *others, last = plan.in_specs[0]["layers"]
    assert others == [jax.sharding.PartitionSpec()] * 2
    assert last != jax.sharding.PartitionSpec()


def test_state_belongs_to_the_weights_that_gradients_are_taken_of() -> None:
    args = f(8, 8), f(4, 8), f(8, dtype="float32")
    for argnums in ((0, 2), (2, 0), (-1, 0)):
        captured = capture(lambda a, x, b: jnp.mean((x @ a + b) ** 2), *args, argnums=argnums)
        sizes = state_sizes(optax.adam(1e-3), 2, captured, args, argnums)
        assert sizes == StateSizes(2, (), 4)
        masters = state_sizes(unity.OptimizerState(0, master="float32"), 2, captured, args, argnums)
        assert masters == StateSizes(2, (("args[2]", 0),), 0)


def test_a_forward_plan_has_no_state() -> None:
    assert planned(OPTIMIZERS["masters"], training=False).memory == planned(training=False).memory


def test_a_plan_file_keeps_the_sizes(tmp_path: Any) -> None:
    plan = planned(OPTIMIZERS["adafactor"])
    plan.files.save(tmp_path / "plan.json")
    loaded = unity.load(tmp_path / "plan.json", loss, WEIGHTS, BATCH)
    assert loaded.program.family.search.training == plan.program.family.search.training
    assert loaded.inspect.memory_timeline().slots == plan.inspect.memory_timeline().slots
    assert loaded.memory == plan.memory


@pytest.mark.usefixtures("own_cache")  # the second unlike plan comes from it, and is warned of again
def test_weights_with_unlike_state_are_not_packed() -> None:
    def joined(weights: Any, x: Any) -> Any:
        return sum(jnp.mean((x @ w) ** 2) for w in weights)

    def plan(optimizer: Any) -> unity.Plan:
        weights = [f(WIDTH, WIDTH, dtype="float32")] * 3
        return unity.optimize(
            joined,
            weights,
            f(64, WIDTH, dtype="float32"),
            machine=MACHINE,
            optimizer=optimizer,
            pack=True,
            budget=20,
            progress=False,
        )

    assert plan(optax.adam(1e-3)).program.packing
    labels = ["one", "two", "two"]
    for _ in range(2):
        with pytest.warns(UserWarning, match="pack=True: no weights are joined or stored padded") as caught:
            unlike = plan(optax.multi_transform({"one": optax.sgd(1e-3), "two": optax.adam(1e-3)}, labels))
        assert [w.filename for w in caught] == [__file__]
        assert not unlike.program.packing


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": optax.adam(1e-3), "optimizer_slots": 1}, r"optimizer_slots=1 do not go together"),
        ({"optimizer": optax.sgd(1e-3), "optimizer_slots": 2}, r"optimizer_slots=2 do not go together"),
        ({"optimizer": "adam"}, r"optimizer='adam': expected an object with a method init"),
        ({"optimizer": lambda weights: weights["missing"]}, r"its state cannot be computed .*\n.*missing"),
    ],
)
def test_an_optimizer_without_a_state_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(unity.OptionError, match=message):
        planned(**options)


@pytest.mark.parametrize(
    ("description", "message"),
    [({"slots": 1.5}, "slots=1.5"), ({"dtype": "adam"}, "dtype='adam'"), ({"master": "bool"}, "master='bool'")],
)
def test_a_description_that_makes_no_sense_is_refused(description: dict[str, Any], message: str) -> None:
    with pytest.raises(unity.OptionError, match=message):
        unity.OptimizerState(**description)
