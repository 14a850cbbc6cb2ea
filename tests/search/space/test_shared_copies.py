"""What several users of a value need in another type is changed once: in the graph, and in the price by which it is chosen."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import Small, made, random_point

from unity.machine.machine import Machine
from unity.pcg.capture.capture import Captured
from unity.pcg.parallel.parallelize import parallelize
from unity.search.cost.assembly import Assembled
from unity.search.cost.prediction import predict
from unity.search.solver.minimizer import Minimizer

MACHINE = Machine.grid(2, 1, "v100")
ROWS = 65536


def looked_up_and_multiplied(w: Any, batch: Any) -> Any:
    indices, x = batch
    return jnp.sum(w[indices] ** 2) + jnp.sum((x @ w.T) ** 2)


def multiplied_from_both_sides(w: Any, batch: Any) -> Any:
    _, x = batch
    return jnp.sum((x @ w.T) ** 2) + jnp.sum((w @ x.T)[0])


def converted(w: Any, batch: Any) -> Any:
    return looked_up_and_multiplied(w.astype(jnp.bfloat16), (batch[0], batch[1].astype(jnp.bfloat16))).astype(jnp.float32)


def carried_and_stacked(w: Any, batch: Any) -> Any:
    """A step's result is read by the next step, and in the end."""

    def step(h: Any, _: Any) -> Any:
        h = jnp.tanh(h @ w)
        return h, h

    last, each = jax.lax.scan(step, batch[1], None, length=4)
    return jnp.sum(last) + jnp.sum(each**2)


PROGRAMS = {f.__name__: f for f in (looked_up_and_multiplied, multiplied_from_both_sides, converted, carried_and_stacked)}


def tied(name: str) -> tuple[Captured, Assembled]:
    batch = jax.ShapeDtypeStruct((ROWS,), "int32"), jax.ShapeDtypeStruct((ROWS, 64), "float32")
    return made(Small(PROGRAMS[name], jax.ShapeDtypeStruct((64, 64), "float32"), batch), MACHINE)


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_strategy_is_faster_than_the_fastest_where_users_share_changes(name: str) -> None:
    captured, assembled = tied(name)
    (fastest,) = Minimizer(assembled.problem).at([0.0])
    rng = np.random.default_rng(0)
    points = [fastest, *(random_point(assembled, rng) for _ in range(100))]
    graphs = [parallelize(captured.graph, assembled.assignment(point)) for point in points]
    seconds = [predict(graph, MACHINE, captured.differentiated).time for graph in graphs]
    assert seconds[0] == pytest.approx(fastest.time, rel=1e-12)
    assert min(seconds) >= fastest.time * (1 - 1e-12)
