"""2BW: steps that do not drain give the gradients of the batch before at weights one version older, in M ticks a step."""

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from pipelined_models import LAYERS, NEAR, WIDTH, WORDS, language

import unity
from unity import Machine
from unity.made import Made
from unity.pcg.capture import capture
from unity.pcg.errors import InfeasibleError, PlanError
from unity.pcg.graph import PIPELINE, TAIL
from unity.pcg.stages import ONE_F_ONE_B, TWO_BW, Schedule
from unity.pcg.traffic import traffic
from unity.pipelining import Program, pipelined
from unity.plan import Plan
from unity.search.cost import Training
from unity.search.memory import predict_memory
from unity.search.minimizer import Minimizer
from unity.search.predict import predict
from unity.search.session import Search

TREE = Machine.grid(2, 4)
ALONG = {2: TREE.axes[:1], 4: TREE.axes[1:]}


def layers(params, x):
    return lax.scan(lambda c, w: (c + jnp.tanh(c @ w), None), x, params["layers"])[0]


def loss(params, x, y):
    return ((layers(params, x @ params["in"]) @ params["out"] - y) ** 2).mean()


def numbers(rng, dtype, **shapes):
    return {name: jnp.asarray(rng.normal(size=s) / 3, dtype) for name, s in shapes.items()}


def weights(dtype=jnp.float32, count=LAYERS, width=WIDTH):
    shapes: dict[str, Any] = {"in": (width, width), "layers": (count, width, width), "out": (width, 3)}
    return numbers(np.random.default_rng(0), dtype, **shapes)


def batches(count, batch=16, width=WIDTH, dtype=jnp.float32):
    rng = np.random.default_rng(1)
    return [tuple(jnp.asarray(rng.normal(size=(batch, n)), dtype) for n in (width, 3)) for _ in range(count)]


def structs(args):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)


def planned(fn, args, stages=2, micro_batches=4, argnums: int | tuple[int, ...] = 0, kind=TWO_BW) -> Plan:
    """The fastest plan with one pipeline."""
    captured = capture(fn, *args, argnums=argnums)
    made = pipelined(Program(captured), 0, 0, ALONG[stages], micro_batches // stages, kind)
    search = Search(made.after.graph, captured.differentiated, TREE, Training())
    return Plan(Made(fn, made.after, search, 0.0, pipelining=made), search.fastest)


def applied(params, gradients):
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients)


def streamed(plan, params, given):
    """What every batch gives, and the weights in the end: each gradient is applied when it is there."""
    step, found = jax.jit(plan.stream.step), []
    flight = plan.stream.start(params, *given[0])
    for batch in given[1:]:
        flight, (value, gradients) = step(flight, params, *batch)
        found.append(value)
        params = applied(params, gradients)
    value, gradients = plan.stream.finish(flight)
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


def close(found, wanted, most):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.abs(np.asarray(a) - np.asarray(b)).max() <= most * max(1e-3, float(np.abs(b).max()))


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("micro_batches", [4, 8])
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


def scored(params, x, y):
    """What the tail reads has a gradient, too; and the mean is looked at once more."""
    return jnp.log1p((jnp.tanh(layers(params, x) * y["by"]) @ y["to"]).mean() ** 2)


def test_gradients_of_several_arguments_and_of_what_the_tail_reads():
    params, x = {"layers": weights()["layers"]}, batches(1)[0][0]
    given = [(x * k, {"by": jnp.cos(x * k), "to": jnp.sin(jnp.arange(WIDTH * 2.0).reshape(WIDTH, 2) + k)}) for k in (1, 2, 3)]
    plan = planned(scored, (params, *given[0]), 4, 4, argnums=(0, 1, 2))
    flight = plan.stream.start(params, *given[0])
    for before, batch in pairwise(given):
        flight, found = plan.stream.step(flight, params, *batch)
        close(found, jax.value_and_grad(scored, (0, 1, 2))(params, *before), 1e-4)


def test_a_call_of_the_plan_is_the_function():
    params, ((x, y),) = weights(), batches(1)
    plan = planned(loss, (params, x, y), 4, 8)
    close(jax.jit(plan)(params, x, y), loss(params, x, y), 2e-5)
    close(jax.jit(jax.value_and_grad(plan))(params, x, y), jax.value_and_grad(loss)(params, x, y), 2e-5)


@pytest.mark.parametrize(("stages", "exchanges"), [(2, 1), (4, 2)])
def test_a_step_has_as_many_ticks_as_micro_batches(stages, exchanges):
    """In the prediction, and in the compiled program, which sends just what was predicted, and holds nearly that."""
    args = structs((weights(width=64), *batches(1, 64, 64)[0]))
    plan = planned(loss, args, stages, 8)
    counts = {(c.node.kind, c.direction): c.count for c in traffic(plan.pcg, range(3)) if c.kind == "collective-permute"}
    assert counts == {(PIPELINE, "forward"): 2 * exchanges * 8, (TAIL, "forward"): exchanges * 8}
    found = plan.check()
    assert all(line.predicted == line.compiled for line in found.lines)
    assert found.timeline.step == pytest.approx(found.memory.total, rel=NEAR)
    assert found.searched.predicted == pytest.approx(found.searched.compiled, rel=0.2)


def test_nothing_idles_and_two_versions_are_held():
    assert (Schedule(4, 8, 24, TWO_BW).ticks, Schedule(4, 8, 24, TWO_BW).bubble) == (8, 0)
    assert Schedule(4, 8, 24, TWO_BW).flushed == Schedule(4, 8, 24, ONE_F_ONE_B)
    args = structs((weights(count=8, width=64), *batches(1, 64, 64)[0]))
    plan, other = (planned(loss, args, 4, 8, kind=kind) for kind in (TWO_BW, ONE_F_ONE_B))
    assert plan.time == pytest.approx(predict(plan.pcg, TREE, [0, 1, 2]).time, rel=1e-9)
    assert plan.simulate().makespan == pytest.approx(plan.time, rel=0.05)
    assert plan.time < other.time * 0.85  # of 11 ticks 8 are left
    more = plan.memory - other.memory
    stage = 2 * 64 * 64 * 4  # bytes of the weights of one of four stages
    assert 3 * stage <= more <= 3.5 * stage  # and of their gradients: before a tick, and after it
    (point,) = Minimizer(plan._made.search.assembled.problem).at([0.0])
    assert predict_memory(plan.pcg, [0, 1, 2], Training()).additive == pytest.approx(point.memory, rel=0.01)


def test_it_is_asked_for_saved_and_explained(tmp_path, capsys):
    args = structs((weights(), *batches(1)[0]))
    options: dict[str, Any] = {"machine": TREE, "progress": False, "search": "captured"}
    plan = unity.optimize(loss, *args, **options, pipelines=(2, 4, "2bw"))
    assert str(plan.pipelining).endswith("4 micro-batches, 2BW")
    plan.check_derivation()
    plan.explain()
    assert "weights one version older" in capsys.readouterr().out
    plan.save(tmp_path / "plan.json")
    again = unity.load(tmp_path / "plan.json", loss, *args)
    assert (again.pcg.key, str(again.pipelining)) == (plan.pcg.key, str(plan.pipelining))


def test_what_has_no_steps_of_its_own_is_refused():
    args = structs((weights(), *batches(1)[0]))
    with pytest.raises(PlanError, match="no pipeline by 2BW"):
        _ = planned(loss, args, kind=ONE_F_ONE_B).stream
    options: dict[str, Any] = {"machine": TREE, "progress": False, "search": "captured", "pipelines": (2, 4, "2bw")}
    with pytest.raises(InfeasibleError, match="training=False"):
        unity.optimize(loss, *args, **options, training=False)

    with pytest.raises(ValueError, match="measure=True"):
        unity.optimize(loss, *args, pipelines=(2, 4, "2bw"), measure=True)

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
    plan = planned(loss, (params, x, y))
    with pytest.raises(PlanError, match="other shapes"):
        plan.stream.start(params, x[:8], y[:8])
    flight = plan.stream.start(params, x, y)
    with pytest.raises(PlanError, match="no flight of this plan"):
        planned(loss, structs((params, x, y)), 2, 8).stream.finish(flight)
    plan.stream.finish(flight)
    with pytest.raises(PlanError, match="is used up"):
        plan.stream.finish(flight)
