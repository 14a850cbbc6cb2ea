"""Functions that JAX keeps as one primitive with an object as parameter: since 0.12 some of JAX's, and those of users."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import in_turn
from jax import lax
from jax.experimental import hijax
from test_agreed import SLOW

import unity
from unity.pcg.capture.capture import capture, unparallelized
from unity.pcg.jaxprs.foreign_primitives import HELD

Buffer: Any = getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive  # as JAX 0.12 names it, and as those before


class Cube(Buffer):
    """A primitive of a user, whose gradient is twice its derivative."""

    def __init__(self, aval: Any) -> None:
        self.in_avals, self.out_aval, self.params = (aval,), aval, {}
        super().__init__()

    def expand(self, x: Any) -> Any:
        return x * x * x

    def vjp_fwd(self, nzs_in: Any, x: Any) -> Any:
        return self(x), x

    def vjp_bwd_retval(self, res: Any, g: Any) -> Any:
        return (6.0 * g * res * res,)

    def batch(self, axis_data: Any, args: Any, dims: Any) -> Any:
        return Cube(jax.typeof(args[0]))(*args), dims[0]


def cube(x: Any) -> Any:
    return Cube(jax.typeof(x))(x)


def rooted(y: Any) -> Any:
    """Return the roots of z³ + z = y."""

    def newton(f: Callable[[Any], Any], z: Any) -> Any:
        return lax.fori_loop(0, 30, lambda _, z: z - f(z) / (3 * z**2 + 1), z)

    return lax.custom_root(lambda z: z**3 + z - y, jnp.zeros_like(y), newton, lambda g, b: b / g(jnp.ones_like(b)))


def placed(y: Any, w: Any, **how: Any) -> Any:
    return y * jnp.searchsorted(jnp.sort(w[0]), y, **how)


def scaled(y: Any) -> Any:
    m, e = jnp.frexp(y)
    return m * jnp.cos(m) + e


def stepped(y: Any, w: Any) -> Any:
    return lax.scan(lambda c, _: (placed(jnp.ldexp(jnp.tanh(c), 1), w), None), y, None, 3)[0]


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    """Use 64-bit numbers: near zero, and at powers of two, the last digit decides."""
    with jax.enable_x64(True):
        yield


FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "searchsorted": placed,
    "searchsorted, right": lambda y, w: placed(y, w, side="right"),
    "searchsorted, by sorting": lambda y, w: placed(y, w, method="sort"),
    "searchsorted, in each row": lambda y, w: jax.vmap(lambda row: row * jnp.searchsorted(jnp.sort(row), row))(y),
    "digitize": lambda y, w: y * jnp.digitize(y, jnp.linspace(-1, 1, 8)),
    "interp": lambda y, w: jnp.interp(y, jnp.linspace(-1, 1, 16), w[0]),
    "histogram": lambda y, w: y * jnp.histogram(y, 8)[0].max(),
    "choice": lambda y, w: y * jax.random.choice(jax.random.key(0), 16, y.shape, p=jax.nn.softmax(w[0])),
    "nonzero": lambda y, w: y[:, jnp.nonzero(w[0] > 0, size=8, fill_value=3)[0]],
    "nonzero, in each row": lambda y, w: jax.vmap(lambda row: row[jnp.where(row > 0, size=8)[0]])(y),
    "ldexp": lambda y, w: jnp.ldexp(y, jnp.arange(16) % 5),
    "frexp": lambda y, w: scaled(y),
    "custom_root": lambda y, w: rooted(y),
    "a user's": lambda y, w: cube(y),
    "a user's, of each row": lambda y, w: jax.vmap(cube)(y),
    "in a loop": stepped,
    "in a branch": lambda y, w: lax.cond(w[0, 0] > 0, placed, lambda y, w: jnp.ldexp(y, 3), y, w),
    "computed again": lambda y, w: jax.checkpoint(lambda y: placed(jnp.ldexp(y, 3), w))(y),
    "with its gradient": lambda y, w: jax.grad(lambda y: jnp.sum(jnp.ldexp(y, 2) * jnp.frexp(y)[0] * jnp.sin(y)))(y),
}


def arguments() -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.normal(size=shape) * 0.3) for shape in ((16, 16), (64, 16)))
    return w, x


def planned(fn: Callable[[Any, Any], Any]) -> tuple[Callable[[Any, Any], Any], Any]:
    """Return a loss of a function of rows, and its plan on eight devices."""

    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(fn(x @ w, w) ** 2)

    assert not unparallelized(capture(loss, *arguments()).graph)
    return loss, unity.optimize(loss, *arguments(), machine=SLOW, rules=(), progress=False)


@pytest.mark.parametrize("name", in_turn(FUNCTIONS))
def test_rows_are_divided(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    loss, plan = planned(FUNCTIONS[name])
    w, x = arguments()
    assert plan.in_shardings[1].shard_shape(x.shape)[0] < len(x)
    plan.explain()
    assert "runs whole on every device" not in capsys.readouterr().out
    (value, gradient), (wanted, its) = (
        jax.jit(jax.value_and_grad(f))(*given) for f, given in ((plan, plan.shard(w, x)), (loss, (w, x)))
    )
    np.testing.assert_allclose(value, wanted, rtol=1e-9)
    np.testing.assert_allclose(gradient, its, rtol=1e-9, atol=1e-9)


def test_no_function_primitive_is_left_in_a_program() -> None:
    for name, fn in FUNCTIONS.items():
        body = capture(lambda w, x, fn=fn: fn(x @ w, w), *arguments()).body
        assert HELD not in body.primitives, name


@pytest.mark.parametrize("twice", [jax.hessian, lambda f: jax.jacrev(jax.grad(f))])
def test_the_second_derivative_of_ldexp(twice: Callable[..., Any]) -> None:
    if jax.__version_info__ < (0, 12):
        pytest.skip("before, it was frexp, whose derivative rule calls frexp again: plans keep the first derivative of that alone")
    loss, plan = planned(lambda y, w: jnp.ldexp(y, 2) * jnp.frexp(y)[0])
    w, x = arguments()
    np.testing.assert_allclose(jax.jit(twice(plan))(*plan.shard(w, x)), jax.jit(twice(loss))(w, x), rtol=1e-9, atol=1e-9)


def test_the_rule_of_a_user_primitive_is_kept() -> None:
    _, plan = planned(lambda y, w: cube(y))
    w, x = arguments()
    y = np.asarray(x @ w)
    wanted = np.asarray(x).T @ (2 * y**3 / y.size * 6 * y**2)
    np.testing.assert_allclose(jax.jit(jax.grad(plan))(*plan.shard(w, x)), wanted, rtol=1e-9, atol=1e-9)
