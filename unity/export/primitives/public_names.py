"""Source of primitives by public names: of a function that is exactly the primitive, or else of the primitive itself."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from enum import Enum
from functools import cache, lru_cache
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import primitives

from unity.export.primitives.primitive_call import AppliedPrimitive, Printer, dtype_code
from unity.export.primitives.random_bits import PRIMITIVES_MODULE
from unity.export.primitives.table import PRIMITIVES, precision_code
from unity.export.source_code import Code, call, sequence
from unity.pcg.ir.program import Equation, params_key
from unity.pcg.operators import routed_product

FUNCTION_MODULES = ("lax", "lax.linalg")
ROUTED_PRODUCT = "routed_product"  # the primitive's name in its module, and in files
PUBLIC_MODULES = {"lax": lax, "lax.linalg": lax.linalg, PRIMITIVES_MODULE: primitives}  # that an exported file imports


class NoPublicName(Exception):
    """A parameter without a public name in JAX. The message names it."""


def _fft(e: AppliedPrimitive) -> Code:
    return call("lax.fft", e.codes[0], value_code(e["fft_type"]), tuple(e["fft_lengths"]))


def _eigh(e: AppliedPrimitive) -> Code:
    options = {"lower": e["lower"], "symmetrize_input": False, "sort_eigenvalues": e["sort_eigenvalues"]}
    options |= {
        name: value_code(e[k]) for name, k in (("subset_by_index",) * 2, ("implementation", "algorithm")) if e[k] is not None
    }
    return call("lax.linalg.eigh", *e.codes, **options)


def _ragged(e: AppliedPrimitive) -> Code:
    numbers = e["ragged_dot_dimension_numbers"]
    dense = tuple(tuple(map(tuple, pair)) for pair in numbers.dot_dimension_numbers)
    groups = tuple(numbers.lhs_ragged_dimensions), tuple(numbers.rhs_group_dimensions)
    options: dict[str, object] = {}
    if e["precision"] is not None:
        options["precision"] = precision_code(e["precision"])
    if e["preferred_element_type"] is not None:
        options["preferred_element_type"] = dtype_code(e["preferred_element_type"])
    return call("lax.ragged_dot_general", *e.codes, call("lax.RaggedDotDimensionNumbers", dense, *groups), **options)


def _routed(e: AppliedPrimitive) -> Code:
    options: dict[str, object] = {name: e[name] for name in ("count", "contracted")}
    options["precision"] = None if e["precision"] is None else precision_code(e["precision"])
    element_type = e["preferred_element_type"]
    options["preferred_element_type"] = None if element_type is None else dtype_code(element_type)
    return call(f"{ROUTED_PRODUCT}.bind", *e.codes, **options)


def routed_definition() -> list[str]:
    """Return the lines that define the products of rows with labels in a file that uses them."""
    text = inspect.getsource(routed_product)
    return text[text.index("\nROUTED = ") :].strip().splitlines()


def _geqrf(e: AppliedPrimitive) -> Code:
    raw = call("jnp.linalg.qr", *e.codes, mode="raw")  # column-major, as LAPACK returns it
    return Code(f"(lambda reflectors, scalars: (reflectors.mT, scalars))(*{raw})")


def _ldexp(e: AppliedPrimitive) -> Code:
    return sequence([call("jnp.ldexp", *e.codes)])  # the primitive has a list of results


FUNCTION_PRINTERS: Mapping[str, Printer] = {
    "fft": _fft,
    "eigh": _eigh,
    "ragged_dot_general": _ragged,
    "routed_dot": _routed,
    "geqrf": _geqrf,
    "regularized_incomplete_beta": lambda e: call("lax.betainc", *e.codes),
    "frexp": lambda e: call("jnp.frexp", *e.codes),
    "ldexp": _ldexp,
}


def printer_of(e: Equation) -> Printer | None:
    """Return the printer of an equation's primitive, or None if it has no public name."""
    printer = PRIMITIVES.get(e.name) or FUNCTION_PRINTERS.get(e.name)
    if printer is not None and e.params.get("accuracy") is None:  # the functions of jax.numpy have no such parameter
        return printer
    return None if public_name(e.primitive) is None else _by_public_name


def _by_public_name(e: AppliedPrimitive) -> Code:
    """Return a call of the public function that is this application, or else of the primitive."""
    types = tuple(o.tensor.struct for o in e.operands)
    for module in FUNCTION_MODULES:
        match = _options(_Application(module, e.equation.signature, types, e.equation))
        if match is not None:
            options, is_bare = match
            code = call(f"{module}.{e.name}", *e.codes, **{k: value_code(v) for k, v in options.items()})
            return sequence([code]) if is_bare and e.equation.primitive.multiple_results else code
    return call(f"{public_name(e.equation.primitive)}.bind", *e.codes, **_parameters(e))


@dataclasses.dataclass(frozen=True)
class _Application:
    """An equation, the types of its operands, and a module whose function may be the same; equal ones have equal options."""

    module: str
    signature: str
    types: tuple[jax.ShapeDtypeStruct, ...]
    equation: Equation = dataclasses.field(compare=False)


@lru_cache(maxsize=4096)
def _options(application: _Application) -> tuple[Mapping[str, Any], bool] | None:
    """Return the keyword arguments with which a function of the primitive's name is exactly an equation, or None.

    The second value is whether the function returns a bare array although the primitive has a list of results, as the function
    for singular values alone does.
    """
    e = application.equation
    function = getattr(PUBLIC_MODULES[application.module], e.name, None)
    if function is None:
        return None
    accepted = inspect.signature(function).parameters
    options = {k: v for k, v in e.params.items() if k in accepted and accepted[k].default != v}
    try:
        closed, shape = jax.make_jaxpr(lambda *xs: function(*xs, **options), return_shape=True)(*application.types)
    except (TypeError, ValueError):
        return None
    program, is_bare = closed.jaxpr, isinstance(shape, jax.ShapeDtypeStruct)
    alike = [(eqn.primitive, eqn.invars, eqn.outvars, params_key(eqn.params)) for eqn in program.eqns]
    return (options, is_bare) if alike == [(e.primitive, program.invars, program.outvars, params_key(e.params))] else None


def _parameters(e: AppliedPrimitive) -> dict[str, Code]:
    return {name: value_code(value) for name, value in e.equation.params.items()}


@cache
def public_name(target: Any) -> str | None:
    """Return the name of an object in JAX's public modules, or None."""
    for module_name, module in PUBLIC_MODULES.items():
        for name, value in vars(module).items():
            if value is target and not name.startswith("_"):
                return f"{module_name}.{name}"
    return None


def value_code(value: Any) -> Code:
    """Return a parameter's value as source.

    Raises:
        NoPublicName: the value has a part without a public name.
    """
    if isinstance(value, Enum):
        return Code(f"{_name_or_raise(type(value))}.{value.name}")
    if value is None or isinstance(value, bool | int | float | str):
        return call("", value).items[0]
    if isinstance(value, np.dtype) or (isinstance(value, type) and hasattr(value, "dtype")):
        return dtype_code(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: value_code(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return call(_name_or_raise(type(value)), **fields)
    if isinstance(value, lax.Tolerance):
        return call("lax.Tolerance", atol=value.atol, rtol=value.rtol, ulps=value.ulps)
    if isinstance(value, tuple | list) and type(value) in (tuple, list):
        return sequence([value_code(v) for v in value])
    return Code(_name_or_raise(value))


def _name_or_raise(target: Any) -> str:
    try:
        name = public_name(target)
    except TypeError:  # not hashable
        name = None
    if name is None:
        raise NoPublicName(f"its parameter {target!r} has no public name in JAX {jax.__version__}")
    return name
