"""The application of a primitive to expressions, which printers of primitives take; and literals of numbers, dtypes, arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unity.export.source_code import UNARY, Code, call, sequence
from unity.pcg.ir.program import Equation, Literal, Tensor


@dataclass(frozen=True, eq=False)
class Operand:
    """An operand: its expression, its tensor, and the mesh axes along which devices differ in it.

    Attributes:
        code: the expression.
        tensor: the shape and dtype.
        varying: the mesh axes along which it varies.
        constant: the literal, if the operand is one.
        producer: the application that computes it, if this is its only use.
        bare: the operand before a `pvary` that JAX's functions insert themselves, and that no gradient depends on.
    """

    code: Code
    tensor: Tensor
    varying: frozenset[str] = frozenset()
    constant: Literal | None = None
    producer: AppliedPrimitive | None = None
    bare: Operand | None = None

    @property
    def scalar(self) -> Code | None:
        """The constant as a Python number, if that has the same meaning beside an operand of the same dtype; else None."""
        value = None if self.constant is None else np.asarray(self.constant.value)
        if value is None or value.shape or (value.dtype.kind not in "bif" and value.dtype != jnp.bfloat16):
            return None
        if value.dtype.kind == "i" and not -(2**31) <= int(value) < 2**31:
            return None
        return number(value)


@dataclass(frozen=True, eq=False)
class AppliedPrimitive:
    """One application of a primitive: the equation, its operands and its results."""

    equation: Equation
    operands: tuple[Operand, ...]
    results: tuple[Tensor, ...]

    @property
    def name(self) -> str:
        return self.equation.name

    @property
    def codes(self) -> list[Code]:
        """The expressions of the operands."""
        return [o.code for o in self.operands]

    def __getitem__(self, parameter: str) -> Any:
        return self.equation.params[parameter]

    def get(self, parameter: str) -> Any:
        """Return a parameter, or None if the equation does not have it."""
        return self.equation.params.get(parameter)


Printer = Callable[[AppliedPrimitive], Code]


def number(value: np.ndarray) -> Code:
    """Return a scalar as a Python number: the shortest text that reads back as the same value in its own precision."""
    if value.dtype.kind == "c":
        return Code(f"complex({number(np.real(value))}, {number(np.imag(value))})")
    x = value.item() if value.dtype.kind != "f" or value.dtype == np.float64 else float(str(value))
    if value.dtype == jnp.bfloat16:
        x = float(value)
    if isinstance(x, float) and not np.isfinite(x):
        text = "jnp.nan" if np.isnan(x) else "jnp.inf" if x > 0 else "-jnp.inf"
        return Code(text, UNARY)
    text = repr(x).replace("e+", "e")  # as formatters write it
    return Code(text, UNARY if text.startswith("-") else Code("").level)


def dtype_code(dtype: Any) -> Code:
    """Return a dtype by its public name."""
    name = np.dtype(dtype).name if dtype != jax.dtypes.float0 else "float0"
    return Code({"bool": "jnp.bool_", "float0": "jax.dtypes.float0"}.get(name, f"jnp.{name}"))


def array_code(value: np.ndarray) -> Code:
    """Return a small array, or a scalar of a certain dtype, as a literal."""
    if not value.size or value.dtype == jax.dtypes.float0:  # a list would have one dimension, or elements
        return Code(f"np.zeros({value.shape}, dtype={dtype_code(value.dtype)})")
    if not value.shape:
        return Code(f"{dtype_code(value.dtype)}({number(value)})")
    return call("np.array", _nested_list(value), dtype=dtype_code(value.dtype))


def _nested_list(value: np.ndarray) -> Code:
    return sequence([_nested_list(v) for v in value], "[]") if value.shape else number(value)
