"""Primitives by public names: of a function, where one is the primitive and nothing else; of the primitive itself otherwise."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import primitives

from unity.export.applied import Applied, Printer, dtype_code
from unity.export.primitives import PRIMITIVES, precision
from unity.export.random import PRIMITIVES_BY_NAME
from unity.export.source import Code, call, sequence
from unity.pcg.ir.program import Equation

HOMES = {"lax": lax, "lax.linalg": lax.linalg, PRIMITIVES_BY_NAME: primitives}  # modules that an exported file has


class Unsaid(Exception):
    """A parameter that has no public name. The message names it."""


def named(function: str, **usual: Any) -> Printer:
    """A function of all operands. `usual`: its parameters and what they usually are, which is left out."""

    def printed(e: Applied) -> Code:
        given = {k: e[k] for k, value in usual.items() if e[k] != value}
        return call(function, *e.codes, **{k: said(v) for k, v in given.items()})

    return printed


def _fft(e: Applied) -> Code:
    return call("lax.fft", e.codes[0], said(e["fft_type"]), tuple(e["fft_lengths"]))


def _eigh(e: Applied) -> Code:
    how = {"lower": e["lower"], "symmetrize_input": False, "sort_eigenvalues": e["sort_eigenvalues"]}
    how |= {name: said(e[k]) for name, k in (("subset_by_index",) * 2, ("implementation", "algorithm")) if e[k] is not None}
    return call("lax.linalg.eigh", *e.codes, **how)


def _permutation(e: Applied) -> Code:
    return call("lax.linalg.lu_pivots_to_permutation", *e.codes, e["permutation_size"])


def _ragged(e: Applied) -> Code:
    numbers = e["ragged_dot_dimension_numbers"]
    dense = tuple(tuple(map(tuple, pair)) for pair in numbers.dot_dimension_numbers)
    groups = tuple(numbers.lhs_ragged_dimensions), tuple(numbers.rhs_group_dimensions)
    how: dict[str, object] = {}
    if e["precision"] is not None:
        how["precision"] = precision(e["precision"])
    if e["preferred_element_type"] is not None:
        how["preferred_element_type"] = dtype_code(e["preferred_element_type"])
    return call("lax.ragged_dot_general", *e.codes, call("lax.RaggedDotDimensionNumbers", dense, *groups), **how)


def _geqrf(e: Applied) -> Code:
    raw = call("jnp.linalg.qr", *e.codes, mode="raw")  # which is as LAPACK has it, by columns
    return Code(f"(lambda reflectors, scalars: (reflectors.mT, scalars))(*{raw})")


def _ldexp(e: Applied) -> Code:
    return sequence([call("jnp.ldexp", *e.codes)])  # its primitive has a list of results


_SIDES = {"left_side": False, "lower": False, "transpose_a": False, "conjugate_a": False, "unit_diagonal": False}

FACES: Mapping[str, Printer] = {
    "fft": _fft,
    "eigh": _eigh,
    "lu": named("lax.linalg.lu"),
    "lu_pivots_to_permutation": _permutation,
    "ragged_dot_general": _ragged,
    "geqrf": _geqrf,
    "qr": named("lax.linalg.qr", pivoting=False, full_matrices=True, use_magma=None),
    "householder_product": named("lax.linalg.householder_product"),
    "ormqr": named("lax.linalg.ormqr", left=True, transpose=False),
    "hessenberg": named("lax.linalg.hessenberg"),
    "triangular_solve": named("lax.linalg.triangular_solve", **_SIDES),
    "tridiagonal": named("lax.linalg.tridiagonal", lower=True),
    "tridiagonal_solve": named("lax.linalg.tridiagonal_solve", perturb_singular=False),
    "regularized_incomplete_beta": named("lax.betainc"),
    "mulhi": named("lax.mulhi"),
    "frexp": named("jnp.frexp"),
    "ldexp": _ldexp,
}


def printer_of(e: Equation) -> Printer | None:
    """How a primitive is written; None if it has no public name."""
    known = PRIMITIVES.get(e.name) or FACES.get(e.name)
    if known is not None:
        return known
    name = public(e.primitive)
    return None if name is None else lambda applied: call(f"{name}.bind", *applied.codes, **_parameters(applied))


def _parameters(e: Applied) -> dict[str, Code]:
    return {name: said(value) for name, value in e.equation.params.items()}


@cache
def public(thing: Any) -> str | None:
    """Where something is found in JAX's public modules."""
    for home, module in HOMES.items():
        for name, value in vars(module).items():
            if value is thing and not name.startswith("_"):
                return f"{home}.{name}"
    return None


def said(value: Any) -> Code:
    """A parameter as source. Raises Unsaid if it has a part without a public name."""
    if isinstance(value, Enum):
        return Code(f"{_public(type(value))}.{value.name}")
    if value is None or isinstance(value, bool | int | float | str):
        return call("", value).items[0]
    if isinstance(value, np.dtype) or (isinstance(value, type) and hasattr(value, "dtype")):
        return dtype_code(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: said(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return call(_public(type(value)), **fields)
    if isinstance(value, tuple | list) and type(value) in (tuple, list):
        return sequence([said(v) for v in value])
    return Code(_public(value))


def _public(thing: Any) -> str:
    try:
        found = public(thing)
    except TypeError:  # which cannot be looked up
        found = None
    if found is None:
        raise Unsaid(f"its parameter {thing!r} has no public name in JAX {jax.__version__}")
    return found
