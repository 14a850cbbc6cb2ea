"""One equation as it is written down: its operands' expressions, its parameters and its tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unity.export.source import UNARY, Code, call, sequence
from unity.pcg.ir.program import Equation, Literal, Tensor


@dataclass(frozen=True, eq=False)
class Operand:
    """An operand: its expression, and the axes along which it differs.

    `constant`: the literal that it is; `maker`: what made it, if only this use needs that; `bare`: the same before it was made to
    vary, where JAX's functions do that themselves and no gradient knows of it.
    """

    code: Code
    tensor: Tensor
    varying: frozenset[str] = frozenset()
    constant: Literal | None = None
    maker: Applied | None = None
    bare: Operand | None = None

    @property
    def scalar(self) -> Code | None:
        """The constant as a Python number, where one stands for it beside another operand of its type."""
        value = None if self.constant is None else np.asarray(self.constant.value)
        if value is None or value.shape or (value.dtype.kind not in "bif" and value.dtype != jnp.bfloat16):
            return None
        if value.dtype.kind == "i" and not -(2**31) <= int(value) < 2**31:
            return None
        return number(value)


@dataclass(frozen=True, eq=False)
class Applied:
    """One application of a primitive."""

    equation: Equation
    operands: tuple[Operand, ...]
    results: tuple[Tensor, ...]

    @property
    def name(self) -> str:
        return self.equation.name

    @property
    def codes(self) -> list[Code]:
        """The operands' expressions."""
        return [o.code for o in self.operands]

    def __getitem__(self, parameter: str) -> Any:
        return self.equation.params[parameter]

    def get(self, parameter: str) -> Any:
        """A parameter, or None."""
        return self.equation.params.get(parameter)


Printer = Callable[[Applied], Code]


def number(value: np.ndarray) -> Code:
    """A scalar as a Python number; the shortest that is read back as the same in its own precision."""
    if value.dtype.kind == "c":
        return Code(f"complex({number(np.real(value))}, {number(np.imag(value))})")
    x = value.item() if value.dtype.kind != "f" or value.dtype == np.float64 else float(str(value))
    if value.dtype == jnp.bfloat16:
        x = float(value)
    if isinstance(x, float) and not np.isfinite(x):
        text = "jnp.nan" if np.isnan(x) else "jnp.inf" if x > 0 else "-jnp.inf"
        return Code(text, UNARY)
    text = repr(x).replace("e+", "e")  # as formatters have it
    return Code(text, UNARY if text.startswith("-") else Code("").level)


def dtype_code(dtype: Any) -> Code:
    """A dtype by its public name."""
    name = np.dtype(dtype).name if dtype != jax.dtypes.float0 else "float0"
    return Code({"bool": "jnp.bool_", "float0": "jax.dtypes.float0"}.get(name, f"jnp.{name}"))


def array_code(value: np.ndarray) -> Code:
    """A small array, or a scalar with its type, as a literal."""
    if not value.size or value.dtype == jax.dtypes.float0:  # as a list it would have one dimension, or elements
        return Code(f"np.zeros({value.shape}, dtype={dtype_code(value.dtype)})")
    if not value.shape:
        return Code(f"{dtype_code(value.dtype)}({number(value)})")
    return call("np.array", _nested(value), dtype=dtype_code(value.dtype))


def _nested(value: np.ndarray) -> Code:
    return sequence([_nested(v) for v in value], "[]") if value.shape else number(value)
