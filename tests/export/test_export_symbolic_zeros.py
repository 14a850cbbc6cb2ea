"""Exported derivative rules that ask where a tangent or a cotangent is zero, and return another derivative there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_derivatives import SymbolicZero
from precision import in_64_bits
from refusing_rule import scaled
from small_models import Small, arrays, f
from test_export import PAIR, assert_well_written, names_of_file, planned

import unity
from unity.export.derivative_rules import DerivativeRule


@pytest.fixture(autouse=True)
def _in_64_bits() -> Iterator[None]:
    with in_64_bits():
        yield


def zero(x: Any) -> bool:
    return isinstance(x, SymbolicZero)


def product(sort: bool = False, honest: bool = False) -> Callable[..., Any]:
    """Return a product whose derivative by the weights alone is three times as large, unless the rule is honest."""

    @jax.custom_jvp
    def call(x: Any, w: Any) -> Any:
        return jnp.sort(jnp.sort(x @ w, 0), 1) if sort else x @ w

    def rule(primals: Any, tangents: Any) -> Any:
        (x, w), (dx, dw) = primals, tangents
        by_w = jnp.zeros((len(x), w.shape[1]), x.dtype) if zero(dw) else x @ dw
        if zero(dx):
            return call(x, w), by_w if honest else 3 * by_w
        return call(x, w), by_w + dx @ w

    call.defjvp(rule, symbolic_zeros=True)
    return call


@pytest.mark.parametrize("sort", [False, True], ids=["divided", "whole"])
def test_a_rule_that_asks_which_operands_have_a_tangent_is_exported(sort: bool, tmp_path: Path) -> None:
    call = product(sort)
    model = Small(lambda w, x: (call(x, w) ** 2).sum(), f(8, 6), f(4, 8))
    path = exported(model, tmp_path)
    args, file = (arrays(model.params), arrays(model.batch)), names_of_file(path)
    for argnums in (0, 1, (0, 1)):
        found, wanted = (jax.jit(jax.grad(fn, argnums))(*args) for fn in (file["fn"], model.loss))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), found, wanted)


def test_a_file_that_does_not_ask_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = product()
    monkeypatch.setattr(DerivativeRule, "asks", False)
    with pytest.raises(unity.PlanError):
        exported(Small(lambda w, x: (call(x, w) ** 2).sum(), f(8, 6), f(4, 8)), tmp_path)


def test_a_rule_that_only_refrains_from_what_is_zero_may_ask_too(tmp_path: Path) -> None:
    call = product(honest=True)
    model = Small(lambda w, x: (call(x, w) ** 2).sum(), f(8, 6), f(4, 8))
    args, file = (arrays(model.params), arrays(model.batch)), names_of_file(exported(model, tmp_path))
    found, wanted = (jax.jit(jax.grad(fn))(*args) for fn in (file["fn"], model.loss))
    np.testing.assert_allclose(found, wanted, rtol=1e-10)


def test_a_rule_that_asks_which_results_have_a_cotangent_is_exported(tmp_path: Path) -> None:
    @jax.custom_vjp
    def call(x: Any, w: Any) -> Any:
        return jnp.sort(jnp.sort(jnp.tanh(x @ w), 0), 1), jnp.sin(x @ w)

    def backward(residuals: Any, cotangents: Any) -> Any:
        (x, w), (a, b) = residuals, (0 * residuals[0] @ residuals[1] if zero(c) else c for c in cotangents)
        both = 3 * a if zero(cotangents[1]) else a + b
        return both @ w.T, x.T @ both

    call.defvjp(lambda x, w: (call(x.value, w.value), (x.value, w.value)), backward, symbolic_zeros=True)

    def loss(w: Any, x: Any) -> Any:
        a, b = call(x, w)
        return (jnp.where(b > 0.1, a, 0) ** 2).sum()

    model = Small(loss, f(8, 6), f(4, 8))
    args, file = (arrays(model.params), arrays(model.batch)), names_of_file(exported(model, tmp_path))
    found, wanted = (jax.jit(jax.grad(fn, (0, 1)))(*args) for fn in (file["fn"], model.loss))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), found, wanted)


def test_a_rule_that_refuses_some_operands_is_refused_at_its_line(tmp_path: Path) -> None:
    model = Small(lambda w, x: (scaled(x @ w, x[0]) ** 2).sum(), f(8, 6), f(4, 8))
    with pytest.raises(unity.ExportError, match=r"symbolic_zeros\.py:\d+.*custom_vjp.*: its derivative rule refuses"):
        exported(model, tmp_path)


def exported(model: Small, folder: Path) -> Path:
    """Export a plan with a random strategy."""
    path = folder / "exported.py"
    planned(model, PAIR, 1).files.export(path)
    assert_well_written(path)
    return path
