"""Export of primitives by JAX's public names, replicated on every device: linear algebra, Fourier transforms, reductions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import host_functions
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import in_turn
from jax import lax
from jax.experimental.ode import odeint
from precision import in_64_bits
from small_models import Small, arrays, f
from test_export import PAIR, assert_agrees, assert_well_written, planned
from test_held import rooted

from unity.export import ExportError, write
from unity.export.primitives.public_names import NoPublicName, public_name, value_code


@pytest.fixture(autouse=True)
def _in_64_bits() -> Iterator[None]:
    with in_64_bits():
        yield


def symmetric(w: Any) -> Any:
    return w @ w.T + 6.0 * jnp.eye(4)


def routed(w: Any, accumulated: str | None = None) -> Any:
    """Rows sorted by label, multiplied in groups, and put back."""
    labels = jnp.argmax(w, 1)
    order, groups = jnp.argsort(labels), jnp.stack([w, w + 1.0, 2 * w, w.T])
    sizes = jnp.bincount(labels, length=4)
    return lax.ragged_dot(w[order], groups, sizes, preferred_element_type=accumulated)[jnp.argsort(order)]


DIFFERENTIABLE: dict[str, Callable[[Any], Any]] = {
    "ragged_dot, of a batch": lambda w: jax.vmap(lax.ragged_dot)(
        jnp.stack([w, w + 1.0]), jnp.stack([jnp.stack([w, 2 * w])] * 2), jnp.array([[3, 1], [2, 2]])
    ),
    "expm": lambda w: jax.scipy.linalg.expm(w),
    "odeint": lambda w: odeint(lambda y, t, w: -w @ y * t, w[0], jnp.linspace(0.0, 1.0, 4), w),
    "ragged_dot": lambda w: lax.ragged_dot(w, jnp.stack([w, 2 * w]), jnp.array([3, 1])),
    "routed_dot": routed,
    "routed_dot, accumulated": lambda w: routed(w, "float64"),
    "cholesky": lambda w: jnp.linalg.cholesky(symmetric(w)),
    "svd": lambda w: jnp.linalg.svd(w, full_matrices=False)[0],
    "singular values": lambda w: jnp.linalg.svd(w, compute_uv=False),
    "eigh": lambda w: jnp.linalg.eigh(symmetric(w))[0],
    "qr": lambda w: jnp.linalg.qr(w)[1],
    "lu": lambda w: jax.scipy.linalg.lu(w)[2],
    "determinant": lambda w: jnp.linalg.slogdet(w)[1],
    "tridiagonal_solve": lambda w: lax.linalg.tridiagonal_solve(w[0], 6.0 + w[1], w[2], w),
    "triangular_solve": lambda w: jax.scipy.linalg.solve_triangular(symmetric(w), w, lower=True),
    "solve": lambda w: jnp.linalg.solve(symmetric(w), w),
    "inverse": lambda w: jnp.linalg.inv(symmetric(w)),
    "conjugate gradients": lambda w: jax.scipy.sparse.linalg.cg(symmetric(w), w[0])[0],
    "rfft": lambda w: jnp.abs(jnp.fft.rfft(w)),
    "irfft": lambda w: jnp.fft.irfft(jnp.fft.rfft2(w)),
    "fft": lambda w: jnp.real(jnp.fft.ifft2(jnp.fft.fft2(w) * 2.0)),
    "betainc": lambda w: jax.scipy.special.betainc(2.0, 3.0, jax.nn.sigmoid(w)),
    "householder": lambda w: jnp.linalg.qr(w, mode="complete")[0],
    "ldexp": lambda w: jnp.ldexp(w, jnp.arange(4)) * jnp.frexp(w)[0],
    "interp": lambda w: jnp.interp(w, jnp.linspace(-1.0, 1.0, 4), w[0]),
    "extrema of nothing": lambda w: jnp.max(w[:, :0], 1, initial=-1.0) * w + jnp.min(w[:, :0], initial=2.0),
    "nonzero": lambda w: w[:, jnp.nonzero(w[0] > 0, size=4, fill_value=3)[0]],
    "custom_root": rooted,
    "accuracy": lambda w: jax.scipy.special.rel_entr(jnp.exp(w), lax.exp(w, accuracy=lax.Tolerance(ulps=2)) + 1.0),
}


@pytest.mark.parametrize("name", in_turn(DIFFERENTIABLE))
def test_values_and_gradients_equal_the_plans(name: str, tmp_path: Path) -> None:
    run = DIFFERENTIABLE[name]
    model, path = Small(lambda w, x: (run(w) ** 2).sum() + jnp.sin(x @ w).sum(), f(4, 4), f(4, 4)), tmp_path / "exported.py"
    plan = planned(model, PAIR)
    plan.files.export(path)
    assert_well_written(path)
    assert_agrees(plan, path, arrays(model.params), arrays(model.batch))


def combined(w: Any) -> Any:
    """Return the sum and the maximum of rows at once, by a user's combiner."""
    start = jnp.zeros((), w.dtype), jnp.array(-jnp.inf, w.dtype)
    total, most = lax.reduce((w, w), start, lambda a, b: (a[0] + b[0] * 0.5, jnp.maximum(a[1], b[1])), (1,))
    return total * most


VALUES: dict[str, Callable[[Any], Any]] = {
    "reduce": combined,
    "reduce_window": lambda w: lax.reduce_window(w, jnp.ones((), w.dtype), lambda a, b: a * b, (2, 2), (1, 2), "VALID"),
    "apply": lambda w: w.at[jnp.array([0, 2])].apply(jnp.sin).at[:, 1].apply(lambda x: jnp.where(x > 0, x * 2.0, 0.5)),
    "polar": lambda w: jax.scipy.linalg.polar(w, method="qdwh")[0],
    "rsf2csf": lambda w: jnp.abs(jax.scipy.linalg.rsf2csf(*jax.scipy.linalg.schur(w))[0]),
    "eig": lambda w: jnp.abs(jnp.linalg.eig(w)[0]),
    "schur": lambda w: jax.scipy.linalg.schur(w)[0],
    "tridiagonal": lambda w: lax.linalg.tridiagonal(symmetric(w))[1],
    "hessenberg": lambda w: jnp.abs(lax.linalg.hessenberg(w)[0]),
    "symmetric_product": lambda w: lax.linalg.symmetric_product(w, w + 1.0, beta=0.5, symmetrize_output=False),
    "reflectors": lambda w: jnp.linalg.qr(w, mode="raw")[0],
    "reflections": lambda w: lax.linalg.ormqr(w, w[0], w, transpose=True),
    "approximately": lambda w: lax.approx_max_k(w, 2)[0],
}


@pytest.mark.parametrize("name", in_turn(VALUES))
def test_values_equal_the_plans_where_jax_has_no_gradient(name: str, tmp_path: Path) -> None:
    run = VALUES[name]
    model, path = Small(lambda w, x: run(lax.stop_gradient(w)).sum() + jnp.sin(x @ w).sum(), f(4, 4), f(4, 4)), tmp_path / "e.py"
    plan = planned(model, PAIR)
    plan.files.export(path)
    assert_well_written(path)
    assert_agrees(plan, path, arrays(model.params), arrays(model.batch))


def test_public_functions_are_written_for_the_primitives_that_they_are(tmp_path: Path) -> None:
    def loss(w: Any, x: Any) -> Any:
        known = jnp.linalg.eigh(symmetric(w))[0].sum() + jnp.abs(jnp.fft.fft(x)).sum() + jnp.linalg.solve(symmetric(w), x[0]).sum()
        reduced = lax.linalg.hessenberg(lax.stop_gradient(w))[0] + lax.linalg.tridiagonal(lax.stop_gradient(w), lower=False)[0]
        return known + reduced.sum() + (lax.digamma(x) * lax.igamma(x, w)).sum()

    write(planned(Small(loss, f(4, 4), f(4, 4)), PAIR), tmp_path / "named.py")
    text = (tmp_path / "named.py").read_text()
    for name in ("lax.linalg.eigh(", "lax.fft(", "lax.custom_linear_solve(", "lax.linalg.lu(", "lax.digamma("):
        assert name in text
    assert "lax.linalg.hessenberg(" in text
    assert re.search(r"lax\.linalg\.tridiagonal\(\w+, lower=False\)", text)
    assert "_p.bind" not in text


def fresh(w: Any) -> Any:
    return jax.random.split(jax.random.key(3), 4)[0], jnp.abs(w) + 0.5


RANDOM: dict[str, Callable[[Any], Any]] = {
    "gamma": lambda w: jax.random.gamma(*fresh(w), dtype=jnp.float32),
    "loggamma": lambda w: jax.random.loggamma(*fresh(w)),
    "gamma of several keys": lambda w: jax.vmap(jax.random.gamma)(jax.random.split(jax.random.key(3), 4), jnp.abs(w) + 0.5),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_of_the_gamma_family_equal_the_plans(name: str, tmp_path: Path) -> None:
    run = RANDOM[name]
    model, path = Small(lambda w, x: (run(lax.stop_gradient(w)) * w).sum() + x.sum(), f(4, 4), f(4)), tmp_path / "exported.py"
    plan = planned(model, PAIR)
    plan.files.export(path)
    assert_well_written(path)
    if name == "gamma":  # which takes seconds to compile
        assert_agrees(plan, path, arrays(model.params), arrays(model.batch))


def on_the_host(call: Any, **how: Any) -> Callable[[Any, Any], Any]:
    """Return a loss that calls a function on the host."""

    def loss(w: Any, x: Any) -> Any:
        y = jax.pure_callback(call, jax.ShapeDtypeStruct(x.shape, x.dtype), x, **how)
        return (w * y).sum()

    return loss


class Scales:
    @staticmethod
    def doubled(x: Any) -> Any:
        return 2 * np.asarray(x)


CALLED = {
    "one of numpy's": (np.sin, "jax.pure_callback(np.sin, "),
    "one of a module": (host_functions.shifted, "from host_functions import shifted"),
    "one whose name is taken": (host_functions.shard_map, "from host_functions import shard_map"),
    "one of a class": (Scales.doubled, "Scales.doubled"),
}


@pytest.mark.parametrize("name", CALLED)
def test_host_functions_are_imported(name: str, tmp_path: Path) -> None:
    call, text = CALLED[name]
    model, path = Small(on_the_host(call, vmap_method="sequential"), f(4), f(4)), tmp_path / "exported.py"
    plan = planned(model, PAIR)
    plan.files.export(path)
    assert text in path.read_text()
    assert_well_written(path, {"host_functions", __name__})
    assert_agrees(plan, path, arrays(model.params), arrays(model.batch))


def test_several_host_functions_are_imported(tmp_path: Path) -> None:
    def loss(w: Any, x: Any) -> Any:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        one = jax.pure_callback(host_functions.shifted, shape, x)
        two, three = jax.pure_callback(host_functions.both, (shape, shape), {"x": x}, by=one)
        return (w * (two + three) * jax.pure_callback(np.sin, shape, x)).sum()

    model, path = Small(loss, f(4), f(4)), tmp_path / "exported.py"
    plan = planned(model, PAIR)
    plan.files.export(path)
    assert "from host_functions import both, shifted" in path.read_text()
    assert_agrees(plan, path, arrays(model.params), arrays(model.batch))


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda x: np.sin(x), "cannot import the function .*<lambda>.*top level of a module"),
        (partial(np.add, 1.0), "cannot import the function"),
        (host_functions.made(2.0), "cannot import the function host_functions.made.<locals>"),
    ],
    ids=["a lambda", "a partial", "a closure"],
)
def test_host_functions_without_a_public_name_are_refused(call: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=rf"test_export_public\.py:\d+.*pure_callback cannot be exported: .*{why}"):
        write(planned(Small(on_the_host(call), f(4), f(4)), PAIR), tmp_path / "never.py")
    assert not list(tmp_path.iterdir())


def test_host_functions_of_the_main_module_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_functions.shifted, "__module__", "__main__")
    with pytest.raises(ExportError, match="put it in a module"):
        write(planned(Small(on_the_host(host_functions.shifted), f(4), f(4)), PAIR), tmp_path / "never.py")


def test_parameters_are_written_by_public_names() -> None:
    for value in (lax.FftType.IRFFT, lax.linalg.SvdAlgorithm.QR, lax.ge_p, (1, (2.0, None)), np.dtype("int32"), jnp.float32, True):
        found = eval(value_code(value).text, {"lax": lax, "jnp": jnp})
        assert np.dtype(found) == np.dtype(value) if isinstance(value, type | np.dtype) else found == value
    assert public_name(lax.linalg.svd_p) == "lax.linalg.svd_p"
    with pytest.raises(NoPublicName, match="no public name"):
        value_code(object())
