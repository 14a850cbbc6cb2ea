"""The recomputation of the backward pass is predicted, priced and compiled alike, under all policies and in loops."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from checkpointed_models import MODELS, chunked, saving
from ci_cases import by_hand, fewer, one_in
from hypothesis import given, settings
from hypothesis import strategies as st
from rerun_models import drawn, named, right
from small_models import MACHINE, counted, f

import unity
from unity.machine.machine import Machine
from unity.optimize import optimize
from unity.pcg.parallel.parallelize import parallelize
from unity.pcg.parallel.traffic import traffic
from unity.search.cost.prediction import predict
from unity.search.simulator import simulate
from unity.search.solver.minimizer import Minimizer

DRAWN = {"name": st.sampled_from(sorted(MODELS)), "seed": st.integers(0, 2**32 - 1)}


def sent(name: str, seed: int) -> int:
    """How many kinds of collectives a drawn plan runs forward."""
    captured, _, _, graph = drawn(name, seed)
    return len({c.kind for c in traffic(graph, captured.differentiated) if c.direction == "forward"})


@pytest.mark.parametrize("name", one_in(2, sorted(MODELS)))
def test_programs_send_what_is_predicted(name: str) -> None:
    """Values and gradients are right, too."""
    right(name, [max(range(12), key=lambda seed: sent(name, seed))])


@settings(max_examples=fewer(40))
@given(**DRAWN)
def test_the_search_counts_no_less_than_it_costs(name: str, seed: int) -> None:
    captured, assembled, point, graph = drawn(name, seed)
    assert counted(assembled, point, "time") >= predict(graph, MACHINE, captured.differentiated).time * (1 - 1e-9)


# The search asks no policy what it saves of changes of type, and "everything" saves them.
@pytest.mark.parametrize("name", one_in(2, sorted(MODELS.keys() - {"saving everything"})))
@pytest.mark.parametrize("weight", [0.0, math.inf])
def test_for_the_best_strategies_it_counts_exactly_that(name: str, weight: float) -> None:
    captured, assembled = named(name)
    (point,) = Minimizer(assembled.problem).at([weight])
    graph = parallelize(captured.graph, assembled.assignment(point))
    assert point.time == pytest.approx(predict(graph, MACHINE, captured.differentiated).time)


@settings(max_examples=fewer(30))
@given(**DRAWN)
def test_a_simulated_step_takes_what_is_predicted(name: str, seed: int) -> None:
    captured, _, _, graph = drawn(name, seed)
    found = simulate(graph, MACHINE, captured.differentiated, overlap=False)
    assert found.makespan == pytest.approx(predict(graph, MACHINE, captured.differentiated).time, rel=1e-9)


def single(tree: Any) -> Any:
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype if s.dtype == "int32" else "float32"), tree)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("machine", [Machine.grid(2, 4, "v100"), *by_hand(Machine.grid(1, 8, "a100"))], ids=str)
@pytest.mark.parametrize(
    "model", [chunked(8, 4096, 512, 8192), saving("names", 2, 2048, 256, 1024)], ids=["cross-entropy", "saved names"]
)
def test_plans_of_a_frontier_agree_with_their_programs(model: Any, machine: Machine) -> None:
    params, batch = single((model.params, model.batch))
    frontier = optimize(model.loss, params, batch, machine=machine, progress=False, budget=0).frontier
    for k in (0, len(frontier) // 2, -1):
        assert (found := frontier[k].check()).agrees(0.02), found


@pytest.mark.usefixtures("own_cache")
def test_what_a_call_only_passes_on_is_not_gathered() -> None:
    """Equinox's checkpointed loop hands all weights to a call that refuses some derivatives, and reads them nowhere."""
    internal = pytest.importorskip("equinox").internal

    def loss(w: Any, x: Any) -> Any:
        def step(c: Any) -> Any:
            return jnp.tanh(c[0] @ w), c[1] + 1

        kind: dict[str, Any] = {"kind": "checkpointed", "max_steps": 8, "checkpoints": 3}
        return jnp.mean(internal.while_loop(lambda c: c[1] < 5, step, (x, 0), **kind)[0] ** 2)

    machine = Machine.grid(2, 4, "v100")
    frontier = unity.optimize(loss, *single((f(512, 512), f(4096, 512))), machine=machine, progress=False).frontier
    for k in (0, 2 * len(frontier) // 3, -1):
        assert (found := frontier[k].check()).agrees(0.0), found


TINY = """
import jax, jax.numpy as jnp, unity

def loss(p, x):
    layer = jax.checkpoint(lambda c, w: jnp.sin(jnp.tanh(c * w) + c) * w)
    return jnp.sum(jax.lax.scan(lambda c, w: (layer(c, w), None), x, p)[0])

shapes = jax.ShapeDtypeStruct((3, 4), "float32"), jax.ShapeDtypeStruct((4,), "float32")
print(unity.optimize(loss, *shapes, machine=unity.Machine.grid(1, 1, "a100"), progress=False).check())
"""


def test_a_check_of_a_tiny_loop_does_not_end_the_process() -> None:
    """XLA's CPU backend emits small loops by an emitter that ends the process at a checkpoint's barrier."""
    ran = subprocess.run([sys.executable, "-c", TINY], capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr[-2000:]
