"""Pipelines of stages of different operators and shapes: the same values and gradients, and what was predicted is what runs."""

import io
import itertools
import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import by_hand, fewer
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec
from stepped import stepped
from unlike_models import MODELS, SQUARE, TREE, largest_difference, mlp, mlp_arguments, planned, translated, translated_arguments

import unity
from unity import Device
from unity.base.errors import DerivationError, InfeasibleError, ParallelTypeError, PlanError
from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture
from unity.pcg.ir.graph import PCG, PIPELINE, STAGES
from unity.pcg.ir.program import Tensor
from unity.pcg.local.interpreter import run_body
from unity.pcg.parallel.check import check
from unity.pcg.parallel.stages import GPIPE, ONE_F_ONE_B, Mixed
from unity.pcg.parallel.traffic import traffic
from unity.pcg.types.parallel_type import UNUSED
from unity.plan.files.plan_file import sealed
from unity.search.cost.prediction import predict
from unity.transforms.pipelining.unlike.balance import Cuts, Loads, cut, estimated
from unity.transforms.pipelining.unlike.buffers import layouts
from unity.transforms.pipelining.unlike.chain import chain_of
from unity.transforms.pipelining.unlike.pipelining import unlike
from unity.transforms.splice import with_nodes

ADDING = ("all-reduce", "reduce-scatter")

pytestmark = pytest.mark.usefixtures("own_cache")


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


CASES = [("mlp", TREE, 2, True), ("translated", SQUARE, 1, True), *by_hand(("vgg", SQUARE, 1, False))]


@pytest.mark.parametrize(("model", "machine", "axes", "pack"), CASES)
def test_values_and_gradients_are_the_functions_and_traffic_is_the_plans(model, machine, axes, pack):
    fn, arguments = MODELS[model]
    with jax.enable_x64(True):
        args = arguments()
        plan = planned(fn, args, machine.axes[:axes], pack=pack, machine=machine)
        step, checked = stepped(plan, *args)
        assert largest_difference(step, jax.jit(jax.value_and_grad(fn))(*args)) < 1e-10
        plan.program.check_derivation()
    assert all(line.predicted == line.compiled for line in checked.lines), checked


@pytest.mark.parametrize("model", MODELS)
def test_in_micro_batches_the_program_is_the_same(model):
    fn, arguments = MODELS[model]
    with jax.enable_x64(True):
        args = arguments()
        captured = capture(fn, *args)
        chain = chain_of(captured)
        _, cuts = estimated(Loads(chain, TREE, True), TREE.axes[:2], 8)
        walk = unlike(chain, captured, cuts, TREE.axes[:2], 2, False).walk.captured
        leaves = [*jax.tree.leaves(args), *walk.consts]
        (found,) = jax.jit(lambda *xs: run_body(walk.body, xs, [()] * len(xs), [()], ()))(*leaves)
        np.testing.assert_allclose(found, jax.jit(fn)(*args), rtol=1e-12)


def test_only_a_stages_own_devices_hold_packed_weights():
    args = mlp_arguments()
    plan = planned(mlp, args, TREE.axes[:1], pack=True)
    weights = jax.tree.leaves(plan.shard(*args)[0])
    for x in weights:
        if x.size:
            assert "n0" in str(x.sharding.spec[0])
    for own, wanted in zip(jax.tree.leaves(plan.shard.unpack(plan.shard(*args)[0])), jax.tree.leaves(args[0]), strict=True):
        np.testing.assert_array_equal(own, wanted)
    found = (traffic(p.program.pcg, p.program.family.captured.differentiated) for p in (plan, planned(mlp, args, TREE.axes[:1])))
    added = ([c.elements for c in some if c.direction == "backward" and c.kind in ADDING and 0 in c.axes] for some in found)
    packed, whole = map(sum, added)
    assert packed <= 1 < whole  # no gradient of a weight crosses stages


@pytest.mark.parametrize("kind", [GPIPE, ONE_F_ONE_B])
def test_a_plan_is_saved_and_made_again(tmp_path, kind):
    args = mlp_arguments()
    plan = unity.optimize(
        mlp, *args, machine=TREE, pipeline=unity.PipelineShape(2, 4, kind), pack=True, progress=False, search="captured"
    )
    assert "2 stages of different operators" in str(plan.program.pipelining)
    assert kind.label in str(plan.program.pipelining)
    plan.files.save(tmp_path / "plan.json")
    again = unity.load(tmp_path / "plan.json", mlp, *args)
    assert again.program.pcg.key == plan.program.pcg.key
    assert str(again.program.pipelining) == str(plan.program.pipelining)
    out = io.StringIO()
    plan.explain(file=out)
    assert "stages of different operators" in out.getvalue()
    assert plan.inspect.simulate().makespan == pytest.approx(plan.time, rel=0.05)
    data = json.loads((tmp_path / "plan.json").read_text())
    data["transformations"][0]["cuts"]["places"] = [99]
    (tmp_path / "plan.json").write_text(json.dumps(sealed(data)))
    with pytest.raises(PlanError, match="cannot be made"):
        unity.load(tmp_path / "plan.json", mlp, *args)


def test_a_pinned_argument_is_not_packed(tmp_path):
    args = mlp_arguments()
    options = {"machine": TREE, "search": "captured", "pipeline": unity.PipelineShape(2, 4), "pack": True, "progress": False}
    plan = unity.optimize(mlp, *args, **options, constraints=unity.pin("params[2][0]", PartitionSpec("device", None)))
    assert plan.in_shardings[0][2][0].spec == PartitionSpec(("d0", "d1"), None)
    packed = {plan.program.family.captured.paths[k] for s in plan.program.packing.slots for k in s.leaves if k is not None}
    assert packed
    assert "args[0][2][0]" not in packed
    free = unity.optimize(mlp, *args, **options)
    assert "args[0][2][0]" in {
        free.program.family.captured.paths[k] for s in free.program.packing.slots for k in s.leaves if k is not None
    }
    value, gradient = jax.jit(jax.value_and_grad(plan))(*plan.shard(*args))
    assert largest_difference((value, plan.shard.unpack(gradient)), jax.jit(jax.value_and_grad(mlp))(*args)) < 1e-5
    plan.files.save(tmp_path / "plan.json")
    assert unity.load(tmp_path / "plan.json", mlp, *args).program.pcg.key == plan.program.pcg.key


def test_what_is_predicted_is_what_was_searched_for():
    plan = planned(translated, translated_arguments(), pack=True, axes=SQUARE.axes[:1], machine=SQUARE)
    found = predict(plan.program.pcg, SQUARE, plan.program.family.captured.differentiated)
    assert found.time == pytest.approx(plan.time, rel=1e-9)


def test_weights_may_be_split_inside_of_stages():
    """With few samples and large products, devices of one stage share its weights: their collectives stay in the stage."""
    widths = (64, 256, 32, 128, 64)
    params = [(array(a, b), array(b)) for a, b in itertools.pairwise(widths)]
    slow = Device("slow", {"float32": 1e9}, 10**9, 1e9, 0.5, 0.0)
    machine = Machine.grid(2, 4, device=slow, intra=(1e12, 1e-9), inter=(1e10, 1e-6))
    args = params, array(4, widths[0]), array(4, widths[-1])
    plan = planned(mlp, args, machine.axes[:1], rounds=1, pack=True, machine=machine)
    (stages,) = [n.inside for n, _ in plan.program.pcg.walk() if n.kind == STAGES]
    assert stages is not None
    split = {s for n in stages.nodes if n.kind == "dot_general" for s in n.operands[1].type[1:]}
    assert {s.kind for s in split} & {"P"}
    inside = [c for c in traffic(plan.program.pcg, plan.program.family.captured.differentiated) if c.part < 1]
    assert inside
    assert all(0 not in c.axes for c in inside)


def test_without_gradients_nothing_is_kept_or_sent_back():
    args = mlp_arguments()
    asked = {"pipeline": unity.PipelineShape(2, 4), "pack": True, "training": False}
    plan = unity.optimize(mlp, *args, machine=SQUARE, progress=False, search="captured", **asked)
    np.testing.assert_allclose(plan(*plan.shard(*args)), mlp(*args), rtol=1e-5)
    assert all(line.predicted == line.compiled for line in plan.check().lines)


def test_stages_find_operands_as_they_are_outside():
    plan = planned(mlp, mlp_arguments())
    (pipeline,) = [n for n in plan.program.pcg.nodes if n.kind == PIPELINE]
    assert pipeline.inside is not None
    (stages,) = [n for n in pipeline.inside.nodes if n.kind == STAGES]
    assert stages.inside is not None
    check(plan.program.pcg)
    first, *others = stages.inside.inputs
    wrong = PCG((replace(first, types=((UNUSED,) * len(TREE.axes),)), *others), stages.inside.outputs, TREE.axes)
    inside = with_nodes(pipeline.inside, {id(stages): replace(stages, inside=wrong)})
    with pytest.raises(ParallelTypeError, match=r"stages: operand 0 is .* outside and .* inside"):
        check(with_nodes(plan.program.pcg, {id(pipeline): replace(pipeline, inside=inside)}))


def test_a_pipeline_that_is_not_made_again_is_refused():
    captured = capture(mlp, *mlp_arguments())
    chain, cuts = chain_of(captured), Cuts((6,), 0.5)
    one, other = (unlike(chain, captured, cuts, TREE.axes[:1], rounds, False) for rounds in (1, 2))
    one.check()
    with pytest.raises(DerivationError, match="leads to another program"):
        replace(one, after=other.after).check()


def batch_normalized(params, x, y):
    for w, _ in params:
        x = x @ w
        x = jnp.tanh((x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-3))
    return ((x - y) ** 2).mean()


def positioned(params, x, y):
    for w, b in params:
        x = jnp.tanh(x @ w + b) * (1 + jnp.arange(x.shape[0]))[:, None]
    return ((x - y) ** 2).mean()


def looped(params, x, y):
    for w, b in params:
        x = lax.scan(lambda c, _: (jnp.tanh(c), None), x @ w + b, None, 3)[0]
    return ((x - y) ** 2).mean()


REFUSED = {
    "batch norm": (batch_normalized, (2, 4), r"reduce_sum at .*:\d+.* does not work on each sample by itself"),
    "positions": (positioned, (2, 4), "depends on where a sample stands in the batch"),
    "samples": (mlp, (2, 32), "32 micro-batches cannot share 16 samples evenly"),
    "operators": (mlp, (8, 8), "8 stages cannot share 5 products and convolutions"),
    "schedule": (mlp, (2, 4, "2bw"), "by '1f1b' or 'gpipe', not by '2bw'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_with_the_reason(case):
    fn, asked, reason = REFUSED[case]
    with pytest.raises(InfeasibleError, match=reason):
        unity.optimize(fn, *mlp_arguments(), machine=TREE, pipeline=unity.PipelineShape(*asked), progress=False, search="captured")


def test_loops_are_in_no_stage():
    with pytest.raises(Mixed, match=r"scan at .*:\d+.* is a loop inside of the steps"):
        planned(looped, mlp_arguments())


def test_a_chain_ends_where_samples_meet():
    def fn(params, x, y):
        x = jnp.tanh(x @ params[0][0])
        return ((x - x.mean(0)) @ params[1][0]).sum() + y.sum()

    chain = chain_of(capture(fn, *mlp_arguments()))
    assert chain.heavy == 1
    assert chain.size == 16
    assert "reduce_sum" in chain.end


def test_without_samples_there_is_no_chain():
    with pytest.raises(Mixed, match="no argument has samples"):
        chain_of(capture(lambda w, x: (w @ w).sum() + x, jnp.ones((3, 3)), 1.0))


@given(st.data())
@settings(max_examples=fewer(8))
def test_buffers_give_what_was_put_in(data):
    size = data.draw(st.sampled_from([1, 2, 6]))
    tensors, samples = {}, {}
    for v in range(data.draw(st.integers(1, 5))):
        others = data.draw(st.lists(st.integers(1, 3), max_size=2))
        samples[v] = data.draw(st.integers(0, len(others)))
        shape = [*others[: samples[v]], size * data.draw(st.integers(1, 2)), *others[samples[v] :]]
        tensors[v] = Tensor(tuple(shape), jnp.dtype(data.draw(st.sampled_from(["float32", "int32", "bool", "bfloat16"]))))
    cuts = [data.draw(st.lists(st.sampled_from(sorted(tensors)), unique=True)), sorted(tensors)]
    rng = np.random.default_rng(0)
    values = {v: jnp.asarray(rng.integers(2, size=t.shape), t.dtype) for v, t in tensors.items()}
    for layout in layouts(cuts, tensors, samples, size):
        for kind, own in layout.of_kind.items():
            if not own:
                continue
            rows = jax.jit(partial(layout.packed, kind))(values)
            assert rows.shape == (size, layout.widths[kind])
            for v, x in zip(own, jax.jit(partial(layout.unpacked, kind))(rows), strict=True):
                assert x.dtype == values[v].dtype
                np.testing.assert_array_equal(x, values[v])


@given(st.lists(st.integers(0, 9), min_size=2, max_size=9), st.integers(2, 4), st.data())
def test_cuts_are_the_best_there_are(loads, stages, data):
    until = np.cumsum([0.0, *loads])
    places = sorted(data.draw(st.sets(st.integers(1, len(loads) - 1))))
    found = cut(until, places, stages)
    options = [(0, *some, len(loads)) for some in itertools.combinations(places, stages - 1)]
    if not options:
        assert found is None
        return
    assert found is not None
    chosen, slowest = found

    def largest(ends):
        return max(until[b] - until[a] for a, b in itertools.pairwise(ends))

    assert set(chosen) <= set(places)
    assert largest((0, *chosen, len(loads))) == slowest == min(map(largest, options))
