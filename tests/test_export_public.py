"""What is exported by JAX's public names, whole on every device: linear algebra, Fourier transforms, solvers, reductions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from small_models import Small, arrays, f
from test_export import PAIR, agrees, planned, well_written

from unity.exporting import ExportError, write
from unity.exporting.public import Unsaid, public, said


@pytest.fixture(autouse=True)
def _in_64_bits() -> Iterator[None]:
    with jax.enable_x64(True):
        yield
    jax.config.update("jax_enable_x64", False)


def symmetric(w: Any) -> Any:
    return w @ w.T + 6.0 * jnp.eye(4)


DIFFERENTIABLE: dict[str, Callable[[Any], Any]] = {
    "cholesky": lambda w: jnp.linalg.cholesky(symmetric(w)),
    "svd": lambda w: jnp.linalg.svd(w, full_matrices=False)[0],
    "singular values": lambda w: jnp.linalg.svd(w, compute_uv=False),
    "eigh": lambda w: jnp.linalg.eigh(symmetric(w))[0],
    "qr": lambda w: jnp.linalg.qr(w)[1],
    "lu": lambda w: jax.scipy.linalg.lu(w)[2],
    "determinant": lambda w: jnp.linalg.slogdet(w)[1],
    "triangular_solve": lambda w: jax.scipy.linalg.solve_triangular(symmetric(w), w, lower=True),
    "solve": lambda w: jnp.linalg.solve(symmetric(w), w),
    "inverse": lambda w: jnp.linalg.inv(symmetric(w)),
    "conjugate gradients": lambda w: jax.scipy.sparse.linalg.cg(symmetric(w), w[0])[0],
    "rfft": lambda w: jnp.abs(jnp.fft.rfft(w)),
    "irfft": lambda w: jnp.fft.irfft(jnp.fft.rfft2(w)),
    "fft": lambda w: jnp.real(jnp.fft.ifft2(jnp.fft.fft2(w) * 2.0)),
    "betainc": lambda w: jax.scipy.special.betainc(2.0, 3.0, jax.nn.sigmoid(w)),
    "householder": lambda w: jnp.linalg.qr(w, mode="complete")[0],
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_values_and_gradients_are_the_plans(name: str, tmp_path: Path) -> None:
    run = DIFFERENTIABLE[name]
    model, path = Small(lambda w, x: (run(w) ** 2).sum() + jnp.sin(x @ w).sum(), f(4, 4), f(4, 4)), tmp_path / "exported.py"
    plan = planned(model, PAIR)
    plan.export(path)
    well_written(path)
    agrees(plan, path, arrays(model.params), arrays(model.batch))


def combined(w: Any) -> Any:
    """The sum and the largest of rows at once, by a function of one's own."""
    start = jnp.zeros((), w.dtype), jnp.array(-jnp.inf, w.dtype)
    total, most = lax.reduce((w, w), start, lambda a, b: (a[0] + b[0] * 0.5, jnp.maximum(a[1], b[1])), (1,))
    return total * most


VALUES: dict[str, Callable[[Any], Any]] = {
    "reduce": combined,
    "reduce_window": lambda w: lax.reduce_window(w, jnp.ones((), w.dtype), lambda a, b: a * b, (2, 2), (1, 2), "VALID"),
    "eig": lambda w: jnp.abs(jnp.linalg.eig(w)[0]),
    "schur": lambda w: jax.scipy.linalg.schur(w)[0],
    "tridiagonal": lambda w: lax.linalg.tridiagonal(symmetric(w))[1],
    "approximately": lambda w: lax.approx_max_k(w, 2)[0],
}


@pytest.mark.parametrize("name", VALUES)
def test_values_are_the_plans_where_jax_has_no_gradient(name: str, tmp_path: Path) -> None:
    run = VALUES[name]
    model, path = Small(lambda w, x: run(lax.stop_gradient(w)).sum() + jnp.sin(x @ w).sum(), f(4, 4), f(4, 4)), tmp_path / "e.py"
    plan = planned(model, PAIR)
    plan.export(path)
    well_written(path)
    agrees(plan, path, arrays(model.params), arrays(model.batch))


def test_functions_that_people_call_are_written_where_they_are_the_primitive(tmp_path: Path) -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.linalg.eigh(symmetric(w))[0].sum() + jnp.abs(jnp.fft.fft(x)).sum() + jnp.linalg.solve(symmetric(w), x[0]).sum()

    write(planned(Small(loss, f(4, 4), f(4, 4)), PAIR), tmp_path / "named.py")
    text = (tmp_path / "named.py").read_text()
    for name in ("lax.linalg.eigh(", "lax.fft(", "lax.custom_linear_solve(", "lax.linalg.lu("):
        assert name in text
    assert "_p.bind" not in text


def test_what_has_no_public_name_is_refused(tmp_path: Path) -> None:
    def loss(w: Any, x: Any) -> Any:
        y = jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return (w * y).sum()

    with pytest.raises(ExportError, match=r"test_export_public\.py:\d+.*pure_callback cannot be exported"):
        write(planned(Small(loss, f(4), f(4)), PAIR), tmp_path / "never.py")
    assert not list(tmp_path.iterdir())


def test_parameters_are_said_by_public_names() -> None:
    for value in (lax.FftType.IRFFT, lax.linalg.SvdAlgorithm.QR, lax.ge_p, (1, (2.0, None)), np.dtype("int32"), jnp.float32, True):
        found = eval(said(value).text, {"lax": lax, "jnp": jnp})
        assert np.dtype(found) == np.dtype(value) if isinstance(value, type | np.dtype) else found == value
    assert public(lax.linalg.svd_p) == "lax.linalg.svd_p"
    with pytest.raises(Unsaid, match="no public name"):
        said(object())
