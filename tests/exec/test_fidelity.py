"""What was predicted is what was compiled: collectives by kind, and what the plan computes is what the function computes."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import by_hand
from jax import lax
from small_models import MODELS, Small, arrays, counted, f, moves, random_point, scatters

import unity
from unity.exec.compiled.check import predicted_elements
from unity.pcg.capture.capture import capture
from unity.pcg.ir.graph import PARALLELIZATION
from unity.pcg.ir.user_lines import source_of_use
from unity.pcg.propagation.placement import moved_waists
from unity.plan.plan import Plan
from unity.plan.plan_family import PlanFamily
from unity.search.cost.assembly import assemble
from unity.search.cost.cost import Training
from unity.search.cost.inner_values import inner_of
from unity.search.cost.prediction import predict
from unity.search.session import Candidate, Search


def spread(model: Small) -> list[Plan]:
    """The fastest plan and the leanest, and by hand one from the middle of the frontier."""
    machine = unity.Machine.grid(1, 8, "a100")
    frontier = unity.optimize(model.loss, model.params, model.batch, machine=machine, progress=False).frontier
    return [frontier[k] for k in (0, *by_hand(len(frontier) // 2), -1)]


@pytest.mark.usefixtures("as_users_compile")
@pytest.mark.parametrize("name", ["lstm", *by_hand("gpt")])
def test_frontier_runs_as_predicted(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with jax.enable_x64(True):
        model = MODELS[name]()
        params, batch = arrays(model.params), arrays(model.batch)
        wanted = jax.jit(jax.value_and_grad(model.loss))(params, batch)
        plans = spread(model)
        assert sum(predicted_elements(plans[-1].program.pcg, plans[-1].program.family.captured.differentiated).values()) > 0
        for plan in plans:
            for gradient in (False, True) if plan is plans[0] else (True,):
                found = plan.check(gradient=gradient)
                assert found.agrees(0.02), f"{plan}, {'gradient' if gradient else 'forward'}\n{found}"
            got = jax.jit(jax.value_and_grad(plan))(*plan.shard(params, batch))
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-10 * np.abs(y).max()), got, wanted)


@pytest.mark.parametrize("dtype", ["bfloat16", *by_hand("float64")])
def test_a_sum_that_is_scattered_inside_an_operator_runs_as_predicted(dtype: str) -> None:
    def loss(weights: Any, x: Any, y: Any) -> Any:
        a, b, c, d = (w.astype(dtype) for w in weights)
        hidden = jnp.tanh(x.astype(dtype) @ a + y.astype(dtype) @ b + c)
        return jnp.mean((hidden @ d).astype(x.dtype) ** 2)

    with jax.enable_x64(True):
        wide = "float64" if dtype == "float64" else "float32"
        args = jax.tree.map(lambda x: x.astype(wide), arrays(([f(16, 32), f(16, 32), f(32), f(32, 8)], f(24, 16), f(24, 16))))
        captured = capture(loss, *args)
        machine = unity.Machine.grid(2, 2, "a100")
        search = Search(captured.graph, captured.differentiated, machine, Training())
        assembled = assemble(captured.graph, captured.differentiated, machine, Training())
        points = (random_point(assembled, np.random.default_rng(seed)) for seed in range(1000))
        plans = (Plan(PlanFamily(loss, captured, search, 0.0), Candidate(0.0, 0.0, assembled.assignment(p))) for p in points)
        chosen = list(islice((p for p in plans if any(map(scatters, p.program.pcg.nodes))), 3))
        assert len(chosen) == 3
        near = 1e-10 if dtype == "float64" else 0.05
        for plan in chosen:
            assert plan.check().agrees(0.02), str(plan.check())
            got, wanted = (jax.jit(jax.value_and_grad(g))(*args) for g in (plan, loss))
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=near, atol=near * np.abs(y).max()), got, wanted)


def test_a_value_that_moves_inside_an_operator_runs_as_predicted() -> None:
    def loss(weights: Any, x: Any, y: Any) -> Any:
        a, b, c = weights
        hidden = jnp.tanh(x @ a) * (y @ b)
        return jnp.mean((jnp.concatenate([hidden[:, :16] * hidden[:, 16:], y], -1) @ c) ** 2)

    with jax.enable_x64(True):
        args = jax.tree.map(lambda x: x.astype("float64"), arrays(([f(16, 32), f(16, 32), f(32, 8)], f(24, 16), f(24, 16))))
        captured, machine = capture(loss, *args), unity.Machine.grid(2, 2, "a100")
        search = Search(captured.graph, captured.differentiated, machine, Training())
        assembled = search.assembled
        for seed in (0, 5):  # gathered along one axis and moved along the other, for use and for none
            point = random_point(assembled, np.random.default_rng(seed))
            plan = Plan(PlanFamily(loss, captured, search, 0.0), Candidate(0.0, 0.0, assembled.assignment(point)))
            (node,) = filter(moves, plan.program.pcg.nodes)
            inner = inner_of(node.body, tuple(v.type for v in node.operands), node.types, plan.program.pcg.axes)
            kept, nbytes = inner.residuals((True,) * len(node.operands), False)  # the backward pass does not move it again
            (at,) = (k for k, (v, _) in enumerate(kept.inner) if v in moved_waists(inner.placement))
            assert nbytes[at] in (24 * 32 * 8 / 4, 24 * 32 * 8 / 2, 24 * 32 * 8), nbytes
            assert counted(assembled, point, "time") == pytest.approx(
                predict(plan.program.pcg, machine, captured.differentiated).time
            )
            assert plan.check().agrees(0.02), str(plan.check())
            got, wanted = (jax.jit(jax.value_and_grad(g))(*args) for g in (plan, loss))
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-10 * np.abs(y).max()), got, wanted)


def test_a_check_compiles_with_further_options_of_xla() -> None:
    plan = unity.optimize(
        lambda w, x: jnp.sum((x @ w) ** 2), f(8, 8), f(16, 8), machine=unity.Machine.grid(1, 2, "a100"), progress=False
    )
    found = plan.check(compiler_options={"xla_cpu_enable_fast_math": True})
    assert found.agrees()
    assert found.lines == plan.check().lines
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        plan.check(compiler_options={"no_such_option": True})


def test_collectives_in_loops_without_lines_have_the_line_of_the_loop() -> None:
    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        return (lax.scan(lambda h, w: (jax.nn.relu(h @ w), None), x, w)[0] ** 2).mean()

    device = unity.Device("slow", {"float32": 1e6}, 10**9, 1e6, 1.0, 0.0)
    machine = unity.Machine.grid(2, 4, device, intra=(1e12, 1e-12), inter=(1e12, 1e-12))
    shape = unity.PipelineShape(2, 4)
    plan = unity.optimize(fn, f(4, 8, 8), f(8, 8), machine=machine, pipeline=shape, search="captured", progress=False)
    nested = [g for g in plan.program.pcg.graphs() if g is not plan.program.pcg]
    assert any(not source_of_use(n, g) for g in nested for n in g.nodes if n.kind in PARALLELIZATION)
    assert plan.check().deviations == ()


def test_a_result_may_be_any_array_whose_cotangent_is_data() -> None:
    def fn(w: jax.Array) -> jax.Array:
        return jnp.sin(w)

    machine = unity.Machine.grid(1, 2, "a100")
    captured = capture(fn, jax.ShapeDtypeStruct((16, 4), jnp.float32))
    search = Search(captured.graph, captured.differentiated, machine, Training())
    assembled = assemble(captured.graph, captured.differentiated, machine, Training())
    points = (random_point(assembled, np.random.default_rng(seed)) for seed in range(100))
    plans = (Plan(PlanFamily(fn, captured, search, 0.0), Candidate(0.0, 0.0, assembled.assignment(p))) for p in points)
    plan = next(p for p in plans if [n.kind for n in p.program.pcg.nodes] == ["input", "sin", "partition"])
    (line,) = plan.check().lines  # the gradient of the whole result, gathered from its halves
    assert (line.kind, line.predicted, line.compiled) == ("all-gather", 64, 64)


def _stacked(w: Any, x: Any) -> Any:
    return jnp.mean(lax.scan(lambda c, a: (jnp.tanh(c @ a), None), x, w, unroll=3)[0] ** 2)


def _remaining(w: Any, x: Any) -> Any:
    return jnp.mean(lax.scan(lambda c, a: (jnp.tanh(c @ a), c @ w[0]), x, w, reverse=True, unroll=2)[1] ** 2)


def _unread(w: Any, x: Any) -> Any:
    return jnp.mean(lax.scan(jax.checkpoint(lambda c, a: (jnp.tanh(c @ a), (c.sum(), c @ a))), x, w, length=3, unroll=3)[1][0] ** 2)


def _in_remat_and_outside(w: Any, x: Any) -> Any:
    return jnp.mean((jax.checkpoint(lambda x: jnp.tanh(x @ w[0]))(x) @ w[0]) ** 2)


def _in_two_loops(w: Any, x: Any) -> Any:
    y, _ = lax.scan(lambda c, _: (jnp.tanh(c @ w[0]), None), x, None, length=3)
    return jnp.mean(lax.fori_loop(0, 2, lambda _, c: jnp.sin(c @ w[0]), y) ** 2)


@pytest.mark.parametrize("loss", [_stacked, _in_remat_and_outside, _in_two_loops, *by_hand(_remaining, _unread)])
def test_loops_are_predicted_as_they_are_compiled(loss: Any) -> None:
    """Steps outside of a loop, results that nothing reads, and gathers that a remat or a loop shares with what is outside of it."""
    args = f(3, 64, 64), f(512, 64)
    frontier = unity.optimize(loss, *args, machine=unity.Machine.grid(2, 4, "v100"), progress=False).frontier
    for point in {len(frontier) // 2, len(frontier) - 2, len(frontier) - 1}:
        found = frontier[point].check()
        assert found.agrees(0.001), f"point {point}\n{found}"
    got = jax.jit(jax.value_and_grad(frontier[-1]))(*frontier[-1].shard(*arrays(args)))
    wanted = jax.jit(jax.value_and_grad(loss))(*arrays(args))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4 * np.abs(y).max()), got, wanted)
