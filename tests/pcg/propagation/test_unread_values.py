"""Operands of a `custom_jvp` whose tangents alone are read, such as a matrix beside its factor."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from test_agreed import SLOW

import unity
from unity.pcg.ir.program import close
from unity.pcg.propagation.choices import choices
from unity.pcg.types.parallel_type import REPLICATED, partitioned
from unity.search.cost.prediction import predict


@jax.custom_jvp
def energy(matrix: Any, factor: Any, x: Any) -> Any:
    """Return the quadratic form of a matrix, computed from its factor."""
    return jnp.sum((factor.T @ x) ** 2)


@energy.defjvp
def _(primals: Any, tangents: Any) -> Any:
    _, factor, x = primals
    by_matrix, _, by_x = tangents
    return energy(*primals), x @ by_matrix @ x + 2 * (factor @ (factor.T @ x)) @ by_x


def energies(matrix: Any, factor: Any, x: Any) -> Any:
    return jax.vmap(energy)(matrix, factor, x)


def loss(w: Any, x: Any) -> Any:
    factor = jnp.einsum("bi,ij->bij", x, w)
    matrix = jnp.einsum("bij,bkj->bik", factor, factor)
    return jnp.mean(energies(matrix, factor, x))


def test_the_batch_of_an_operand_whose_tangent_alone_is_read_is_divided() -> None:
    matrix, x = jnp.zeros((32, 8, 8)), jnp.zeros((32, 8))
    found = {c.operands: c.results for c in choices(close(jax.make_jaxpr(energies)(matrix, matrix, x)))}
    assert found[(partitioned(0),) * 3] == (partitioned(0),)
    assert (REPLICATED, partitioned(0), partitioned(0)) not in found


def test_a_plan_has_the_gradient_of_a_rule_that_reads_tangents_alone() -> None:
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((8, 8), (32, 8)))
    plan = unity.optimize(loss, w, x, machine=SLOW, budget=0, progress=False)
    prediction = predict(plan.program.pcg, plan.inspect.machine, plan.program.family.differentiated)
    assert not [t.node for t in prediction.operators if t.share == 1 and t.forward > 0]
    actual, expected = jax.jit(jax.value_and_grad(plan))(*plan.shard(w, x)), jax.value_and_grad(loss)(w, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), actual, expected)
