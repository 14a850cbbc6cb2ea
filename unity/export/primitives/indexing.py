"""Source of reads and writes of parts of an array: slices, gathers, scatters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax import lax

from unity.export.primitives.primitive_call import AppliedPrimitive, Operand, Printer
from unity.export.simplification import WRAPS_STARTS
from unity.export.source_code import Code, call, sequence
from unity.pcg.ir.program import Equation


def _slice(e: AppliedPrimitive) -> Code:
    x, starts, limits = e.operands[0].tensor, e["start_indices"], e["limit_indices"]
    cut_dims = [k for k in range(x.ndim) if (starts[k], limits[k]) != (0, x.shape[k])]
    contiguous = set(e["strides"] or ()) <= {1}
    if contiguous and len(cut_dims) == 1:
        (k,) = cut_dims
        return call("lax.slice_in_dim", e.codes[0], starts[k], limits[k], axis=k)
    strides = () if contiguous else (tuple(e["strides"]),)
    return call("lax.slice", e.codes[0], tuple(starts), tuple(limits), *strides)


def _dynamic_slice(e: AppliedPrimitive) -> Code:
    x, *starts = e.operands
    sizes = tuple(e["slice_sizes"])
    nonzero_starts = [k for k, s in enumerate(starts) if s.scalar is None or s.scalar.text != "0"]
    cut_dims = [k for k, n in enumerate(x.tensor.shape) if sizes[k] != n]
    if e.get(WRAPS_STARTS) and len(nonzero_starts) == 1 and cut_dims in ([], nonzero_starts):
        (k,) = nonzero_starts
        return call("lax.dynamic_slice_in_dim", x.code, _starts(starts).items[k], sizes[k], axis=k)
    return call("lax.dynamic_slice", x.code, _starts(starts), sizes, **_index_options(e, starts))


def _index_options(e: AppliedPrimitive, starts: Sequence[Operand]) -> dict[str, object]:
    """Return the option that keeps JAX from wrapping starts that the program does not wrap."""
    return {} if e.get(WRAPS_STARTS) or all(s.constant is not None for s in starts) else {"allow_negative_indices": False}


def _starts(starts: Sequence[Operand]) -> Code:
    """Return the start indices. JAX gives Python numbers its default integer type, which depends on jax_enable_x64, and the starts
    must have one type, so Python numbers are used only if all starts are."""
    numbers = [s.scalar for s in starts if s.scalar is not None]
    return sequence(numbers if len(numbers) == len(starts) else [s.code for s in starts])


def _dynamic_update_slice(e: AppliedPrimitive) -> Code:
    x, update, *starts = e.operands
    return call("lax.dynamic_update_slice", x.code, update.code, _starts(starts), **_index_options(e, starts))


def _dimension_numbers(name: str, numbers: Any, optional: Sequence[str]) -> Code:
    fields = {k: v for k, v in zip(numbers._fields, numbers, strict=True) if k not in optional or v}
    return call(f"lax.{name}", **fields)


def index_parameters(e: Equation) -> dict[str, object]:
    """Return the keyword arguments of a gather or scatter about its indices."""
    mode, fill_value = e.params["mode"], e.params.get("fill_value")
    parameters: dict[str, object] = {}
    fill_mode = "fill" if e.name == "gather" else "drop"
    parameters["mode"] = {"CLIP": "clip", "PROMISE_IN_BOUNDS": "promise_in_bounds"}.get(mode.name, fill_mode)
    if mode == lax.GatherScatterMode.FILL_OR_DROP and fill_value is not None:
        parameters["fill_value"] = fill_value
    parameters.update((k, True) for k in ("indices_are_sorted", "unique_indices") if e.params[k])
    return parameters


OPTIONAL_FIELDS = ("operand_batching_dims", "start_indices_batching_dims", "scatter_indices_batching_dims")


def scatter_dimensions(e: Equation) -> Code:
    """Return the dimension numbers of a scatter."""
    return _dimension_numbers("ScatterDimensionNumbers", e.params["dimension_numbers"], OPTIONAL_FIELDS)


def _gather(e: AppliedPrimitive) -> Code:
    numbers = _dimension_numbers("GatherDimensionNumbers", e["dimension_numbers"], OPTIONAL_FIELDS)
    return call("lax.gather", *e.codes, numbers, tuple(e["slice_sizes"]), **index_parameters(e.equation))


def _scatter(e: AppliedPrimitive) -> Code:
    return call(f"lax.{e.name.replace('-', '_')}", *e.codes, scatter_dimensions(e.equation), **index_parameters(e.equation))


INDEXING_PRINTERS: Mapping[str, Printer] = {
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    **dict.fromkeys(("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"), _scatter),
}
