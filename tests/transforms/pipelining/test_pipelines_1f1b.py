"""1F1B: the gradients of the whole program, a bounded number of micro-batches held, what was predicted sent; clear refusals."""

import re
from dataclasses import replace
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import CI, by_hand
from jax import lax
from pipelined_models import LAYERS, TREE, WIDTH, WORDS, close, language, layers, loss, planned, scored, structs
from small_models import random_point
from stepped import stepped

import unity
from unity.base.errors import InfeasibleError, OptionError, ParallelTypeError
from unity.exec.pipelines.one_forward_one_backward import scaled
from unity.pcg.capture.capture import capture
from unity.pcg.ir.graph import PCG, PIPELINE, TAIL, Node, Value
from unity.pcg.parallel.check import check
from unity.pcg.parallel.stages import GPIPE, ONE_F_ONE_B, SCHEDULES, TWO_BW, Mixed, Schedule
from unity.pcg.parallel.traffic import traffic
from unity.pcg.types.parallel_type import REPLICATED, UNUSED, partitioned
from unity.plan.plan import Plan
from unity.search.cost.prediction import predict
from unity.transforms.pipelining import PipelineSource, pipelined
from unity.transforms.strided_micro_batches import split


def arguments(batch=64, count=LAYERS, width=WIDTH, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"in": (width, width), "layers": (count, width, width), "out": (width, 3)}
    params = {name: jnp.asarray(rng.normal(size=s) / np.sqrt(width), jnp.float32) for name, s in shapes.items()}
    return params, *(jnp.asarray(rng.normal(size=(batch, n)), jnp.float32) for n in (width, 3))


def exact(plan: Plan, gradient=True):
    """The compiled program sends just what was predicted."""
    assert all(line.predicted == line.compiled for line in plan.check(gradient=gradient).lines)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 8), (4, 4), *by_hand((2, 4), (4, 8))])
def test_gradients_are_those_of_the_program(stages, micro_batches):
    args = arguments()
    plan = planned(loss, args, stages, micro_batches)
    close(jax.jit(jax.value_and_grad(plan))(*args), jax.jit(jax.value_and_grad(loss))(*args))
    assert plan.time == pytest.approx(predict(plan.program.pcg, TREE, [0, 1, 2]).time, rel=1e-9)


def test_what_is_sent_was_predicted():
    exact(planned(loss, structs(*arguments()), 4, 8))


def test_eight_stages_and_one_round():
    args = arguments(count=8)
    plan = planned(loss, args, 8, 8)
    close(jax.jit(jax.value_and_grad(plan))(*args), jax.jit(jax.value_and_grad(loss))(*args))


def test_weights_may_be_divided_inside_of_stages():
    """The leanest plan has them in pieces, and either gathers them in every tick, or adds up products."""
    args = arguments(batch=16, width=32)
    plan = planned(loss, args, 2, 4, leanest=True)
    (node,) = [n for n in plan.program.pcg.nodes if n.kind == PIPELINE]
    assert {state.kind for state in node.operands[-1].type[1:]} == {"P"}
    close(jax.jit(jax.value_and_grad(plan))(*args), jax.jit(jax.value_and_grad(loss))(*args))
    exact(plan)


def test_without_a_gradient_every_stage_computes_the_tail_of_its_own_samples():
    args = arguments()
    plan = planned(loss, args)
    close(jax.jit(plan)(*args), loss(*args))
    exact(plan, gradient=False)


def test_training_has_the_same_losses():
    args = arguments()

    def trained(fn):
        step = jax.jit(lambda params: jax.jit(jax.value_and_grad(fn))(params, *args[1:]))
        params, losses = args[0], []
        for _ in range(50):
            value, gradient = step(params)
            params = jax.tree.map(lambda p, g: p - 0.05 * g, params, gradient)
            losses.append(float(value))
        return losses

    found, wanted = trained(planned(loss, args, 4, 8)), trained(loss)
    assert wanted[-1] < 0.7 * wanted[0]
    np.testing.assert_allclose(found, wanted, rtol=1e-4)


def test_a_language_model_with_all_that_is_around_it():
    rng = np.random.default_rng(1)
    params = {"words": rng.normal(size=(WORDS, WIDTH)), "layers": rng.normal(size=(LAYERS, WIDTH, WIDTH)) / 3}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    tokens, target = (jnp.asarray(rng.integers(WORDS, size=(16, 4))) for _ in range(2))
    args = (params, tokens, target, jnp.asarray(rng.integers(2, size=(16, 4)), bool))
    plan = planned(language, args, 2, 4)
    (value, right), gradients = jax.jit(jax.value_and_grad(plan, has_aux=True))(*args)
    (wanted, also), others = jax.jit(jax.value_and_grad(language, has_aux=True))(*args)
    close((value, gradients), (wanted, others))
    assert int(right) == int(also)
    exact(plan)


@pytest.mark.parametrize("argnums", [2, (0, 1, 2)])
def test_whatever_a_gradient_is_taken_for_it_is_right(argnums):
    """Of what the plan was made for, the weights, and of what it was not."""
    params, x, _ = arguments()
    y = {"by": jnp.cos(x), "to": jnp.sin(jnp.arange(WIDTH * 2.0).reshape(WIDTH, 2))}
    plan = planned(scored, (params, x, y), 2, 4, argnums=0)
    close(jax.jit(jax.grad(plan, argnums))(params, x, y), jax.jit(jax.grad(scored, argnums))(params, x, y), 1e-4)


def test_gradients_of_all_that_is_read_go_home():
    params, x, _ = structs(*arguments())
    y = {"by": x, "to": jax.ShapeDtypeStruct((WIDTH, 2), jnp.float32)}
    exact(planned(scored, (params, x, y), 2, 4, argnums=(0, 1, 2)))


def test_a_gradient_of_something_else_multiplies():
    args = arguments()
    plan = planned(loss, args)

    def found(fn):
        return jax.jit(jax.grad(lambda params: jnp.sin(3 * fn(params, *args[1:])) + fn(params, *args[1:]) ** 2))(args[0])

    close(found(plan), found(loss), 1e-4)


@pytest.mark.usefixtures("as_users_compile")
def test_more_micro_batches_hold_no_more_and_what_is_held_was_predicted():
    """Twice the micro-batches, of 4 samples, cost what waits of their samples; under GPipe also all that is kept of them."""
    checked = {}
    for kind in SCHEDULES:
        for micro_batches in (8, 16):
            plan = planned(loss, structs(*arguments(batch=16 * micro_batches, count=8, width=32)), 2, micro_batches, kind=kind)
            checked[kind, micro_batches] = plan.check()
    row = 8 * 16 // 4 // 2 * 32 * 4  # bytes of the samples of 8 micro-batches on one device, as they are carried
    more = {kind: checked[kind, 16].memory.temporaries - checked[kind, 8].memory.temporaries for kind in SCHEDULES}
    assert more[ONE_F_ONE_B] <= 5 * row
    assert more[GPIPE] >= 8 * row
    for found in checked.values():
        assert found.timeline.step == pytest.approx(found.memory.total, rel=0.35)


def test_the_schedule_bounds_what_is_held():
    one = Schedule(4, 16, 24, ONE_F_ONE_B)
    assert (one.ticks, one.buffered_micro_batches, one.residual_steps, one.bubble) == (19, 4, 30, 3 / 19)
    assert Schedule(4, 4, 24, ONE_F_ONE_B).buffered_micro_batches == 4
    assert Schedule(4, 16, 24, GPIPE).buffered_micro_batches == 19


def test_under_a_limit_a_plan_is_found_that_gpipe_has_not(tmp_path):
    args = structs(*arguments(batch=512, count=8, width=32))
    least = {k: planned(loss, args, 4, 16, kind=k).program.family.search.leanest.memory for k in (ONE_F_ONE_B, GPIPE)}
    limit = (least[ONE_F_ONE_B] + least[GPIPE]) / 2
    options: dict[str, Any] = {"machine": TREE, "progress": False, "search": "captured", "memory_limit": limit, "recompute": False}
    plan = unity.optimize(loss, *args, **options, pipeline=unity.PipelineShape(4, 16))
    assert plan.memory <= limit
    assert str(plan.program.pipelining).endswith("16 micro-batches, 1F1B")
    with pytest.raises(InfeasibleError):
        unity.optimize(loss, *args, **options, pipeline=unity.PipelineShape(4, 16, "gpipe"))
    plan.program.check_derivation()
    plan.files.save(tmp_path / "plan.json")
    again = unity.load(tmp_path / "plan.json", loss, *args)
    assert again.program.pcg.key == plan.program.pcg.key
    assert str(again.program.pipelining) == str(plan.program.pipelining)


def test_the_simulator_takes_as_long_as_predicted():
    """With micro-batches one after the other in every tick nothing overlaps but weights' gradients and what follows."""
    plan = planned(loss, structs(*arguments()), 2, 8)
    assert plan.inspect.simulate().makespan == pytest.approx(plan.time, rel=0.05)


@pytest.mark.parametrize(("stages", "exchanges"), [(2, 1), (4, 2)])
def test_messages_are_counted(stages, exchanges):
    """After each half of a tick in which there are pairs, what they work on, what passes by, and what the tail reads."""
    plan = planned(loss, structs(*arguments()), stages, 8)
    counts = {(c.node.kind, c.direction): c.count for c in traffic(plan.program.pcg, range(5)) if c.kind == "collective-permute"}
    ticks = 8 + stages - 1
    assert counts == {(PIPELINE, "forward"): 2 * exchanges * ticks, (TAIL, "forward"): exchanges * ticks}


@jax.custom_vjp
def clipped(x):
    """Its gradients are clipped, so that those for twice the cotangent are not twice as large."""
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))

MIXED = {
    "batch norm": (lambda x, p: (((x - x.mean(0)) / x.std(0)) ** 2).mean(), "needs a sum over all samples|by itself"),
    "contrast": (lambda x, p: jax.nn.log_softmax(x @ x.T).trace(), "by itself"),
    "maximum": (lambda x, p: (x * p).max(), "by itself|the max over"),
    "no sum": (lambda x, p: ((x * p).sum(), x), "no sum over them|result of the function"),
    "two sums": (lambda x, p: (x * p).sum() * (x**2).sum(), "of the sums .* one must have a gradient, but .* have one"),
    "a vector": (lambda x, p: (x.sum(0) ** 2).sum(), "is the last that adds up over the samples, and no scalar"),
    "a clipped gradient": (lambda x, p: (clipped(x * p) ** 2).sum(), "derivative rule that is not known to be linear"),
    "a position": (lambda x, p: (x * jnp.arange(8.0)[:, None] * p).sum(), "where a sample stands"),
}


@pytest.mark.parametrize("name", MIXED)
def test_losses_that_do_not_add_up_are_refused_by_operator(name):
    end, why = MIXED[name]

    def fn(params, x):
        return end(lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, params["layers"])[0], params["p"])

    args = {"layers": jnp.ones((4, 6, 6)), "p": jnp.ones(6)}, jnp.ones((8, 6))
    program = PipelineSource(capture(fn, *args))
    with pytest.raises(Mixed, match=why) as found:
        pipelined(program, 0, 0, TREE.axes[:1], 2, ONE_F_ONE_B)
    if name not in ("a position", "no sum"):
        assert "test_pipelines_1f1b.py" in str(found.value)
    assert pipelined(program, 0, 0, TREE.axes[:1], 2).schedule.kind == GPIPE


def with_a_metric(params, x, y):
    """A part of a loss that is only returned, though it has a gradient."""
    found = layers(params, x @ params["in"]) @ params["out"]
    return ((found - y) ** 2).mean(), {"z": jnp.sqrt((jax.nn.logsumexp(found, -1) ** 2).mean()), "count": y.sum()}


def test_auxiliary_results_have_no_gradient():
    args = arguments(batch=16)
    plan = planned(with_a_metric, args)
    found, wanted = (jax.jit(jax.value_and_grad(fn, has_aux=True))(*args) for fn in (plan, with_a_metric))
    close(found, wanted)
    exact(plan)


def test_who_differentiates_an_auxiliary_result_is_told():
    args = arguments(batch=16)
    plan = planned(with_a_metric, args)

    def both(params):
        value, metrics = plan(params, *args[1:])
        return value + 0.1 * metrics["z"]

    with pytest.raises(OptionError, match=r"(?s)expected gradients of the plan's first result alone, .* schedule='gpipe'"):
        jax.jit(jax.grad(both))(args[0])
    close(jax.jit(plan)(*args), with_a_metric(*args))  # values are all there
    plan = planned(with_a_metric, args, kind=GPIPE)
    found = jax.jit(jax.grad(both))(args[0])
    plan = with_a_metric
    close(found, jax.jit(jax.grad(both))(args[0]))


def test_a_plan_may_be_recomputed_after_it_was_differentiated_otherwise():
    """JAX joins traces of derivative rules for other differentiated operands."""
    args = arguments(batch=16)
    plan = planned(with_a_metric, args, argnums=(0, 1))
    jax.jit(jax.value_and_grad(plan, (0, 1), has_aux=True))(*args)
    jax.jit(jax.grad(lambda *args: 2 * plan(*args)[0]))(*args)
    found, wanted = (jax.jit(jax.value_and_grad(fn, (0, 1), has_aux=True))(*args) for fn in (jax.checkpoint(plan), with_a_metric))
    close(found, wanted)


def test_parts_of_a_loss_are_added_up_before_their_sum():
    def apart(params, x, y):
        z = jax.nn.logsumexp(layers(params, x), -1)
        weights = z > 2.0
        return (z * weights).sum() / weights.sum() + 0.1 * (z**2 * weights).sum() / weights.sum()

    def together(params, x, y):
        z = jax.nn.logsumexp(layers(params, x), -1)
        weights = z > 2.0
        return ((z + 0.1 * z**2) * weights).sum() / weights.sum()

    args = arguments(batch=16)
    with pytest.raises(Mixed, match=re.escape("sum(a + c * b) / n for sum(a) / n + c * sum(b) / n")):
        planned(apart, args)
    close(jax.jit(jax.grad(planned(together, args)))(*args), jax.jit(jax.grad(apart))(*args))


def test_a_loss_of_labels_picked_by_row_adds_up_over_micro_batches():
    def fn(params, x, y):
        h = lax.scan(lambda c, w: (jax.nn.relu(c @ w), None), x, params["layers"])[0]
        return ((jax.nn.log_softmax(h * params["p"])[jnp.arange(8), y] - 1) ** 2).mean()

    args = {"layers": jnp.ones((4, 6, 6)), "p": jnp.ones(6)}, jnp.ones((8, 6)), jnp.arange(8) % 6
    assert pipelined(PipelineSource(capture(fn, *args)), 0, 0, TREE.axes[:1], 2, ONE_F_ONE_B).schedule.kind == ONE_F_ONE_B


def test_where_it_cannot_be_gpipe_is_taken_and_explained(capsys):
    def fn(params, x, y):
        found = layers(params, x @ params["in"]) @ params["out"] - y
        return ((found - found.mean(0)) ** 2).mean()

    args = structs(*arguments())
    options: dict[str, Any] = {"machine": TREE, "progress": False, "search": "captured"}
    plan = unity.optimize(fn, *args, **options, pipeline=unity.PipelineShape(2, 4))
    assert str(plan.program.pipelining).endswith("GPipe")
    plan.explain()
    assert "not by 1F1B: " in capsys.readouterr().out
    with pytest.raises(InfeasibleError, match=r"test_pipelines_1f1b.py"):
        unity.optimize(fn, *args, **options, pipeline=unity.PipelineShape(2, 4, "1f1b"))
    with pytest.raises(ValueError, match="the schedule may be '1f1b' or 'gpipe' or '2bw'"):
        unity.optimize(fn, *args, **options, pipeline=unity.PipelineShape(2, 4, "3bw"))


def test_the_type_checker_knows_tails():
    """A tail whose results are no partial sums is ill-typed, and one whose weights are not the same on all stages."""
    graph = planned(loss, structs(*arguments())).program.pcg
    check(graph)
    (node,) = [n for n in graph.nodes if n.kind == TAIL]
    check(_ending(graph, node))
    with pytest.raises(ParallelTypeError, match="adds up micro-batches"):
        check(_ending(graph, replace(node, types=((REPLICATED, *node.types[0][1:]),))))
    weight = node.operands[0]
    other = Value(Node("input", (), (weight.tensor,), types=((partitioned(0), *weight.type[1:]),)))
    with pytest.raises(ParallelTypeError, match=r"operand 0 is .* what a stage needs"):
        check(_ending(graph, replace(node, operands=(other, *node.operands[1:]))))


def _ending(graph: PCG, node: Node) -> PCG:
    """A graph that ends with one operator, whose sums are taken."""
    end = Node("reduce", (Value(node),), node.tensors, types=((UNUSED,) * len(graph.axes),))
    return PCG(graph.inputs, (Value(end),), graph.axes)


@pytest.mark.parametrize(("parts", "rows", "block", "dim"), [(4, 2, 3, 0), (2, 1, 5, 1), (3, 4, 1, 2)])
def test_merged_samples_stay_together(parts, rows, block, dim):
    shape = [2, 3, 4]
    shape[dim] = parts * rows * block
    x = np.arange(np.prod(shape)).reshape(shape)
    found = split(jnp.asarray(x), dim, parts, parts * rows)
    apart = x.reshape(*shape[:dim], rows, parts, block, *shape[dim + 1 :])
    wanted = np.moveaxis(apart, dim + 1, 0).reshape(found.shape)
    np.testing.assert_array_equal(found, wanted)


def test_what_is_the_same_on_all_devices_stays_so_when_it_is_scaled():
    """The loss's gradient is the same everywhere, but JAX takes it to differ."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def run(x):
        same, own = scaled([jnp.ones(2), x], 0 * x.sum() + 3, ())
        return same, own

    spec = jax.sharding.PartitionSpec("d")
    same, own = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=(jax.sharding.PartitionSpec(), spec))(jnp.arange(8.0))
    np.testing.assert_array_equal(same, 3 * np.ones(2))
    np.testing.assert_array_equal(own, 3 * np.arange(8.0))


@pytest.mark.parametrize("kind", [ONE_F_ONE_B, TWO_BW])
def test_of_a_replicated_loss_the_gradient_is_a_partial_sum(kind):
    """What goes back through sums inside of stages is the gradient of the one loss, not of every device's copy."""
    args = arguments(batch=16)
    plan = planned(loss, args, 2, 4, kind=kind)
    search = plan.program.family.search
    drawn = (search.candidate(search.assembled, random_point(search.assembled, np.random.default_rng(k))) for k in range(200))
    drawn = (Plan(plan.program.family, candidate) for candidate in drawn)
    count = 1 if CI else 2
    plans = [*islice((one for one in drawn if REPLICATED in next(tails(one)).types[0]), count)]
    assert len(plans) == count
    wanted = jax.jit(jax.value_and_grad(lambda *a: 3 * loss(*a)))(*args)
    for one in plans:
        if kind == TWO_BW:
            found, _ = stepped(one, *args)
            close(jax.tree.map(lambda g: 3 * g, found), wanted)
        else:
            close(jax.jit(jax.value_and_grad(lambda *a, one=one: 3 * one(*a)))(*args), wanted)
            exact(one)


def tails(plan):
    return (node for node in plan.program.pcg.nodes if node.kind == TAIL)


def test_gradients_that_are_not_wanted_are_not_made():
    found = scaled([None, jnp.ones(3)], jnp.float32(2.0), ())
    assert found[0] is None
    assert (found[1] == 2).all()


def test_arguments_may_be_pinned():
    args = structs(*arguments())
    options: dict[str, Any] = {"machine": TREE, "progress": False, "search": "captured", "pipeline": unity.PipelineShape(2, 4)}
    pins = [unity.pin("params['out']", (("d0", "d1"), None)), unity.pin("params['layers']", (None, None, "node"))]
    plan = unity.optimize(loss, *args, **options, constraints=pins)
    assert plan.program.pipelining is not None
    stored = plan.in_shardings[0]
    assert stored["out"].spec == jax.sharding.PartitionSpec(("d0", "d1"), None)
    assert stored["layers"].spec == jax.sharding.PartitionSpec(None, None, "n0")
    with pytest.raises(ValueError, match="do not go together"):
        unity.optimize(loss, *args, **options, constraints=unity.forbid("tensor", across="node"))


def test_what_is_exported_does_the_same_by_gpipe(tmp_path):
    args = arguments(batch=16)
    plan = unity.optimize(
        loss, *structs(*args), machine=TREE, progress=False, search="captured", pipeline=unity.PipelineShape(2, 4)
    )
    assert str(plan.program.pipelining).endswith("1F1B")
    path = tmp_path / "stages.py"
    plan.files.export(path)
    space: dict[str, Any] = {"__name__": "stages"}
    exec(compile(path.read_text(), path, "exec"), space)
    close(jax.jit(jax.grad(space["fn"]))(*plan.shard(*args)), jax.jit(jax.grad(loss))(*args))


def with_fading_weights(params, x, y):
    """What layers carry beside the samples has no gradient: weights of the samples, made of labels."""
    there = (y > 0).astype(x.dtype)[:, 0]
    x, there = lax.scan(lambda c, w: ((jnp.tanh(c[0] @ w), 0.9 * c[1]), None), (x, there), params["layers"])[0]
    return ((x @ params["out"]) ** 2).sum(-1) @ there / there.sum()


def test_a_carry_made_of_labels_has_no_gradient():
    with jax.enable_x64(True):
        params, x, y = jax.tree.map(lambda a: a.astype("float64"), arguments(batch=16))
        args = params, x, (3 * y).astype("int32")
        plan = planned(with_fading_weights, args)
        step, checked = stepped(plan, *args)
        close(step, jax.jit(jax.value_and_grad(with_fading_weights))(*args), 1e-10)
    assert all(line.predicted == line.compiled for line in checked.lines), checked


def entropies(weight, h, y):
    return -jnp.take_along_axis(jax.nn.log_softmax(h @ weight), y[..., None], -1)[..., 0]


def in_chunks(params, h, y):
    """Errors, and how many labels count, added up over parts of the sequences, from zeros that are arrays."""

    def step(sums, part):
        there = (part[1] > 0).astype(h.dtype)
        own = (entropies(params["out"], *part) * there).sum(), there.sum()
        return tuple(a + b for a, b in zip(sums, own, strict=True)), None

    parts = jnp.moveaxis(h.reshape(16, 3, 2, WIDTH), 1, 0), jnp.moveaxis(y.reshape(16, 3, 2), 1, 0)
    total, count = lax.scan(jax.checkpoint(step), (jnp.zeros(()), jnp.zeros(())), parts)[0]
    return total / count


def sample_by_sample_in_chunks(params, h, y):
    """A loop in a checkpoint, which carries a number for each sample."""

    @jax.checkpoint
    def call(weight, h, y):
        parts = jnp.moveaxis(h.reshape(16, 3, 2, WIDTH), 1, 0), jnp.moveaxis(y.reshape(16, 3, 2), 1, 0)
        return lax.scan(lambda c, part: (c + entropies(weight, *part).sum(-1), None), jnp.zeros(16), parts)[0]

    return call(params["out"], h, y).mean()


def in_a_checkpoint_with_zeros(params, h, y):
    return jax.checkpoint(lambda h, y, z: entropies(params["out"], h, y) + z)(h, y, jnp.zeros((16, 6))).mean()


def in_a_conditional(params, h, y):
    """The branches hand on a mask beside the errors."""

    def one(h, y):
        there = (y > 0).astype(h.dtype)
        return entropies(params["out"], h, y) * there, there

    def other(h, y):
        return jnp.abs(h @ params["out"]).sum(-1), jnp.ones_like(h[..., 0])

    each, there = lax.cond(params["out"].sum() > -1e9, one, other, h, y)
    return each.sum() / there.sum()


ENDS = [in_chunks, sample_by_sample_in_chunks, in_a_checkpoint_with_zeros, in_a_conditional]


def written_as(end):
    """Return a loss, and its arguments: sequences of real numbers and their labels."""
    rng = np.random.default_rng(3)
    shapes = {"layers": (LAYERS, WIDTH, WIDTH), "out": (WIDTH, 3)}
    params = {name: jnp.asarray(rng.normal(size=s) / np.sqrt(WIDTH)) for name, s in shapes.items()}
    args = params, jnp.asarray(rng.normal(size=(16, 6, WIDTH))), jnp.asarray(rng.integers(0, 3, (16, 6)))
    return lambda params, x, y: end(params, layers(params, x), y), args


@pytest.mark.parametrize("end", ENDS)
def test_tails_may_have_loops_checkpoints_and_conditionals(end):
    with jax.enable_x64(True):
        fn, args = written_as(end)
        plan = planned(fn, args)
        step, checked = stepped(plan, *args)
        close(step, jax.jit(jax.value_and_grad(fn))(*args), 1e-10)
    assert all(line.predicted == line.compiled for line in checked.lines), checked


def test_a_loop_of_too_many_operators_is_refused():
    def long(params, h, y):
        return lax.scan(lambda c, k: (c + jnp.abs(h * k).sum(), None), 0.0, jnp.linspace(0.0, 1.0, 2000))[0]

    fn, args = written_as(long)
    program = PipelineSource(capture(fn, *args))
    with pytest.raises(Mixed, match=r"scan at .*test_pipelines_1f1b.py.* is a loop of \d+ operators in all of its steps"):
        pipelined(program, 0, 0, TREE.axes[:1], 2, ONE_F_ONE_B)
    assert pipelined(program, 0, 0, TREE.axes[:1], 2).schedule.kind == GPIPE
