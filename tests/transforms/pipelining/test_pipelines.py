"""Pipelines: the same values and gradients as without, the collectives and the memory that were predicted, and clear refusals."""

import io
import json
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from ci_cases import BY_HAND, by_hand, fewer
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from stepped import stepped

import unity
from unity import Device, Machine
from unity.base.errors import DerivationError, InfeasibleError, ParallelTypeError, PlanError
from unity.exec.pipelines.guarded import guarded
from unity.machine.axis_ladders import axis_ladders
from unity.pcg.capture.capture import capture
from unity.pcg.ir.graph import PCG, PIPELINE, Node, Value
from unity.pcg.ir.payloads import Pipeline
from unity.pcg.local.interpreter import run_body
from unity.pcg.parallel.axis_names import AxisNames
from unity.pcg.parallel.check import check, check_by_names
from unity.pcg.parallel.parallelize import parallelize
from unity.pcg.parallel.stages import Schedule
from unity.pcg.parallel.traffic import traffic
from unity.pcg.types.parallel_type import REPLICATED, UNUSED, partitioned
from unity.plan.files.plan_file import sealed
from unity.plan.plan import Plan
from unity.plan.plan_family import PlanFamily
from unity.search.cost.cost import Training
from unity.search.session import Search
from unity.search.simulator import simulate
from unity.transforms.pipelining import PipelineSource, Pipelining, pipelined, scans
from unity.transforms.pipelining.equal_layers import layers
from unity.transforms.pipelining.rolling import rolled
from unity.transforms.strided_micro_batches import joined, split

LAYERS, BATCH, SEQ, WIDTH, WORDS = 8, 16, 4, 16, 24
# Slow between nodes: what is worth a pipeline.
SLOW = Machine.grid(
    2, 4, device=Device("slow", {"float32": 1e9}, 10**9, 1e9, 0.5, 0.0), intra=(1e9, 1e-7), inter=(4e6, 1e-3)
)  # fmt: skip
TREE = Machine.grid(2, 4)


def block(layer, x):
    y = x - x.mean(-1, keepdims=True)
    y = y * lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5) * layer["gain"]
    return x + jax.nn.gelu(y @ layer["up"]) @ layer["down"]


def loss(params, tokens, target):
    x = params["words"][tokens]
    x = lax.scan(lambda carry, layer: (block(layer, carry), None), x, params["layers"])[0]
    return -jnp.take_along_axis(jax.nn.log_softmax(x @ params["out"]), target[..., None], -1).mean()


def arguments(layers=LAYERS, batch=BATCH, seq=SEQ, width=WIDTH, seed=0):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-2] if len(shape) > 1 else 1), jnp.float32)

    stack = {"gain": normal(layers, width), "up": normal(layers, width, 4 * width), "down": normal(layers, 4 * width, width)}
    params = {"words": normal(WORDS, width), "out": normal(width, WORDS), "layers": stack}
    tokens, target = (jnp.asarray(rng.integers(WORDS, size=(batch, seq))) for _ in range(2))
    return params, tokens, target


def structs(*args):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)


def planned(fn, args, machine, along, rounds, argnums: int | tuple[int, ...] = 0) -> Plan:
    """The fastest plan with one pipeline."""
    captured = capture(fn, *args, argnums=argnums)
    made = pipelined(PipelineSource(captured), 0, 0, along, rounds)
    search = Search(made.after.graph, captured.differentiated, machine, Training())
    return Plan(PlanFamily(fn, made.before, search, 0.0, transformations=(made,)), search.fastest)


def close(found, wanted, most=2e-5):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.abs(np.asarray(a) - np.asarray(b)).max() <= most * max(1e-3, float(np.abs(b).max()))


ALONG = {"n0": TREE.axes[:1], "d0": TREE.axes[1:2], "n0 d0": TREE.axes[:2], "n0 d0 d1": TREE.axes}


@pytest.mark.parametrize(("along", "rounds"), [("n0", 1), ("n0 d0", 2), *by_hand(("d0", 2), ("n0 d0 d1", 2))])
def test_a_pipeline_computes_the_same_and_sends_what_was_predicted(along, rounds):
    args = arguments()
    plan = planned(loss, args, TREE, ALONG[along], rounds)
    step, found = stepped(plan, *args)
    close(step, jax.jit(jax.value_and_grad(loss))(*args))
    assert all(line.predicted == line.compiled for line in found.lines)
    assert {"collective-permute"} <= {line.kind for line in found.lines}


@pytest.mark.usefixtures("as_users_compile")
def test_what_a_plan_with_a_pipeline_holds_is_known():
    found = planned(loss, arguments(width=64), TREE, TREE.axes[:1], 4).check()
    line = next(line for line in found.memory_lines if line.kind == "all")
    # a compiler may add up weights' gradients where the results lie; that is not counted on
    assert 0.95 * line.compiled <= line.predicted <= 1.25 * line.compiled


def masked(params, x, mask):
    def step(carry, layer):
        seen = jnp.where(mask[..., None], carry, 0.0)
        return carry + jnp.tanh(seen @ layer) * jnp.cos(x).mean(-1, keepdims=True), None

    return (lax.scan(step, x, params)[0] ** 2).mean()


def test_constants_with_samples_come_along_and_have_their_gradients():
    rng = np.random.default_rng(1)
    params, x = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((4, 8, 8), (16, 5, 8)))
    mask = jnp.asarray(rng.integers(2, size=(16, 5)), bool)
    plan = planned(masked, (params, x, mask), TREE, TREE.axes[:2], 2, argnums=(0, 1))
    (node,) = [n for n in plan.program.pcg.nodes if n.kind == PIPELINE]
    assert node.of(Pipeline).read == 2  # the mask, and what is read of x
    step, found = stepped(plan, params, x, mask, argnums=(0, 1))
    close(step, jax.jit(jax.value_and_grad(masked, (0, 1)))(params, x, mask))
    assert all(line.predicted == line.compiled for line in found.lines)


def test_layers_may_be_rematerialized_and_carry_several_things():
    def fn(params, x, y):
        @jax.checkpoint
        def layer(carry, w):
            a, b = carry
            return (jnp.tanh(a @ w) + b, b * 0.5 + a.mean(-1, keepdims=True)), None

        a, b = lax.scan(layer, (x, y), params)[0]
        return (a * b).sum()

    rng = np.random.default_rng(2)
    args = [jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((4, 6, 6), (8, 6), (8, 6))]
    plan = planned(fn, args, TREE, TREE.axes[1:], 2, argnums=(0, 1, 2))
    close(jax.grad(plan, (0, 1, 2))(*args), jax.jit(jax.grad(fn, (0, 1, 2)))(*args))


def test_a_stage_that_waits_computes_nothing():
    """What no sample is might have no value: here the square root of what is not yet there."""

    def fn(params, x):
        return lax.scan(lambda c, w: (jnp.sqrt(c) / (c.sum(-1, keepdims=True)) + w, None), x, params)[0].sum()

    params, x = jnp.ones((4, 3)), jnp.arange(1.0, 25.0).reshape(8, 3)
    plan = planned(fn, (params, x), TREE, TREE.axes[1:], 1, argnums=(0, 1))
    found = jax.grad(plan, (0, 1))(params, x)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))
    close(found, jax.jit(jax.grad(fn, (0, 1)))(params, x))


@BY_HAND
def test_training_with_a_pipeline_has_the_same_losses():
    args = arguments()
    plan = planned(loss, args, TREE, TREE.axes[:2], 2)

    def trained(fn):
        @jax.jit
        def step(params):
            value, gradient = jax.jit(jax.value_and_grad(fn))(params, *args[1:])
            return jax.tree.map(lambda p, g: p - 0.02 * g, params, gradient), value

        params, losses = args[0], []
        for _ in range(50):
            params, value = step(params)
            losses.append(float(value))
        return losses

    found, wanted = trained(plan), trained(loss)
    assert wanted[-1] < 0.95 * wanted[0]
    np.testing.assert_allclose(found, wanted, rtol=1e-4)


def test_where_links_are_slow_a_pipeline_is_found_saved_and_made_again(tmp_path):
    args = structs(*arguments(layers=32, batch=64, seq=2, width=64))
    without = unity.optimize(loss, *args, machine=SLOW, progress=False, pipelines=False)
    plan = unity.optimize(loss, *args, machine=SLOW, progress=False)
    assert isinstance(plan.program.pipelining, Pipelining)
    assert without.program.pipelining is None
    assert [axis.name for axis in plan.program.pipelining.along] == ["n0"]
    assert plan.time < without.time / 1.2
    assert plan.inspect.simulate().makespan == pytest.approx(plan.time, rel=0.05)
    kinds = {state.kind for n in plan.program.pcg.nodes if n.kind == PIPELINE for state in n.operands[1].type[1:]}
    assert "P" in kinds  # data or tensor parallelism inside of stages
    plan.program.check_derivation()
    plan.files.save(tmp_path / "plan.json")
    again = unity.load(tmp_path / "plan.json", loss, *args)
    assert again.program.pcg.key == plan.program.pcg.key
    assert str(again.program.pipelining) == str(plan.program.pipelining)
    assert "pipeline: 2 stages" in _shown(plan)


def _shown(plan):
    out = io.StringIO()
    plan.explain(file=out)
    return out.getvalue()


def unrolled(params, tokens, target):
    x = params["words"][tokens]
    for layer in params["layers"]:
        x = block(layer, x)
    return -jnp.take_along_axis(jax.nn.log_softmax(x @ params["out"]), target[..., None], -1).mean()


def test_layers_that_are_written_out_become_a_pipeline_too(tmp_path):
    params, tokens, target = arguments(layers=5)
    params["layers"] = [jax.tree.map(lambda a, k=k: a[k], params["layers"]) for k in range(5)]
    args = (params, tokens, target)
    plan = unity.optimize(unrolled, *args, machine=TREE, progress=False, search="captured", pipeline=unity.PipelineShape(2, 4))
    assert str(plan.program.pipelining).startswith("2 stages of 2 layers")  # the first layer is outside
    (node,) = [n for n in plan.program.pcg.nodes if n.kind == PIPELINE]
    assert node.inside is not None
    assert all("test_pipelines.py" in n.source for n in node.inside.nodes if n.kind != "input")
    step, found = stepped(plan, *args)
    close(step, jax.jit(jax.value_and_grad(unrolled))(*args))
    assert all(line.predicted == line.compiled for line in found.lines)
    plan.program.check_derivation()
    plan.files.save(tmp_path / "plan.json")
    assert unity.load(tmp_path / "plan.json", unrolled, *args).program.pcg.key == plan.program.pcg.key


def by_rows(w, k):
    return {"up": w["up"][k], "down": w["down"][k]}


def by_columns(w, k):
    return {"up": w["up"][:, k], "down": w["down"][1, :, k, 2]}


def cast_before(w, k):
    w = jax.tree.map(lambda a: a.astype(jnp.bfloat16), w)
    return {"up": w["up"][k].astype(jnp.float32), "down": w["down"][k].astype(jnp.float32)}


def from_the_last(w, k):
    return {"up": w["up"][-1 - k], "down": w["down"][-1 - k]}


@pytest.mark.parametrize(("count", "rows"), [(4, 4), (5, 5), (4, 6)])
@pytest.mark.parametrize("form", [by_rows, by_columns, cast_before, from_the_last])
def test_layers_that_read_pieces_of_one_array_are_a_scan_over_it(form, count, rows):
    def stacked_loss(w, x):
        for k in range(count):
            piece = form(w, k)
            x = x + jnp.tanh(x @ piece["up"] + piece["down"].sum()) @ piece["down"]
        return (x**2).mean()

    draw = np.random.default_rng(0).normal
    shapes = ((4, rows, 8), (2, 8, rows, 3, 4)) if form is by_columns else ((rows, 4, 8), (rows, 8, 4))
    up, down, x = (jnp.array(draw(size=shape), jnp.float32) for shape in (*shapes, (8, 4)))
    args = ({"up": up, "down": down}, x)
    captured = capture(stacked_loss, *args)
    run = layers(captured)
    assert run is not None
    assert len(run) == count
    after = rolled(captured, run, count - count % 2)
    joined = [e.name for e in after.body.equations if e.name in ("concatenate", "stack")]
    assert joined == [] or form is from_the_last
    assert any(e.name == "scan" for e in after.body.equations)
    leaves = jax.tree.leaves(args)

    def scanned(*xs):
        return run_body(after.body, xs, [()] * len(xs), [()], ())[0]

    wanted = _flat(jax.value_and_grad(stacked_loss)(*args))
    close(jax.value_and_grad(scanned, (0, 1))(*leaves), wanted, 1e-2 if form is cast_before else 2e-5)


def _flat(step):
    return step[0], tuple(jax.tree.leaves(step[1]))


def test_one_layer_is_rolled_too():
    args = jnp.ones((4, 8, 8)) / 8, jnp.ones((16, 8))
    captured = capture(_four_layers, *args)
    run = layers(captured)
    assert run is not None
    after = rolled(captured, run, 1)
    close(run_body(after.body, args, [()] * 2, [()], ()), [_four_layers(*args)])


def _four_layers(w, x):
    for k in range(4):
        x = x + jnp.tanh((x - x.mean()) @ w[k]) * jnp.cos(x) - jnp.sin(x) / (1 + x * x)
    return (x**2).mean()


@pytest.mark.parametrize("first", [0, 1, 2])
def test_short_layers_that_are_joined_walk_over_the_array_too(first):
    def short(w, x):
        for k in range(first, first + 8):
            x = x + jnp.tanh(x @ w["a"][k]) @ w["b"][k]
        return (x**2).mean()

    args = ({name: jax.random.normal(jax.random.key(k), (10, 4, 4)) for k, name in enumerate("ab")}, jnp.ones((8, 4)))
    captured = capture(short, *args)
    run = layers(captured)
    assert run is not None
    after = rolled(captured, run, len(run))
    names = [e.name for e in after.body.equations]
    assert "concatenate" not in names
    wanted = _flat(jax.value_and_grad(short)(*args))
    leaves = jax.tree.leaves(args)
    close(jax.value_and_grad(lambda *xs: run_body(after.body, xs, [()] * 3, [()], ())[0], (0, 1))(*leaves), wanted)


def test_layers_may_read_an_array_and_pieces_of_its_cast():
    def summed(w, x):
        for k in range(8):
            x = x * jnp.tanh(w.astype(jnp.bfloat16).sum().astype(x.dtype)) + jnp.tanh(x @ w.astype(jnp.bfloat16)[k].astype(x.dtype))
        return (x**2).mean()

    args = jax.random.normal(jax.random.key(0), (8, 4, 4)), jnp.ones((8, 4))
    captured = capture(summed, *args)
    run = layers(captured)
    assert run is not None
    after = rolled(captured, run, len(run))
    close(run_body(after.body, args, [()] * 2, [()], ()), [summed(*args)])


def test_pieces_that_one_layer_reads_stay_in_it():
    def gated(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w[0]) * jnp.tanh(x @ w[1]) + jnp.tanh(x @ w[2]) * jnp.tanh(x @ w[3])
        return (x**2).mean()

    captured = capture(gated, [jnp.ones((4, 8, 8))] * 5, jnp.ones((16, 8)))
    run = layers(captured)
    assert run is not None
    assert len(run) == 5
    assert sum(e.name == "slice" for e in run.step.equations) == 4


def test_layers_of_one_array_have_the_pipeline_of_layers_with_weights_of_their_own():
    def loss_of(ws, x):
        for k in range(8):
            x = x + jnp.tanh(x @ ws[k])
        return (x**2).mean()

    def planned(ws):
        x = jax.ShapeDtypeStruct((512, 64), jnp.float32)
        return unity.optimize(loss_of, ws, x, machine=TREE, progress=False, search="captured", pipeline=unity.PipelineShape(2, 4))

    own = planned([jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 8)
    one = planned(jax.ShapeDtypeStruct((8, 64, 64), jnp.float32))
    assert str(one.program.pipelining) == str(own.program.pipelining)
    assert one.time <= own.time


def test_of_equal_scans_at_one_line_any_may_be_a_pipeline():
    """An encoder and a decoder, say, by one function of the user's."""

    def stack(params, x):
        return lax.scan(lambda c, w: (c + jnp.tanh(c @ w), None), x, params)[0]

    def fn(params, x):
        return (stack(params[1], jnp.sin(stack(params[0], x))) ** 2).mean()

    rng = np.random.default_rng(3)
    args = [jnp.asarray(rng.normal(size=(4, 6, 6)), jnp.float32) for _ in range(2)], jnp.ones((8, 6))
    captured = capture(fn, *args)
    for number in range(2):
        made = pipelined(PipelineSource(captured), 0, number, TREE.axes[:1], 2)
        plan = Plan(
            PlanFamily(fn, made.after, search := Search(made.after.graph, captured.differentiated, TREE, Training()), 0.0),
            search.fastest,
        )
        close(jax.grad(plan)(*args), jax.jit(jax.grad(fn))(*args))


def test_layers_of_few_operators_are_found():
    def fn(params, x):
        for w in params:
            x = x + jnp.tanh(x @ w["up"]) @ w["down"]
        return (x**2).mean()

    params = [{"up": jnp.ones((6, 8)), "down": jnp.ones((8, 6))} for _ in range(7)]
    found = layers(capture(fn, params, jnp.ones((4, 6))))
    assert found is not None
    assert len(found) == 7
    assert (len(found.carried), len(found.shared), len(found.own)) == (1, 0, 2)


def test_where_links_are_fast_none_is_taken():
    plan = unity.optimize(loss, *structs(*arguments()), machine=Machine.grid(1, 8), progress=False)
    assert plan.program.pipelining is None


def test_a_damaged_pipeline_is_refused(tmp_path):
    args = structs(*arguments())
    plan = unity.optimize(loss, *args, machine=TREE, progress=False, pipeline=unity.PipelineShape(2, 4))
    plan.files.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    lost, refused = "lacks the mesh axes", "the pipeline along .* cannot be made"
    for change, message in (({"along": ["x9"]}, lost), ({"scan": 3}, refused), ({"rounds": 5}, refused), ({"rolled": 2}, refused)):
        (tmp_path / "other.json").write_text(json.dumps(sealed(data | {"transformations": [data["transformations"][-1] | change]})))
        with pytest.raises(PlanError, match=message):
            unity.load(tmp_path / "other.json", loss, *args)
    assert plan.program.pipelining is not None
    other = pipelined(PipelineSource(plan.program.pipelining.before), 0, 0, TREE.axes[:1], 4)
    with pytest.raises(DerivationError, match="'pipeline', applied again"):
        replace(plan.program.pipelining, after=other.after).check()


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ((3, 6), "no axes of v100-2x4 make 3 stages"),
        ((4, 6), "6 micro-batches are no multiple of 4 stages"),
        ((2, 6), "6 micro-batches cannot share 16 samples evenly"),
        ((8, 16), "8 stages cannot share 4 steps"),
    ],
)
def test_a_pipeline_that_cannot_be_is_refused_with_the_reason(asked, why):
    args = structs(*arguments(layers=4))
    with pytest.raises(InfeasibleError, match=why) as found:
        unity.optimize(loss, *args, machine=TREE, progress=False, pipeline=unity.PipelineShape(*asked))
    assert "Without pipeline=" in str(found.value)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"pipeline": (2, 4)}, "expected stages and micro-batches"),
        ({"pipeline": unity.PipelineShape(2, 0)}, "expected numbers of stages and micro-batches"),
        ({"pipeline": unity.PipelineShape(2, 4), "pipelines": False}, "do not go together"),
        ({"pipeline": unity.PipelineShape(2, 4), "search": "optcnn"}, "search='optcnn' finds none"),
        ({"pipeline": unity.PipelineShape(2, 4, "zero")}, "the schedule may be '1f1b' or 'gpipe'"),
        ({"pipeline": unity.PipelineShape(2, 4), "constraints": unity.forbid("tensor", across="node")}, "do not go together"),
    ],
)
def test_what_does_not_go_with_a_pipeline_is_said(options: dict[str, Any], why: str):
    with pytest.raises(ValueError, match=why):
        unity.optimize(loss, *structs(*arguments(layers=4)), machine=TREE, progress=False, **options)


def test_many_tensors_of_equal_sizes_may_be_carried():
    def fn(params, xs):
        return sum(x.sum() for x in lax.scan(lambda c, w: (tuple(jnp.tanh(x @ w) for x in c), None), xs, params)[0])

    captured = capture(fn, jnp.ones((4, 8, 8)), tuple(jnp.ones((8, 8)) for _ in range(12)))
    assert [scan.samples for scan in scans(captured)[0]] == [(0,) * 12]


MIXED = {
    "batch_norm": (lambda c, w: ((c - c.mean(0)) * w, None), "over the samples|by itself"),
    "a result of its own": (lambda c, w: (c * w, c.sum()), "leaves a result"),
    "sorted": (lambda c, w: (jnp.sort(c, 0) * w, None), "sort at .*test_pipelines.*by itself"),
}


@pytest.mark.parametrize("name", MIXED)
def test_scans_that_cannot_be_pipelines_say_why(name):
    step, why = MIXED[name]

    def fn(params, x):
        carry, ys = lax.scan(step, x, params)
        return carry.sum() + (0.0 if ys is None else ys.sum())

    captured = capture(fn, jnp.ones((4, 6)), jnp.ones((8, 6)))
    found, refused = scans(captured)
    assert not found
    (reason,) = refused
    assert re.search(why, reason), reason
    assert "test_pipelines.py" in reason


def test_a_scan_over_integers_has_no_layers():
    def picked(weights, x):
        for w in weights["layers"]:
            x = x + jnp.tanh(x @ w)
        edges = jnp.cumsum(jax.nn.softmax(x @ weights["out"]), -1)
        found = jax.vmap(jnp.searchsorted)(edges, jax.nn.sigmoid(x[:, 0]))  # a binary search is a scan of three steps
        return jnp.mean(jnp.take_along_axis(edges, jnp.clip(found, 0, 6)[:, None], 1) * x[:, :1])

    weights = {"layers": [jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32")] * 4, "out": jax.ShapeDtypeStruct((WIDTH, 7), "float32")}
    x = jax.ShapeDtypeStruct((BATCH, WIDTH), "float32")
    assert scans(capture(picked, weights, x))[1][0].endswith("it carries no real numbers, as layers do")
    plan = unity.optimize(picked, weights, x, machine=TREE, progress=False, pipeline=unity.PipelineShape(2, 4), budget=0)
    assert "2 stages of 2 layers" in str(plan)


def test_equal_parts_that_read_each_other_in_other_ways_are_no_layers():
    """Of distances between all pairs of arrays, some parts read an array that the part before reads, too, and some do not."""

    def distances(xs):
        pairs = [(a, b) for k, a in enumerate(xs) for b in xs[:k]]
        return sum(jnp.sum(jnp.sqrt(((a[:, None] - b[None]) ** 2).sum(-1) + 1e-3)) for a, b in pairs)

    xs = [jnp.full((16, 4), 0.1 * k) for k in range(5)]
    run = layers(capture(distances, xs))
    assert run is None or len({len(part.inputs) for part in run.parts}) == 1
    plan = unity.optimize(distances, xs, machine=TREE, progress=False, budget=0)
    np.testing.assert_allclose(plan(xs), distances(xs), rtol=1e-5)


def test_equal_layers_that_mix_samples_are_refused_by_operator():
    def fn(params, x):
        for w in params:
            x = x + jnp.tanh(x @ w)
            x = (x - x.mean(0)) * lax.rsqrt(x.var(0) + 1e-5)
        return (x**2).mean()

    args = structs([jnp.ones((6, 6)) for _ in range(6)], jnp.ones((8, 6)))
    with pytest.raises(InfeasibleError, match=r"test_pipelines.py.*(reduces over the samples|by itself)"):
        unity.optimize(fn, *args, machine=TREE, progress=False, search="captured", pipeline=unity.PipelineShape(2, 4))


def test_the_type_checker_knows_stages():
    """A pipeline whose weights are not divided among the stages, or whose samples are not, is ill-typed."""
    args = arguments()
    captured = capture(loss, *args)
    made = pipelined(PipelineSource(captured), 0, 0, TREE.axes[:1], 2)
    search = Search(made.after.graph, captured.differentiated, TREE, Training())
    graph = parallelize(made.after.graph, search.fastest.assignment)
    check(graph)
    (node,) = [n for n in graph.nodes if n.kind == PIPELINE]
    for position, state in ((0, UNUSED), (1, REPLICATED), (2, partitioned(1))):
        v = node.operands[position]
        wrong = Value(Node("input", (), (v.tensor,), types=((state, *v.type[1:]),)))
        operands = tuple(wrong if p == position else w for p, w in enumerate(node.operands))
        with pytest.raises(ParallelTypeError, match=f"operand {position} is .* what a stage needs"):
            check(_with(graph, node, replace(node, operands=operands)))

    for along, here in (("x9", "no axis"), ("n0 d0", "node device_a")):
        wrong = replace(node, payload=msgspec.structs.replace(node.of(Pipeline), along=tuple(along.split())))
        text = f"a pipeline of 2 stages along {here} of the mesh node=2 device_a=2 device_b=2: expected axes of 2 devices, got"
        with pytest.raises(ParallelTypeError, match=text):
            check_by_names(_with(graph, node, wrong), AxisNames.of_every_axis(graph.axes, TREE.named_levels))


def _with(graph: PCG, old: Node, new: Node) -> PCG:
    """A graph that ends with another node."""
    return PCG(graph.inputs, tuple(Value(new, k) for k in range(len(new.tensors))), graph.axes)


def test_ticks_and_the_bubble():
    schedule = Schedule(stages=4, micro_batches=16, steps=24)
    assert (schedule.ticks, schedule.runs) == (19, 19 * 6)
    assert schedule.bubble == pytest.approx(3 / 19)


def test_a_pipeline_idles_no_longer_than_its_schedule_says():
    """Compute time against the same graph's without a pipeline: only by the ticks that fill and drain it."""
    args = structs(*arguments(layers=16, batch=256, seq=8, width=64))
    compute = Machine.grid(1, 8, device=Device("d", {"float32": 1e9}, 10**10, 1e12, 0.9, 0.0), intra=(1e15, 0.0), inter=(1e15, 0.0))
    captured = capture(loss, *args)
    alone = Search(captured.graph, captured.differentiated, compute, Training()).fastest
    for stages, rounds in ((2, 4), (4, 2), (4, 4), (8, 2)):
        along = compute.axes[: {2: 1, 4: 2, 8: 3}[stages]]
        plan = planned(loss, args, compute, along, rounds)
        simulated = simulate(plan.program.pcg, compute, captured.differentiated).makespan
        bubble = Schedule(stages, stages * rounds, 16).bubble
        assert 1 - alone.time / simulated <= bubble + 0.05


def test_stages_lie_along_some_of_a_level_or_whole_outer_ones():
    found = {tuple(a.name for a in axes) for row in axis_ladders(Machine.grid(4, 6)) for axes in row}
    assert {("n0",), ("n0", "n1"), ("d0",), ("d1",), ("d0", "d1"), ("n0", "n1", "d0")} <= found
    assert found.isdisjoint({("n1",), ("n0", "d0")})


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 2))
@settings(max_examples=fewer(6), deadline=None)
def test_samples_are_split_and_joined(parts, rows, dim):
    shape = [2, 3, 4]
    shape[dim] = parts * rows
    x = jnp.arange(np.prod(shape)).reshape(shape)
    found = split(x, dim, parts)
    assert found.shape == (parts, *(rows if d == dim else n for d, n in enumerate(shape)))
    assert (joined(found, dim) == x).all()
    assert (found[0] == lax.slice_in_dim(x, 0, None, parts, dim)).all()


@given(st.booleans(), st.integers(0, 3))
@settings(max_examples=fewer(6), deadline=None)
def test_guarded_work_has_the_gradient_of_what_was_done(works, seed):
    rng = np.random.default_rng(seed)
    a, b, w = (jnp.asarray(rng.normal(size=(4, 4)), jnp.float32) for _ in range(3))
    count = jnp.asarray(seed)

    def work(parts, weights):
        return jnp.sin(parts[0] @ weights[0]) * parts[2], parts[1] * 2.0, parts[2] + 1

    def total(run):
        return lambda a, b, w: sum(x.astype(jnp.float32).sum() for x in run(a, b, w))

    found = total(lambda a, b, w: guarded(work, jnp.asarray(works), (a, b, count), (w,)))
    wanted = total(lambda a, b, w: work((a, b, count), (w,)) if works else (a, b, count))
    close(jax.value_and_grad(found, (0, 1, 2))(a, b, w), jax.jit(jax.value_and_grad(wanted, (0, 1, 2)))(a, b, w))


def test_weights_are_not_kept_for_every_tick():
    """The gradient of a pipeline keeps what its stages keep, and weights once."""
    args = arguments(layers=4, batch=16, width=64)
    plan = planned(loss, args, TREE, TREE.axes[:1], 4)
    held = plan.inspect.memory_timeline()
    weights = sum(x.nbytes for x in jax.tree.leaves(args[0]["layers"]))
    activations = 4 * 16 * SEQ * 64 * 4
    assert held.step < 8 * weights / 2 + 60 * activations
    counts = [c.count for c in traffic(plan.program.pcg, range(5)) if c.kind == "collective-permute"]
    assert counts == [3 * 9, 3 * 9]


def test_stages_that_cannot_divide_a_tensor_are_passed_over():
    """Heads of a few rows each: a micro-batch is too small for the axes of the most stages."""

    def attend(x, p):
        q = (x @ p["up"]).reshape(4, 16, 4, 8)
        weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, q))
        return x + jnp.einsum("bhts,bshd->bthd", weights, q).reshape(64, 32) @ p["down"], None

    def total(params, x):
        return jnp.mean(lax.scan(jax.checkpoint(attend), x, params)[0] ** 2)

    params = {"up": jax.ShapeDtypeStruct((4, 16, 32), "float32"), "down": jax.ShapeDtypeStruct((4, 32, 16), "float32")}
    x, machine = jax.ShapeDtypeStruct((64, 16), "float32"), Machine.grid(1, 8, "h200")
    plan, without = (
        unity.optimize(total, params, x, machine=machine, budget=0, progress=False, pipelines=p) for p in (True, False)
    )
    assert plan.time <= without.time
