"""`plan.constrained()`: the planned program for XLA's partitioner, which the plan's sharding constraints guide."""

import inspect
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import fewer
from hypothesis import given, settings
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from test_planned_meshes import FUNCTIONS, array, close, planned, requests

import unity
from unity.base.errors import PlanError
from unity.exec.sharding_constraints import open_spec
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import PARTIAL, UNUSED, partitioned

pytestmark = pytest.mark.usefixtures("own_cache")

EIGHT = unity.Machine.grid(1, 8, "a100")


def constraints_in(jaxpr: Any) -> int:
    """Count the sharding constraints in a program, nested programs included."""
    nested = [p.jaxpr for e in jaxpr.eqns for p in e.params.values() if hasattr(p, "jaxpr")]
    return sum(e.primitive.name == "sharding_constraint" for e in jaxpr.eqns) + sum(map(constraints_in, nested))


@given(requests())
@settings(max_examples=fewer(8))
def test_it_computes_the_function_and_its_gradients_in_the_plans_shardings(request_) -> None:
    name, mesh, pins = request_
    fn = FUNCTIONS[name][0]
    try:
        plan, args = planned(name, mesh, constraints=[unity.pin(path, spec) for path, spec in pins])
    except unity.InfeasibleError:
        return
    with jax.set_mesh(mesh):
        placed = plan.shard(*args)
        found = jax.jit(jax.value_and_grad(plan.constrained(), has_aux=True))(*placed)
        close(found, jax.value_and_grad(fn, has_aux=True)(*args))
        for gradient, weight in zip(jax.tree.leaves(found[1]), jax.tree.leaves(placed[0]), strict=True):
            assert gradient.sharding.is_equivalent_to(weight.sharding, weight.ndim)


def dropped(w, x, key, labels):
    """A loss with random bits, integers, a loop that breaks off, and a side effect."""
    h = jnp.where(jax.random.bernoulli(key, 0.5, (x.shape[0], w.shape[1])), x @ w, 0.0)
    h = jax.lax.cond(h.sum() > 0, jnp.tanh, jnp.sin, h)
    jax.debug.print("mean {}", h.mean())
    h = h + jax.lax.broadcasted_iota(jnp.float32, h.shape, 0) / 8
    return -jnp.take_along_axis(jax.nn.log_softmax(h), labels[:, None], 1).mean()


@pytest.mark.parametrize("pin", [("w", P(None, "device")), ("x", P("device")), ("w", P("device"))])
def test_programs_with_random_bits_integers_and_effects_run_so(pin, capsys):
    args = (array(16, 32), array(24, 16), jax.random.key(0), np.arange(24) % 32)
    plan = unity.optimize(dropped, *args, machine=EIGHT, constraints=unity.pin(*pin), progress=False, budget=0)
    close(jax.value_and_grad(plan.constrained())(*plan.shard(*args)), jax.value_and_grad(dropped)(*args))
    jax.effects_barrier()
    assert "mean" in capsys.readouterr().out


def test_only_arguments_results_and_changes_are_constrained():
    w, x = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((64, 64), (65536, 64)))
    pin = unity.pin("x", P("device"))
    plan = unity.optimize(lambda w, x: jnp.tanh(x @ w).mean(), w, x, machine=EIGHT, constraints=pin, progress=False, training=False)
    assert [str(v) for v in plan.in_specs] == ["P()", "P('device',)"]
    program = jax.make_jaxpr(plan.constrained())(jnp.ones(w.shape), jnp.ones(x.shape))
    changes = [
        node.kind for node in plan.program.pcg.nodes if node.kind in ("combine", "reduce")
    ]  # `replicate` leaves values as they are
    assert constraints_in(program.jaxpr) == 2 + len(changes) + 1


def test_xla_sends_what_a_plan_of_sharded_weights_does():
    fn, params, x = FUNCTIONS["mlp"]
    plan = unity.optimize(fn, params, x, machine=EIGHT, search="fsdp", progress=False)
    own, theirs = plan.check(), plan.check(partitioned=True)
    assert own.agrees()
    assert theirs.total.predicted == own.total.predicted
    gathered = {line.kind: line.compiled for line in theirs.lines}
    assert gathered["all-gather"] == next(line.compiled for line in own.lines if line.kind == "all-gather")


def lookup(w, x, tokens):
    h = jnp.tanh(w["embedding"][tokens] + x)
    h = h @ w["up"]
    return (h @ w["down"]).mean()


def line_of(fn: Any, code: str) -> str:
    lines, first = inspect.getsourcelines(fn)
    return f"{Path(__file__).name}:{first + next(k for k, line in enumerate(lines) if code in line)}"


@pytest.mark.parametrize("search", ["fsdp", "data-parallel"])
def test_deviations_are_at_the_lines_that_use_the_weights(search):
    weights = {"embedding": array(256, 32), "up": array(32, 128), "down": array(128, 32)}
    args = weights, array(64, 32), np.arange(64)
    plan = unity.optimize(lookup, *args, machine=EIGHT, search=search, progress=False)
    own, theirs = plan.check(), plan.check(partitioned=True)
    assert own.deviations == ()
    for check in (own, theirs):  # every element is at some line
        for kind in check.lines:
            at = [p for p in check.places if p.kind == kind.kind]
            assert (kind.predicted, kind.compiled) == (sum(p.predicted for p in at), sum(p.compiled for p in at))
    lines = {
        line_of(lookup, code): weights[name].size for name, code in (("embedding", "tokens]"), ("up", '"up"'), ("down", '"down"'))
    }
    assert all(p.line in lines for p in theirs.deviations)
    if search == "fsdp":  # XLA sums on every device what the plan scatters
        assert {p.line: p.predicted for p in theirs.deviations if p.kind == "reduce-scatter"} == lines
        assert all(line in str(theirs) for line in lines)


def test_what_is_recomputed_is_recomputed():
    fn, params, x = FUNCTIONS["mlp"]
    weights = [(jnp.tile(up, (1, 8)) / 16, jnp.tile(down, (8, 1)) / 16) for up, down in params]
    pins = [unity.pin("params[*][*]", P("device")), unity.pin("x", P("device"))]
    plan = unity.optimize(fn, weights, x, machine=EIGHT, constraints=pins, objective="memory", progress=False, budget=0)
    assert any(node.attributes.get("again") for node in plan.program.pcg.nodes)
    close(jax.grad(plan.constrained(), has_aux=True)(*plan.shard(weights, x)), jax.grad(fn, has_aux=True)(weights, x))


def test_it_runs_on_explicit_axes_that_are_not_set():
    mesh = jax.make_mesh((2, 4), ("data", "tensor"))
    plan, args = planned("attention", mesh, constraints=[unity.pin("x", P("data")), unity.pin("w", P(None, "tensor"))])
    assert AxisType.Explicit in plan.inspect.mesh.axis_types
    found = jax.jit(jax.value_and_grad(plan.constrained(), has_aux=True))(*plan.shard(*args))
    close(found, jax.value_and_grad(FUNCTIONS["attention"][0], has_aux=True)(*args))


def test_a_pipeline_is_refused():
    fn, params, x = FUNCTIONS["scan"]
    plan = unity.optimize(fn, params, x, machine=EIGHT, pipeline=unity.PipelineShape(2, 4), progress=False)
    with pytest.raises(PlanError, match="devices run different operators at a time"):
        plan.constrained()


def test_inner_digits_and_sums_are_left_open():
    axes = (Axis("a", 2, 0), Axis("b", 2, 0), Axis("c", 2, 0))
    assert open_spec((partitioned(0), partitioned(0), partitioned(1)), axes, 2) == P(("a", "b"), "c")
    assert open_spec((partitioned(0), partitioned(0, 3), UNUSED), axes, 2) == P(P.UNCONSTRAINED, None)
    assert open_spec((partitioned(0, 3), partitioned(0), PARTIAL), axes, 2) == P(P.UNCONSTRAINED, None)
