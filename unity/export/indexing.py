"""What reads or writes a part of an array, as source: slices, gathers and scatters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import lax

from unity.export.applied import Applied, Operand, Printer
from unity.export.simplify import WRAPPED
from unity.export.source import Code, call, sequence
from unity.pcg.ir.program import Equation


def _slice(e: Applied) -> Code:
    x, starts, limits = e.operands[0].tensor, e["start_indices"], e["limit_indices"]
    cut = [k for k in range(x.ndim) if (starts[k], limits[k]) != (0, x.shape[k])]
    whole = set(e["strides"] or ()) <= {1}
    if whole and len(cut) == 1:
        (k,) = cut
        return call("lax.slice_in_dim", e.codes[0], starts[k], limits[k], axis=k)
    strides = () if whole else (tuple(e["strides"]),)
    return call("lax.slice", e.codes[0], tuple(starts), tuple(limits), *strides)


def _dynamic_slice(e: Applied) -> Code:
    x, *starts = e.operands
    sizes = tuple(e["slice_sizes"])
    moved = [k for k, s in enumerate(starts) if s.scalar is None or s.scalar.text != "0"]
    cut = [k for k, n in enumerate(x.tensor.shape) if sizes[k] != n]
    if e.get(WRAPPED) and len(moved) == 1 and cut in ([], moved):
        (k,) = moved
        return call("lax.dynamic_slice_in_dim", x.code, _starts(starts).items[k], sizes[k], axis=k)
    return call("lax.dynamic_slice", x.code, _starts(starts), sizes, **_as_they_are(e, starts))


def _as_they_are(e: Applied, starts: Sequence[Operand]) -> dict[str, object]:
    return {} if e.get(WRAPPED) or all(s.constant is not None for s in starts) else {"allow_negative_indices": False}


def _starts(starts: Sequence[Operand]) -> Code:
    """Where a slice starts. Beside others numbers must be of their type, which Python's are if it is the usual one."""
    usual = all(s.constant is not None or s.tensor.dtype == jax.dtypes.canonicalize_dtype(int) for s in starts)
    return sequence([(s.scalar if usual else None) or s.code for s in starts])


def _dynamic_update_slice(e: Applied) -> Code:
    x, update, *starts = e.operands
    return call("lax.dynamic_update_slice", x.code, update.code, _starts(starts), **_as_they_are(e, starts))


def _numbers(name: str, numbers: Any, optional: Sequence[str]) -> Code:
    fields = {k: v for k, v in zip(numbers._fields, numbers, strict=True) if k not in optional or v}
    return call(f"lax.{name}", **fields)


def indexed(e: Equation) -> dict[str, object]:
    """What gathers and scatters say of their indices."""
    mode, fill_value = e.params["mode"], e.params.get("fill_value")
    named: dict[str, object] = {}
    outside = "fill" if e.name == "gather" else "drop"
    named["mode"] = {"CLIP": "clip", "PROMISE_IN_BOUNDS": "promise_in_bounds"}.get(mode.name, outside)
    if mode == lax.GatherScatterMode.FILL_OR_DROP and fill_value is not None:
        named["fill_value"] = fill_value
    named.update((k, True) for k in ("indices_are_sorted", "unique_indices") if e.params[k])
    return named


BATCHING = ("operand_batching_dims", "start_indices_batching_dims", "scatter_indices_batching_dims")


def scattered(e: Equation) -> Code:
    """The dimensions of a scatter."""
    return _numbers("ScatterDimensionNumbers", e.params["dimension_numbers"], BATCHING)


def _gather(e: Applied) -> Code:
    numbers = _numbers("GatherDimensionNumbers", e["dimension_numbers"], BATCHING)
    return call("lax.gather", *e.codes, numbers, tuple(e["slice_sizes"]), **indexed(e.equation))


def _scatter(e: Applied) -> Code:
    return call(f"lax.{e.name.replace('-', '_')}", *e.codes, scattered(e.equation), **indexed(e.equation))


INDEXING: Mapping[str, Printer] = {
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    **dict.fromkeys(("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"), _scatter),
}
