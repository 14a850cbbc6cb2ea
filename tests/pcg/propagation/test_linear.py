"""Linear solves: plans split batches and right sides, and have JAX's derivatives of any order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from precision import in_64_bits

import unity
from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture, unparallelized
from unity.pcg.ir.program import close
from unity.pcg.propagation.choices import choices
from unity.pcg.types.parallel_type import REPLICATED, partitioned


def correlated(params, x, y):
    """Return the likelihood of a batch of small Gaussian processes whose kernels are computed from features."""
    features = jnp.tanh(x @ params["w"]).reshape(-1, 4, 5)
    kernel = features @ features.mT + jnp.eye(4)
    fit = jnp.sum(y * jnp.linalg.solve(kernel, y), (1, 2))
    return jnp.mean(fit + jnp.linalg.slogdet(kernel)[1]) + jnp.mean(jnp.linalg.inv(kernel) ** 2)


@pytest.fixture(scope="module")
def plan_and_args():
    rng = np.random.default_rng(0)
    args = (
        {"w": rng.normal(size=(6, 20)).astype(np.float32)},
        rng.normal(size=(16, 6)).astype(np.float32),
        rng.normal(size=(16, 4, 3)).astype(np.float32),
    )
    wanted = [unity.pin(path, P("device")) for path in ("args[1]", "args[2]")]
    return unity.optimize(correlated, *args, machine=Machine.grid(1, 8), constraints=wanted), args


def test_a_batch_of_solves_is_split(plan_and_args):
    plan, (params, x, y) = plan_and_args
    assert not unparallelized(capture(correlated, params, x, y).graph)
    found = plan.check()
    assert found.agrees()
    assert {line.kind for line in found.lines if line.compiled} == {"all-reduce"}  # loss, gradient: every device solves its own


def test_values_and_gradients_are_the_functions(plan_and_args):
    plan, args = plan_and_args
    value, gradient = jax.jit(jax.value_and_grad(plan))(*plan.shard(*args))
    wanted, slope = jax.jit(jax.value_and_grad(correlated))(*args)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    np.testing.assert_allclose(gradient["w"], slope["w"], rtol=1e-4, atol=1e-6)


def test_a_second_derivative_is_that_of_a_solve(plan_and_args):
    """The transposed solve of a gradient is differentiated as a solve, not through factors that are held constant."""
    plan, args = plan_and_args

    def steepness(fn):
        return lambda params, *rest: jnp.sum(jax.grad(fn)(params, *rest)["w"] ** 2)

    found = jax.jit(jax.grad(steepness(plan)))(*plan.shard(*args))
    np.testing.assert_allclose(found["w"], jax.grad(steepness(correlated))(*args)["w"], rtol=1e-3, atol=1e-5)


def test_a_foreign_solve_does_not_block_the_rest():
    """The solve is in a step of a scan, beside operators that are split."""

    def walked(s, xs, a, inverse, b):
        def step(s, x):
            return s + x, jax.lax.custom_linear_solve(lambda v: a @ v, b, lambda _, v: inverse @ v, lambda _, v: v @ inverse)

        return jax.lax.scan(step, s, xs)

    body = close(jax.make_jaxpr(walked)(np.ones(4), np.ones((3, 4)), np.eye(2), np.eye(2), np.ones(2)))
    assert any(c.states[0] == partitioned(0) for c in choices(body))


def stopped_early(a, b):
    return jax.scipy.sparse.linalg.cg(lambda v: a @ (a.T @ v) + v, b, maxiter=2)[0]


def a_root(a, b):
    """Return a root whose derivative is a linear solve in a derivative rule."""

    def iterated(f, z):
        return jax.lax.fori_loop(0, 30, lambda _, z: z - 0.3 * f(z), z)

    def solved(f, y):
        return jax.lax.custom_linear_solve(f, y, lambda _, y: stopped_early(a, y), lambda _, y: stopped_early(a, y))

    return jax.lax.custom_root(lambda z: z + 0.1 * a @ jnp.tanh(z) - b, jnp.zeros_like(b), iterated, solved)


@pytest.mark.parametrize(("solve", "linear"), [(jnp.linalg.solve, True), (stopped_early, False), (a_root, False)])
def test_only_solvers_that_are_linear_take_partial_sums(solve, linear):
    """A solution replicated for use has a cotangent in parts, and a Krylov solver cut short solves no sum by its parts."""
    body = close(jax.make_jaxpr(solve)(np.eye(4, dtype=np.float32), np.ones((4, 3), np.float32)))
    assert any(set(c.states) == {REPLICATED} for c in choices(body)) == linear


def test_the_gradient_of_a_solver_that_stops_early_is_the_functions():
    rng = np.random.default_rng(0)
    w, x = rng.standard_normal((8, 8)) / 2, rng.standard_normal((8, 8))

    def loss(w, x):
        product = lambda v: x.T @ (x @ v) / 8 + 2 * v + v @ (w @ w.T)  # noqa: E731
        return jnp.sum(jax.scipy.sparse.linalg.cg(product, x @ w, maxiter=2)[0] ** 2)

    slow = unity.Device("slow", {"float32": 1e6, "float64": 1e6}, 10**9, 1e6, 1.0, 0.0)
    machine = Machine.grid(2, 2, slow, intra=(1e12, 1e-12), inter=(1e12, 1e-12))
    with in_64_bits():
        plan = unity.optimize(loss, w, x, machine=machine, search="captured", progress=False)
        np.testing.assert_allclose(jax.grad(plan)(*plan.shard(w, x)), jax.grad(loss)(w, x), rtol=1e-9, atol=1e-9)
