"""2BW: steps that do not drain give the gradients of the batch before at weights one version older, in M ticks a step."""

from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import by_hand
from jax.extend.core import Var
from jax.sharding import AxisType
from pipelined_models import LAYERS, NEAR, TREE, WIDTH, WORDS, close, language, layers, loss, scored, structs
from pipelined_models import planned as plan_of

import unity
from benchmarks import forked_layers
from unity.base.errors import InfeasibleError, PlanError
from unity.pcg.ir.graph import PIPELINE, TAIL
from unity.pcg.parallel.stages import ONE_F_ONE_B, TWO_BW, Schedule
from unity.pcg.parallel.traffic import traffic
from unity.plan.stream import Stream
from unity.search.cost.cost import Training
from unity.search.cost.prediction import predict
from unity.search.memory.memory import predict_memory
from unity.search.solver.minimizer import Minimizer

planned = partial(plan_of, kind=TWO_BW)


def numbers(rng, dtype, **shapes):
    return {name: jnp.asarray(rng.normal(size=s) / 3, dtype) for name, s in shapes.items()}


def weights(dtype=jnp.float32, count=LAYERS, width=WIDTH):
    shapes: dict[str, Any] = {"in": (width, width), "layers": (count, width, width), "out": (width, 3)}
    return numbers(np.random.default_rng(0), dtype, **shapes)


def batches(count, batch=16, width=WIDTH, dtype=jnp.float32):
    rng = np.random.default_rng(1)
    return [tuple(jnp.asarray(rng.normal(size=(batch, n)), dtype) for n in (width, 3)) for _ in range(count)]


def applied(params, gradients):
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients)


def streamed(plan, params, given):
    """What every batch gives, and the weights in the end: each gradient is applied when it is there."""
    stream = Stream(plan)
    step, found = jax.jit(stream.step), []
    flight = stream.start(params, *given[0])
    for batch in given[1:]:
        flight, (value, gradients) = step(flight, params, *batch)
        found.append(value)
        params = applied(params, gradients)
    value, gradients = stream.finish(flight)
    return [*found, value], applied(params, gradients)


def delayed(fn, params, given):
    """The same on one device: w(t + 1) = w(t) - lr * gradient(w(t - 1), batch t - 1)."""
    step, before, found = jax.jit(jax.value_and_grad(fn, has_aux=isinstance(fn, Auxiliary))), params, []
    for batch in given:
        value, gradients = step(before, *batch)
        before, params = params, applied(params, gradients)
        found.append(value)
    return found, params


class Auxiliary:
    """A function whose first result is the loss."""

    def __init__(self, fn):
        self.fn = fn

    def __call__(self, *args):
        return self.fn(*args)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 8), *by_hand((4, 4))])
def test_training_is_that_of_one_device_with_gradients_one_step_late(stages, micro_batches):
    with jax.enable_x64(True):
        params, given = weights(jnp.float64), batches(12, dtype=jnp.float64)
        plan = planned(loss, (params, *given[0]), stages, micro_batches)
        wanted, late = delayed(loss, params, given)
        found, end = streamed(plan, params, given)
        assert len({float(x) for x in wanted}) == len(given)
        close(found, wanted, 1e-10)
        close(end, late, 1e-10)


def test_a_language_model_with_all_that_is_around_it():
    rng = np.random.default_rng(1)
    with jax.enable_x64(True):
        params = numbers(rng, jnp.float64, words=(WORDS, WIDTH), layers=(LAYERS, WIDTH, WIDTH))

        def batch():
            tokens, target = (jnp.asarray(rng.integers(WORDS, size=(16, 4))) for _ in range(2))
            return tokens, target, jnp.asarray(rng.integers(2, size=(16, 4)), bool)

        given = [batch() for _ in range(5)]
        plan = planned(language, (params, *given[0]), 2, 4)
        wanted, late = delayed(Auxiliary(language), params, given)
        found, end = streamed(plan, params, given)
        close(found, wanted, 1e-10)
        close(end, late, 1e-10)


def test_gradients_of_several_arguments_and_of_what_the_tail_reads():
    params, x = {"layers": weights()["layers"]}, batches(1)[0][0]
    given = [(x * k, {"by": jnp.cos(x * k), "to": jnp.sin(jnp.arange(WIDTH * 2.0).reshape(WIDTH, 2) + k)}) for k in (1, 2, 3)]
    plan = planned(scored, (params, *given[0]), 4, 4, argnums=(0, 1, 2))
    stream = Stream(plan)
    flight = stream.start(params, *given[0])
    for before, batch in pairwise(given):
        flight, found = stream.step(flight, params, *batch)
        close(found, jax.jit(jax.value_and_grad(scored, (0, 1, 2)))(params, *before), 1e-4)


def test_a_mesh_that_the_user_has_set_is_no_streams():
    params, ((x, y),) = weights(), batches(1)
    plan = planned(loss, (params, x, y), 4, 8)
    stream = Stream(plan)
    shapes = jax.eval_shape(stream.start, params, x, y)
    with jax.set_mesh(jax.make_mesh((8,), ("mine",), axis_types=(AxisType.Auto,))):
        flight = jax.eval_shape(stream.start, params, x, y)
        assert jax.tree.map(jnp.shape, flight) == jax.tree.map(jnp.shape, shapes)
        assert jax.tree.map(jnp.shape, jax.eval_shape(stream.step, flight, params, x, y)[1][1]) == jax.tree.map(jnp.shape, params)
    with jax.set_mesh(jax.make_mesh((8,), ("mine",))), pytest.raises(PlanError, match="explicit axes mine, where a plan's stream"):
        stream.start(params, x, y)


def test_a_call_of_the_plan_is_the_function():
    params, ((x, y),) = weights(), batches(1)
    plan = planned(loss, (params, x, y), 4, 8)
    close(jax.jit(plan)(params, x, y), loss(params, x, y), 2e-5)
    close(jax.jit(jax.value_and_grad(plan))(params, x, y), jax.jit(jax.value_and_grad(loss))(params, x, y), 2e-5)


@pytest.mark.usefixtures("as_users_compile")
@pytest.mark.parametrize(("stages", "exchanges"), [(2, 1), *by_hand((4, 2))])
def test_a_step_has_as_many_ticks_as_micro_batches(stages, exchanges):
    """In the prediction, and in the compiled program, which sends just what was predicted, and holds nearly that."""
    args = structs(weights(width=64), *batches(1, 64, 64)[0])
    plan = planned(loss, args, stages, 8)
    counts = {(c.node.kind, c.direction): c.count for c in traffic(plan.program.pcg, range(3)) if c.kind == "collective-permute"}
    assert counts == {(PIPELINE, "forward"): 2 * exchanges * 8, (TAIL, "forward"): exchanges * 8}
    found = plan.check()
    assert all(line.predicted == line.compiled for line in found.lines)
    assert found.timeline.step == pytest.approx(found.memory.total, rel=NEAR)


def waiting(jaxpr, loop):
    """The equations of a jaxpr that need what the loop makes, and all results that do."""
    made, found = set(loop.outvars), []
    for e in jaxpr.eqns:
        if e is not loop and any(x in made for x in e.invars if isinstance(x, Var)):
            made.update(e.outvars)
            found.append(e)
    return found, [x in made for x in jaxpr.outvars]


def test_gradients_of_layers_are_sent_while_the_rest_of_the_ticks_runs():
    """In the traced step nothing of them, no collective either, needs what the last ticks make; what leads to the pipeline does."""
    args = structs(weights(width=64), *batches(1, 64, 64)[0])
    plan = planned(loss, args, 2, 8)
    stream = Stream(plan)
    step = stream._steps
    traced = jax.make_jaxpr(step.step)(step.flight, [n.tensors[0].struct for n in plan.program.pcg.inputs])
    (mapped,) = [e for e in traced.eqns if e.primitive.name == "shard_map"]
    first, last = (e for e in mapped.params["jaxpr"].eqns if e.primitive.name == "scan" and "ppermute" in str(e.params["jaxpr"]))
    assert (first.params["length"], last.params["length"]) == (1, 7)
    early, late = (waiting(mapped.params["jaxpr"], loop) for loop in (first, last))
    names = plan.program.family.captured.paths
    gradients = slice(-len(step.weights), None)  # after the flight and the results
    wait = {names[k]: flag for k, flag in zip(step.weights, late[1][gradients], strict=True)}
    assert wait == {"args[0]['in']": True, "args[0]['layers']": False, "args[0]['out']": False}
    assert all(early[1][gradients])
    sums = [e for e in early[0] if e not in late[0] and e.primitive.name in ("psum", "psum_invariant", "reduce_scatter")]
    assert any(e.invars[0].aval.ndim == 3 for e in sums)  # of the layers' gradient


def test_the_simulator_sends_them_meanwhile_too():
    """By links between nodes that are slow, as long as the last ticks take."""
    device = unity.Device("slow", {"float32": 1e9}, 10**9, 1e9, 0.5, 0.0)
    machine = unity.Machine.grid(4, 1, device=device, intra=(1e9, 1e-7), inter=(1e7, 1e-7))
    args = structs(weights(count=8, width=64), *batches(1, 256, 64)[0])
    options: dict[str, Any] = {"machine": machine, "progress": False, "search": "captured"}
    plans = {
        kind: unity.optimize(loss, *args, **options, pipeline=unity.PipelineShape(2, 8, kind)) for kind in (ONE_F_ONE_B, TWO_BW)
    }
    gains = {kind: plan.time - plan.inspect.simulate().makespan for kind, plan in plans.items()}
    sent = {
        kind: sum(t.seconds for t in predict(plan.program.pcg, machine, [0, 1, 2]).collectives if t.collective.elements > 64 * 64)
        for kind, plan in plans.items()
    }
    assert gains[TWO_BW] > gains[ONE_F_ONE_B] + 0.2 * sent[TWO_BW]


def test_nothing_idles_and_two_versions_are_held():
    assert (Schedule(4, 8, 24, TWO_BW).ticks, Schedule(4, 8, 24, TWO_BW).bubble) == (8, 0)
    assert Schedule(4, 8, 24, TWO_BW).flushed == Schedule(4, 8, 24, ONE_F_ONE_B)
    args = structs(weights(count=8, width=64), *batches(1, 64, 64)[0])
    plan, other = (planned(loss, args, 4, 8, kind=kind) for kind in (TWO_BW, ONE_F_ONE_B))
    assert plan.time == pytest.approx(predict(plan.program.pcg, TREE, [0, 1, 2]).time, rel=1e-9)
    assert plan.inspect.simulate().makespan == pytest.approx(plan.time, rel=0.05)
    assert plan.time < other.time * 0.85  # of 11 ticks 8 are left
    more = plan.memory - other.memory
    stage = 2 * 64 * 64 * 4  # bytes of the weights of one of four stages
    assert 3 * stage <= more <= 3.5 * stage  # and of their gradients: before a tick, and after it
    (point,) = Minimizer(plan.program.family.search.assembled.problem).at([0.0])
    assert predict_memory(plan.program.pcg, [0, 1, 2], Training()).additive == pytest.approx(point.memory, rel=0.01)


def deep(params, x, y):
    for w in params["first"]:
        x = jnp.tanh(x @ w)
    return ((layers(params, x) @ params["out"] - y) ** 2).mean()


@pytest.mark.usefixtures("as_users_compile")
def test_what_leads_to_the_pipeline_is_held_for_two_batches():
    """And is counted so by the search; in the prediction also as the arrays that a flight has of it, and copies of those."""
    width, found = 64, dict[int, Any]()
    for count in (1, 4):
        one = jnp.zeros((width, width))
        params = {"first": [one] * count, "layers": jnp.zeros((LAYERS, width, width)), "out": jnp.zeros((width, 3))}
        plan = planned(deep, structs(params, jnp.zeros((256, width)), jnp.zeros((256, 3))), 2, 8)
        (point,) = Minimizer(plan.program.family.search.assembled.problem).at([0.0])
        numbers = sorted(plan.program.family.captured.differentiated)
        assert predict_memory(plan.program.pcg, numbers, Training()).additive == pytest.approx(point.memory, rel=0.01)
        found[count] = plan.check()
    assert found[4].timeline.step == pytest.approx(found[4].memory.total, rel=0.2)
    kept = 3 * 256 // 8 * width * 4  # bytes of what three layers more keep of one batch, on one device
    grown = found[4].timeline.step - found[1].timeline.step
    assert grown >= 2 * kept
    assert grown == pytest.approx(found[4].memory.total - found[1].memory.total, rel=0.1)


def test_branches_beside_it():
    """On devices of their own: what leads to the pipeline is part of the flight, whatever it is."""
    with jax.enable_x64(True):
        plan = forked_layers.planned(TREE, np.float64, pipeline=unity.PipelineShape(2, 4, "2bw"))
        assert plan.program.branching is not None
        params = plan.shard(forked_layers.weights(np.float64))
        given = [forked_layers.batch(k, np.float64) for k in range(3)]
        stream = Stream(plan)
        step, wanted = jax.jit(stream.step), jax.jit(jax.value_and_grad(forked_layers.loss))
        flight = stream.start(params, plan.shard(params, given[0])[1])
        for before, batch in pairwise(given):
            flight, found = step(flight, params, plan.shard(params, batch)[1])
            close(found, wanted(forked_layers.weights(np.float64), before), 1e-10)
        checked = plan.check()
        assert all(line.predicted == line.compiled for line in checked.lines), str(checked)


def test_it_is_asked_for_saved_and_explained(tmp_path, capsys):
    args = structs(weights(), *batches(1)[0])
    options: dict[str, Any] = {"machine": TREE, "progress": False, "search": "captured"}
    plan = unity.optimize(loss, *args, **options, pipeline=unity.PipelineShape(2, 4, "2bw"))
    assert str(plan.program.pipelining).endswith("4 micro-batches, 2BW")
    plan.program.check_derivation()
    plan.explain()
    assert "weights one version older" in capsys.readouterr().out
    plan.files.save(tmp_path / "plan.json")
    again = unity.load(tmp_path / "plan.json", loss, *args)
    assert (again.program.pcg.key, str(again.program.pipelining)) == (plan.program.pcg.key, str(plan.program.pipelining))


def test_what_has_no_steps_of_its_own_is_refused():
    args = structs(weights(), *batches(1)[0])
    with pytest.raises(PlanError, match="no pipeline by 2BW"):
        _ = Stream(planned(loss, args, kind=ONE_F_ONE_B))
    options: dict[str, Any] = {
        "machine": TREE,
        "progress": False,
        "search": "captured",
        "pipeline": unity.PipelineShape(2, 4, "2bw"),
    }
    with pytest.raises(InfeasibleError, match="training=False"):
        unity.optimize(loss, *args, **options, training=False)

    with pytest.raises(ValueError, match="measure=True"):
        unity.optimize(loss, *args, pipeline=unity.PipelineShape(2, 4, "2bw"), measure=True)

    def many(params, x, y):
        return ((layers(params, x) @ params["out"] - y) ** 2).sum(0)

    with pytest.raises(InfeasibleError, match="no scalar"):
        unity.optimize(many, *args, **options)

    def contrast(params, x, y):
        found = layers(params, x) @ params["out"]
        return ((found - found.mean(0)) ** 2).mean()

    with pytest.raises(InfeasibleError, match=r"test_pipelines_2bw.py"):
        unity.optimize(contrast, *args, **options)


def test_other_arguments_and_flights_are_refused():
    params, ((x, y),) = weights(), batches(1)
    stream = Stream(planned(loss, (params, x, y)))
    with pytest.raises(PlanError, match="other shapes"):
        stream.start(params, x[:8], y[:8])
    flight = stream.start(params, x, y)
    with pytest.raises(PlanError, match=r"expected a Flight of .* got one of another plan"):
        Stream(planned(loss, structs(params, x, y), 2, 8)).finish(flight)
    stream.finish(flight)
    with pytest.raises(PlanError, match="is used up"):
        stream.finish(flight)
