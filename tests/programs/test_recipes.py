"""The sharding recipes of training code can be said as constraints, mean what their users mean, and never beat the plan."""

from __future__ import annotations

from functools import cache

import pytest
from ci_cases import by_hand as only_by_hand

import unity
from benchmarks.models import tiny
from benchmarks.models.model import Model
from benchmarks.recipes import LAYERS, Recipe, by_hand, machine_of, recipes, within
from unity.machine.hardware import Level
from unity.pcg.parallel.traffic import traffic
from unity.pcg.types.parallel_type import degrees

pytestmark = pytest.mark.usefixtures("own_cache")

ONE = unity.Machine.grid(1, 4, "h100")
PODS = unity.Machine("pods", ONE.device, (Level("pod", 2, 6e9, 8e-6), *unity.Machine.grid(2, 2, "h100").levels))
SIZES = {  # that divide by four devices, and by their pairs
    "llama3_8b": {"hidden": 32, "heads": 8, "kv_heads": 4, "vocab": 64},
    "mixtral_8x7b": {"hidden": 32, "heads": 8, "kv_heads": 4, "vocab": 64},
    "vit_large": {},
}


@cache
def small(name: str) -> Model:
    return tiny(name, scan=True, remat=True, **SIZES[name])


CASES = [("llama3_8b", PODS), *only_by_hand(("mixtral_8x7b", ONE), ("llama3_8b", ONE), ("vit_large", ONE))]


@pytest.mark.parametrize(("name", "machine"), CASES, ids=str)
def test_every_recipe_is_a_plan_and_none_beats_the_plan(name: str, machine: unity.Machine) -> None:
    """In a recipe's memory, what is found may be slower by a little: no sum says which operators need much at once."""
    model = small(name)
    plan = unity.optimize(model.loss, model.params, model.batch, machine=machine, budget=0, progress=False)
    for recipe in recipes(machine, LAYERS[name]):
        strategy = by_hand(recipe, model, LAYERS[name], machine)
        assert plan.time <= strategy.time * (1 + 1e-9), recipe
        equal = within(plan, strategy.memory)
        assert equal is not None, recipe
        assert equal.memory <= strategy.memory, recipe
        assert equal.time <= strategy.time * 1.01, recipe


def gathered(plan: unity.Plan, kind: str) -> float:
    """Bytes of the full sides of all collectives of a kind in a step."""
    return sum(c.count * c.nbytes for c in traffic(plan.program.pcg, plan.program.family.captured.differentiated) if c.kind == kind)


def test_fsdp_sends_no_more_than_every_weight_gathered_twice_and_its_gradient_scattered_once() -> None:
    sizes = {"hidden": 1024, "heads": 8, "kv_heads": 4, "feed_forward": 4096, "vocab": 8192, "seq": 512, "batch": 8}
    model = tiny("llama3_8b", scan=True, remat=True, **sizes)  # large enough that a message's bytes count, not its start
    plan = by_hand(Recipe("FSDP", data=tuple(a.name for a in ONE.axes)), model, LAYERS["llama3_8b"], ONE)
    products = {"attention": ("query", "key", "value", "out"), "mlp": ("gate", "up", "down")}
    blocks = model.params["blocks"]
    layers = sum(blocks[part][name]["weight"].size for part, names in products.items() for name in names)
    ends = model.params["token"]["table"].size + model.params["head"]["weight"].size
    twice, gradients = 2 * (2 * layers + ends), 4 * (layers + ends)  # bytes, in bfloat16 and float32; layers again in the remat
    moved = sum(gathered(plan, kind) for kind in ("all-gather", "reduce-scatter", "all-to-all"))
    assert moved <= twice + gradients
    assert 4 * layers <= gathered(plan, "reduce-scatter") <= gradients


def test_sequence_and_tensor_parallelism_change_places_twice_a_layer() -> None:
    model, axes = small("llama3_8b"), tuple(a.name for a in ONE.axes)
    plan = by_hand(Recipe("tensor, sequence", tensor=axes, sequence=True), model, LAYERS["llama3_8b"], ONE)
    split = {
        node.scope: degrees(node.types[0], ONE.axes, node.tensors[0].ndim) for node, _ in plan.program.pcg.walk() if node.tensors
    }
    assert split["residual"] == (1, 4, 1)
    assert split["gate"] == split["query"] == split["head"] == (1, 1, 4)


def test_experts_are_where_their_weights_are_and_tokens_come_to_them() -> None:
    sizes = {**SIZES["mixtral_8x7b"], "hidden": 128, "seq": 128}  # large enough that a message's bytes count, not its start
    model, axes = tiny("mixtral_8x7b", scan=True, remat=True, **sizes), tuple(a.name for a in ONE.axes)
    plan = by_hand(Recipe("experts", experts=axes), model, LAYERS["mixtral_8x7b"], ONE)
    for node, _ in plan.program.pcg.walk():
        if node.kind == "dot_general" and node.scope.startswith("experts/gate"):
            assert degrees(node.types[0], ONE.axes, 5) == (4, 1, 1, 1, 1)
        if node.kind == "dot_general" and node.scope == "query":
            assert degrees(node.types[0], ONE.axes, 3) == (4, 1, 1)
    assert gathered(plan, "all-to-all") > 0


def test_pods_are_the_outermost_level() -> None:
    machine = machine_of(4, 2)
    assert [(level.name, level.size) for level in machine.levels] == [("pod", 2), ("node", 2), ("device", 8)]
    assert machine.devices == 32
