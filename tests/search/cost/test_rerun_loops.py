"""Recomputation inside the steps of a scan: inner values of operators, and operators that a product reads."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from rerun_models import drawn, named, right

import unity
from unity.machine.machine import Machine
from unity.pcg.ir.graph import PCG
from unity.pcg.ir.payloads import Recompute
from unity.pcg.parallel.parallelize import parallelize
from unity.search.solver.minimizer import Minimizer


def again(graph: PCG, what: int) -> list[str]:
    """Return the kinds of operators inside the scan that are recomputed so."""
    (scan,) = (node for node in graph.nodes if node.inside is not None)
    assert scan.inside is not None
    return [n.kind for n in scan.inside.nodes if n.body is not None and n.again == what]


@pytest.mark.parametrize(("name", "what"), [("scanned", Recompute.WHOLE), ("bent", Recompute.INNER)])
def test_rerunning_plans_compute_and_send_what_they_predict(name: str, what: int) -> None:
    right(name, [next(k for k in range(40) if again(drawn(name, k)[3], what))])


@pytest.mark.usefixtures("as_users_compile")
def test_the_compiled_program_keeps_no_rerun_result() -> None:
    def loss(params: Any, x: Any) -> Any:
        def step(x: Any, p: Any) -> Any:
            return x + jax.nn.softmax(jax.nn.gelu(x @ p["up"]) @ p["mid"]) @ p["down"], None

        return jnp.mean(lax.scan(step, x, params)[0] ** 2)

    layers, rows, d, wide = 6, 4096, 32, 512
    shapes = {"up": (d, wide), "mid": (wide, wide), "down": (wide, d)}
    params = {k: jax.ShapeDtypeStruct((layers, *s), "float32") for k, s in shapes.items()}
    x = jax.ShapeDtypeStruct((rows, d), "float32")
    machine = Machine.grid(1, 8, "a100")
    options: dict[str, Any] = {"machine": machine, "progress": False, "search": "captured", "pipelines": False, "recompute": False}
    plan, lean = (unity.optimize(loss, params, x, objective=wanted, **options) for wanted in ("time", "memory"))
    assert again(lean.program.pcg, Recompute.INNER) + again(lean.program.pcg, Recompute.WHOLE)
    found, before = lean.check(), plan.check()
    assert found.agrees(0.0)
    for checked in (found, before):
        assert abs(checked.timeline.step / checked.memory.total - 1) < 0.2
    assert found.memory.temporaries < before.memory.temporaries / 2


LEAN = [("scanned", Recompute.WHOLE, "softmax"), ("scanned", Recompute.WHOLE, "gelu"), ("bent", Recompute.INNER, "gelu")]


@pytest.mark.parametrize(("name", "what", "kind"), LEAN)
def test_the_leanest_plan_of_a_scan_recomputes(name: str, what: int, kind: str) -> None:
    captured, assembled = named(name)
    (point,) = Minimizer(assembled.problem).at([np.inf])
    assert kind in again(parallelize(captured.graph, assembled.assignment(point)), what)
