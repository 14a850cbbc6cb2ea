"""Layers recomputed so that a program fits: the function's values and gradients, what was predicted, and the best choice."""

from __future__ import annotations

import dataclasses
import itertools
import math
import runpy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from ci_cases import CI, by_hand
from hypothesis import example, given, settings
from hypothesis import strategies as st
from precision import in_64_bits
from recomputing_models import MODELS
from small_models import Small, arrays, block, cross_entropy, f, gpt

import unity
from unity import Device
from unity.base.errors import PlanError
from unity.machine.machine import Machine
from unity.pcg.capture.capture import Captured, capture
from unity.plan.plan import Plan
from unity.plan.plan_family import PlanFamily
from unity.search.cost.assembly import Listed
from unity.search.cost.cost import Training
from unity.search.session import Candidate, Search
from unity.substitutions.language.axioms import default_library
from unity.transforms.recomputing import LayeredProgram, Recomputing, RecomputingWish, best, recomputing
from unity.transforms.recomputing.layers import Places, equations_in_layers, layers, repeated, together
from unity.transforms.recomputing.products import recomputed_products, saved_sets
from unity.transforms.recomputing.recomputing import Policy, Spans
from unity.transforms.transformation import TransformationSource

MACHINE = Machine.grid(1, 4, "a100")
SHORT = "two layers" if CI else "written out"
SLOW = Device("slow", {"float64": 1e6, "float32": 1e6}, 10**9, 1e9, 0.5, 0.0)  # so that all that can be is shared
WHOLE: tuple[Policy, ...] = ("nothing", "products")
PARTS = (0.95, 0.8)  # of the memory of the leanest plan that recomputes no layers


@pytest.fixture(autouse=True, scope="module")
def in_float64() -> Iterator[None]:
    with in_64_bits():
        yield


def planned(model: Small, **options: Any) -> Plan:
    options = {"machine": MACHINE, "budget": 0, "pipelines": False, "branches": False, "progress": False, **options}
    return unity.optimize(model.loss, model.params, model.batch, **options)


@cache
def leanest(name: str) -> Plan:
    return planned(MODELS[name](), objective="memory")


@cache
def wanted(name: str) -> tuple[Any, Any]:
    """Random arguments of a model, and its value and gradients."""
    model = MODELS[name]()
    args = arrays(model.params), arrays(model.batch)
    return args, jax.jit(jax.value_and_grad(model.loss))(*args)


def assert_right(name: str, step: Any, args: Any) -> None:
    results = jax.jit(jax.value_and_grad(step))(*args)
    for ours, own in zip(*map(jax.tree.leaves, (results, wanted(name)[1])), strict=True):
        np.testing.assert_allclose(ours, own, rtol=1e-10, atol=1e-10 * float(np.abs(own).max()))


@pytest.mark.parametrize("name", sorted(("dropped", "partly", *by_hand("scanned", "unlike", "written out"))))
def test_a_program_that_fits_by_recomputation_is_the_function(name: str, tmp_path: Path) -> None:
    """Random masks are the same when they are drawn again, and collectives are those predicted; saved, loaded and exported, too."""
    limit = PARTS[0] * leanest(name).memory
    plan = planned(MODELS[name](), memory_limit=limit)
    assert plan.program.recomputing is not None
    assert plan.memory <= limit
    args, _ = wanted(name)
    assert_right(name, plan, plan.shard(*args))
    total = plan.check().total
    assert total.predicted == total.compiled
    plan.program.check_derivation()
    plan.files.save(tmp_path / "plan.json")
    model = MODELS[name]()
    again = unity.load(tmp_path / "plan.json", model.loss, model.params, model.batch)
    assert again.program.pcg.key == plan.program.pcg.key
    assert str(again.program.recomputing) == str(plan.program.recomputing)
    again.files.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "plan.json").read_bytes()
    plan.files.export(tmp_path / "exported.py")
    assert "checkpoint" in (tmp_path / "exported.py").read_text()
    assert_right(name, runpy.run_path(str(tmp_path / "exported.py"), run_name="exported")["fn"], args)


@pytest.mark.parametrize("name", ["partly", *by_hand("scanned")])
def test_every_point_of_the_frontier_of_a_recomputed_program_is_right(name: str) -> None:
    plan = planned(MODELS[name](), memory_limit=PARTS[1] * leanest(name).memory)
    assert plan.frontier[-1].memory < PARTS[1] * leanest(name).memory
    for point in (plan.frontier[0], plan.frontier[-1]):
        assert_right(name, point, point.shard(*wanted(name)[0]))


def some_products(captured: Captured, spans: Spans) -> Recomputing:
    """Save about half of the products."""
    sets = saved_sets(recomputed_products(captured.body, spans, MACHINE))
    return recomputing(captured, spans, "some products", products=sets[len(sets) // 2])


@pytest.mark.parametrize("name", ["scanned", *by_hand("dropped")])
@pytest.mark.parametrize("saved", ["products", "some products"])
def test_a_program_that_saves_products_is_the_function(name: str, saved: Policy, tmp_path: Path) -> None:
    model = MODELS[name]()
    captured = capture(model.loss, model.params, model.batch)
    segments = LayeredProgram(captured.body)
    spans = segments.repeated(segments.count)
    made = recomputing(captured, spans, saved) if saved == "products" else some_products(captured, spans)
    search = Searches().of(made.after)
    assert Searches().of(recomputing(captured, made.spans).after).least_memory.total < search.least_memory.total
    plan = Plan(PlanFamily(model.loss, made.before, search, 0.0, transformations=(made,)), search.leanest)
    assert_right(name, plan, plan.shard(*wanted(name)[0]))
    total = plan.check().total
    assert total.predicted == total.compiled
    plan.files.save(tmp_path / "plan.json")
    again = unity.load(tmp_path / "plan.json", model.loss, model.params, model.batch)
    assert again.program.pcg.key == plan.program.pcg.key
    assert str(again.program.recomputing) == str(made)
    plan.files.export(tmp_path / "exported.py")
    written = {"products": "dots_with_no_batch_dims_saveable", "some products": "save_only_these_names('unity: a saved product')"}
    assert written[saved].replace("'", '"') in (tmp_path / "exported.py").read_text().replace("'", '"')
    assert_right(name, runpy.run_path(str(tmp_path / "exported.py"), run_name="exported")["fn"], wanted(name)[0])


def test_checkpoints_of_the_user_stay() -> None:
    plan = planned(MODELS["partly"](), memory_limit=PARTS[0] * leanest("partly").memory)
    policies = [node.policy for node, _ in plan.program.pcg.walk() if node.kind == "remat"]
    assert policies.count(jax.checkpoint_policies.dots_saveable) == 4
    assert len(policies) > 4


def test_layers_are_kept_where_the_fastest_plan_fits() -> None:
    keeping = planned(MODELS["written out"](), memory_limit=math.inf, recompute=False)
    assert planned(MODELS["written out"](), memory_limit=math.inf).program.pcg.key == keeping.program.pcg.key
    assert planned(MODELS["written out"](), memory_limit=keeping.memory).program.pcg.key == keeping.program.pcg.key


def test_recomputed_layers_compete_with_leaner_shardings() -> None:
    """Under a limit that only slower shardings meet, the plan is no slower than checkpoints around all layers, and is right."""
    limit = 1.001 * leanest(SHORT).memory
    keeping, plan = (planned(MODELS[SHORT](), memory_limit=limit, recompute=flag) for flag in (False, True))
    model = MODELS[SHORT]()
    captured, searches = capture(model.loss, model.params, model.batch), Searches()
    segments = LayeredProgram(captured.body)
    by_hand = searches.of(recomputing(captured, segments.repeated(segments.count)).after).under(limit)
    assert plan.program.recomputing is not None
    assert plan.memory <= limit
    assert plan.time <= seconds(by_hand) * (1 + 1e-9)
    assert plan.time < 0.99 * keeping.time
    assert_right(SHORT, plan, plan.shard(*wanted(SHORT)[0]))


def test_a_pipeline_is_no_plan_where_recomputed_layers_are_faster() -> None:
    pair = Machine.grid(1, 2, "a100")
    limit = 0.94 * planned(MODELS["unlike"](), machine=pair, objective="memory").memory
    options: dict[str, Any] = {"machine": pair, "memory_limit": limit}
    recomputed, both = (planned(MODELS["unlike"](), pipelines=flag, **options) for flag in (False, True))
    assert planned(MODELS["unlike"](), pipelines=True, recompute=False, **options).time > recomputed.time
    assert both.time <= recomputed.time


def test_the_refusal_names_recomputation_if_the_option_forbids_it() -> None:
    limit = PARTS[1] * leanest("written out").memory
    with pytest.raises(unity.InfeasibleError, match=r"recompute=True, with at least"):
        planned(MODELS["written out"](), memory_limit=limit, recompute=False)
    with pytest.raises(unity.InfeasibleError, match=r"at least .*\n.*times as many devices"):
        planned(MODELS["written out"](), memory_limit=limit / 100)


@dataclass(frozen=True)
class Searches:
    """Searches of programs on one machine, which share what they list."""

    machine: Machine = MACHINE
    listed: Listed = field(default_factory=Listed)

    def of(self, captured: Captured) -> Search:
        return Search(captured.graph, captured.differentiated, self.machine, Training(), listed=self.listed)

    def best(self, captured: Captured, limit: float) -> Candidate | None:
        """The best with recomputed layers."""
        wish = RecomputingWish(self.of, lambda search: search.under(limit), lambda c: (c.time, c.memory), limit=limit)
        choice = best(captured, wish).best
        return None if choice is None else choice.candidate


def seconds(candidate: Candidate | None) -> float:
    return math.inf if candidate is None else candidate.time


def four_layers(kinds: Sequence[str], wide: int, rows: int) -> Small:
    """Four layers of operators between products of a width."""
    bend = {"gelu": jax.nn.gelu, "tanh": jnp.tanh}

    def one(p: Any, x: jax.Array) -> jax.Array:
        h = x @ p["up"]
        for kind in kinds:
            h = bend[kind](h) if kind in bend else h * h if kind == "square" else h / (1.0 + jnp.abs(h).max(-1, keepdims=True))
        return x + jnp.sin(h) @ p["down"]

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for p in params:
            x = one(p, x)
        return jnp.mean(x**2)

    return Small(loss, [{"up": f(16, wide), "down": f(wide, 16)} for _ in range(4)], f(rows, 16))


KINDS = st.lists(st.sampled_from(["gelu", "tanh", "square", "norm"]), min_size=1, max_size=3)


@settings(max_examples=1 if CI else 3)
@given(model=st.builds(four_layers, KINDS, st.sampled_from([16, 64]), st.sampled_from([64, 256])), part=st.floats(0.55, 0.98))
@example(model=four_layers(["norm"], 64, 64), part=0.98)  # the second and the third layer, 5 % faster than the first two
def test_no_set_of_recomputed_layers_is_better(model: Small, part: float) -> None:
    """Brute force over all sets of layers."""
    captured, searches = capture(model.loss, model.params, model.batch), Searches()
    segments = LayeredProgram(captured.body)
    assert segments.count == 4
    limit = part * searches.of(captured).leanest.memory
    subsets = itertools.chain.from_iterable(itertools.combinations(segments.chain.repeated, k) for k in range(1, 5))
    programs = [recomputing(captured, segments.spans(subset), known=captured.bodies).after for subset in subsets]
    least = min(seconds(searches.of(program).under(limit)) for program in programs)
    assert seconds(searches.best(captured, limit)) <= least * (1 + 1e-9)


def test_groups_hold_the_parts_between_runs_of_layers() -> None:
    """As in a ResNet, whose stages begin with a layer of their own: groups of equal layers alone need more memory."""

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        own = iter(weights)
        for bend, first in ((jnp.sin, jnp.cos), (jnp.tanh, jnp.arctan), (jax.nn.softplus, jnp.sinh)):
            x = x * first(first(x @ next(own)))
            for _ in range(4):
                x = bend(x @ next(own)) + x
        return jnp.mean(x**2)

    captured, searches = capture(loss, [f(16, 16)] * 15, f(1024, 16)), Searches()
    layered = LayeredProgram(captured.body)
    ways = [layered.repeated(layered.count), layered.spans(together(layered.chain.repeated, 4)), layered.grouped(4)]
    *others, grouped = [searches.of(recomputing(captured, own, known=captured.bodies).after).leanest for own in ways]
    assert grouped.memory < min(other.memory for other in others)
    assert seconds(searches.best(captured, grouped.memory)) <= grouped.time * (1 + 1e-9)


def scanned_layers(wide: int, feed_forward: int, rows: int) -> Small:
    """A scan of layers with products of three sizes, which spare different times for their bytes."""

    def one(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        x = x + jnp.tanh(jnp.sin(x @ p["up"]) @ p["down"])
        return x + jnp.tanh(x @ p["square"]), None

    def loss(p: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.scan(one, x, p)[0] ** 2)

    shapes = {"up": (wide, feed_forward), "down": (feed_forward, wide), "square": (wide, wide)}
    return Small(loss, {name: f(6, *shape) for name, shape in shapes.items()}, f(rows, wide))


@pytest.mark.parametrize("part", [0.6, *by_hand(0.3)])
def test_no_set_of_products_saved_in_the_steps_of_a_scan_is_better(part: float) -> None:
    """Brute force over all sets, at limits between what saving none and all takes."""
    model, searches = scanned_layers(64, 256, 512), Searches()
    captured = capture(model.loss, model.params, model.batch)
    spans = LayeredProgram(captured.body).repeated(0)
    products = recomputed_products(captured.body, spans, MACHINE)
    (program,) = {p.program for p in products}
    assert len(products) == 3
    sets = [subset for k in range(4) for subset in itertools.combinations(sorted(p.place for p in products), k)]
    programs = [searches.of(recomputing(captured, spans, "some products", products={program: subset}).after) for subset in sets]
    none, every = programs[0].fastest.memory, programs[-1].fastest.memory
    limit = none + part * (every - none)
    least = min(seconds(search.under(limit)) for search in programs)
    assert least < min(seconds(searches.of(recomputing(captured, spans, saved).after).under(limit)) for saved in WHOLE)
    assert seconds(searches.best(captured, limit)) <= least * (1 + 1e-9)


def test_only_products_that_are_read_again_are_saved() -> None:
    """The last product of a step, which is added to the residual stream, is not computed again; one in a function is."""

    def one(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        x = x + jnp.sin(x) @ p["inner"]
        return x + jnp.tanh(x @ p["up"]) @ p["down"], None

    def loss(p: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.scan(one, x, p)[0] ** 2)

    shapes = {"inner": f(6, 16, 16), "up": f(6, 16, 64), "down": f(6, 64, 16)}
    body = capture(loss, shapes, f(32, 16)).body
    products = recomputed_products(body, LayeredProgram(body).repeated(0), dataclasses.replace(MACHINE, device=SLOW))
    assert [(p.seconds, p.nbytes) for p in products] == [(6 * 2 * 32 * 16 * n / 5e5, 6 * 32 * n * 8) for n in (64, 16)]


def test_products_of_a_step_of_two_scans_are_counted_together() -> None:
    def one(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(jnp.tanh(x @ w) @ w), None

    def loss(p: Any, x: jax.Array) -> jax.Array:
        first = jax.lax.scan(one, x, p["first"])[0]
        return jnp.mean(jax.lax.scan(one, jnp.sin(first), p["second"])[0] ** 2)

    body = capture(loss, {"first": f(6, 16, 16), "second": f(6, 16, 16)}, f(32, 16)).body
    products = recomputed_products(body, LayeredProgram(body).repeated(0), dataclasses.replace(MACHINE, device=SLOW))
    assert [(p.seconds, p.nbytes) for p in products] == [(2 * 6 * 2 * 32 * 16 * 16 / 5e5, 2 * 6 * 32 * 16 * 8)] * 2
    assert len({p.place for p in products}) == 2


def test_layers_are_recomputed_no_more_slowly_than_by_hand() -> None:
    """A checkpoint around every layer, or around every second one, under limits of parts of what the fastest plan needs."""
    searches = Searches(dataclasses.replace(MACHINE, device=SLOW))
    model = gpt(layers=2 if CI else 4, d=16, vocabulary=32, b=64, s=16)

    def by_hand(every: int) -> Search:
        def loss(p: Any, batch: Any) -> Any:
            x = p["token"][batch["x"]] + p["position"]
            for k, one in enumerate(p["layers"]):
                x = (block if k % every else jax.checkpoint(block))(one, x)
            return cross_entropy(x @ p["token"].T, batch["y"])

        return searches.of(capture(loss, model.params, model.batch))

    captured = capture(model.loss, model.params, model.batch)
    keeping, others = searches.of(captured), [by_hand(1), by_hand(2)]
    fitting = 0
    for part in (1.0, 0.7, 0.5, 0.3):
        limit = part * keeping.fastest.memory
        ours = keeping.under(limit) or searches.best(captured, limit)
        assert ours is None or ours.memory <= limit
        assert seconds(ours) <= min(seconds(other.under(limit)) for other in others) * (1 + 1e-9)
        fitting += ours is not None
    assert fitting > 1


@given(st.text("abc", max_size=14))
def test_the_longest_run_of_equal_parts_is_detected(word: str) -> None:
    runs = [
        (start, period, times)
        for period in range(2, len(word))
        for start in range(len(word))
        for times in range(2, len(word) // period + 1)
        if word[start : start + period] * times == word[start : start + period * times]
    ]
    start, period, times = repeated(word)
    assert word[start : start + period] * times == word[start : start + period * times]
    assert period * times >= max((p * t for _, p, t in runs if _many(word, p)), default=0)


def _many(word: str, period: int) -> bool:
    """Whether as many letters recur at a distance as a part has."""
    return sum(word[i] == word[i - period] for i in range(period, len(word))) >= period


def test_repeated_layers_before_a_scan_may_be_recomputed_with_the_parts_beside_them() -> None:
    """The last part of the program is left out: it has a scan, whose step is a layer itself."""

    def loss(p: Any, x: jax.Array) -> jax.Array:
        for w in p["layers"]:
            x = x + jnp.tanh(x @ w) @ w.T
        x, stack = jax.lax.scan(lambda x, w: (jnp.sin(x @ w), jnp.cos(x @ w)), x, p["steps"])
        return jnp.mean(x**2) + jnp.mean(stack**2)

    chain = LayeredProgram(capture(loss, {"layers": [f(16, 64)] * 4, "steps": f(6, 16, 16)}, f(64, 16)).body).chain
    assert len(chain.repeated) == 4
    assert chain.every == chain.repeated


@pytest.mark.parametrize("spans", [((0, 99999),), ((3, 3),), ((5, 9), (2, 5)), ((5, 2),)])
def test_spans_that_the_program_does_not_have_are_refused(spans: tuple[tuple[int, int], ...]) -> None:
    model = MODELS["unlike"]()
    captured = capture(model.loss, model.params, model.batch)
    right = recomputing(captured, {captured.body.key: ((2, 5),)}).record
    source = TransformationSource(captured, (), unity.Machine.grid(1, 2, "a100"), default_library)
    assert right.apply(source).after.graph.key == right.graph
    with pytest.raises(PlanError, match="does not have"):
        msgspec.structs.replace(right, spans={captured.body.key: spans}).apply(source)
    with pytest.raises(PlanError, match="does not have"):
        msgspec.structs.replace(right, spans={"other": ((2, 5),)}).apply(source)
    with pytest.raises(PlanError, match="another graph"):
        msgspec.structs.replace(right, spans={captured.body.key: ((2, 6),)}).apply(source)
    assert len(equations_in_layers(captured.body)) < 99999
    with pytest.raises(PlanError, match="saves products that the program does not have"):
        msgspec.structs.replace(right, saved="some products", products={captured.body.key: (99999,)}).apply(source)


def test_repeated_layers_of_empty_values_are_not_layers() -> None:
    def fn(x: jax.Array, y: jax.Array) -> jax.Array:
        for _ in range(3):
            x = jnp.tanh(jnp.sin(x))
        return jnp.sum(x) + jnp.sum(jnp.exp(y))

    body = capture(fn, jnp.ones((3, 0)), jnp.ones((3, 4)), argnums=(0, 1)).body
    equations = equations_in_layers(body)
    assert layers(body, equations, Places.of(body, equations)).repeated == ()


def test_layers_that_repeat_smaller_parts_are_detected() -> None:
    """The slice of each expert's weight is another equation, and the others are equal for all experts and layers."""
    layer = ["norm", *itertools.chain.from_iterable((f"slice {k}", "product", "gelu", "product") for k in range(40)), "sum"]
    assert repeated(["embed", *layer * 3, "loss"]) == (1, len(layer), 3)


def gated(w: Any, xs: Any) -> Any:
    """A layer of gated recurrent units, of which JAX keeps more values than the two products of a step."""

    def step(h: Any, x: Any) -> tuple[Any, Any]:
        r, z, n = jnp.split(x, 3, axis=-1)
        ur, uz, un = jnp.split(h @ w["h"], 3, axis=-1)
        z = jax.nn.sigmoid(z + uz)
        h = (1 - z) * jnp.tanh(n + jax.nn.sigmoid(r + ur) * un) + z * h
        return h, h

    return jnp.mean(jax.lax.scan(step, jnp.zeros((xs.shape[1], w["h"].shape[0])), xs @ w["x"])[1] ** 2)


def test_every_run_of_repeated_layers_is_detected() -> None:
    """The layers of an encoder, and those of a decoder that read its result, which have other operators."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for w in params["encoder"]:
            x = x + jnp.tanh(x @ w)
        y = jnp.sin(x)
        for w in params["decoder"]:
            y = jax.nn.relu(y @ w) * jnp.cos(x) - y
        return jnp.mean(y**2)

    params = {"encoder": [f(64, 64)] * 6, "decoder": [f(64, 64)] * 4}
    body = capture(loss, params, f(64, 64)).body
    equations = equations_in_layers(body)
    found = layers(body, equations, Places.of(body, equations))
    products = [sum(body.equations[i].name == "dot_general" for i in equations[start:stop]) for start, stop in found.repeated]
    assert products == [1] * (6 + 4)
    assert set(found.repeated) <= set(found.every)


def test_layers_end_where_nothing_is_fused_across_their_border() -> None:
    """Of places that equally many bytes cross, a cut before an activation would write what else is fused with it, and read it."""

    def loss(p: Any, x: Any) -> Any:
        x = jax.nn.relu(x @ p[0])
        for w in p[1:]:
            x = jax.nn.relu(x + jnp.tanh(x @ w))
        return (x @ p[0].T).mean()

    body = capture(loss, [f(16, 16)] * 6, f(32, 16)).body
    equations = equations_in_layers(body)
    found = layers(body, equations, Places.of(body, equations)).repeated
    assert len(found) >= 4
    assert {body.equations[equations[stop - 1]].name for _, stop in found} == {"custom_jvp_call"}
    assert {body.equations[equations[start]].name for start, _ in found} == {"dot_general"}


def test_steps_of_loops_recompute_what_takes_longer_to_stack() -> None:
    model = Small(gated, {"x": f(16, 48), "h": f(16, 48)}, f(8, 4, 16))
    plan = planned(model)
    assert plan.program.recomputing is not None
    plan.program.check_derivation()
    assert plan.time < 0.95 * planned(model, recompute=False).time
    args = arrays(model.params), arrays(model.batch)
    found, wanted = (jax.jit(jax.value_and_grad(fn))(*args) for fn in (plan, model.loss))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12), found, wanted)
    assert plan.check().agrees(0)
    tight = planned(model, memory_limit=0.9 * plan.memory)
    assert plan.time <= tight.time


def test_steps_of_loops_whose_stacking_takes_little_keep_all() -> None:
    wide = Small(gated, {"x": f(2048, 6144), "h": f(2048, 6144)}, f(8, 4096, 2048))
    assert planned(wide).program.recomputing is None
