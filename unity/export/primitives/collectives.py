"""Collectives as source: the functions of `jax.lax` that communicate along mesh axes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unity.export.primitives.primitive_call import AppliedPrimitive, Printer
from unity.export.source_code import Code, call, literal, sequence
from unity.pcg.types.varying_axes import CAST


def axis_names(axis_or_axes: Any) -> object:
    """Return the names of mesh axes as JAX takes them: one axis alone, several as a tuple."""
    axes = tuple(axis_or_axes) if isinstance(axis_or_axes, (tuple, list)) else (axis_or_axes,)
    return axes[0] if len(axes) == 1 else axes


def _pvary(e: AppliedPrimitive) -> Code:
    return call("lax.pcast", e.codes[0], axis_names(e["axes"]), to="varying")


def _all_gather(e: AppliedPrimitive) -> Code:
    to = {"to": "invarying"} if e.name == "all_gather_invariant" else {}
    return call("lax.all_gather", e.codes[0], axis_names(e["axis_name"]), axis=e["all_gather_dimension"], tiled=e["tiled"], **to)


def _reduce_scatter(e: AppliedPrimitive) -> Code:
    options = {"scatter_dimension": e["scatter_dimension"], "tiled": e["tiled"]}
    return call("lax.psum_scatter", e.codes[0], axis_names(e["axis_name"]), **options)


def _all_to_all(e: AppliedPrimitive) -> Code:
    return call("lax.all_to_all", e.codes[0], axis_names(e["axis_name"]), e["split_axis"], e["concat_axis"], tiled=e["tiled"])


def _ppermute(e: AppliedPrimitive) -> Code:
    return call("lax.ppermute", e.codes[0], axis_names(e["axis_name"]), sequence([literal(tuple(p)) for p in e["perm"]], "[]"))


# A cast that JAX lacks, of values that are replicated although JAX infers that they vary. Files that use it define it.
# The custom rules around it give first derivatives; its own rule is for the derivatives of those rules.
UNREPLICATE_DEFINITION = """
# What all devices hold alike, though JAX takes it to differ.
unreplicate = Primitive("unreplicate")
unreplicate.def_impl(lambda x, *, axes: x)
mlir.register_lowering(unreplicate, lambda context, x, *, axes: [x])


@unreplicate.def_abstract_eval
def _unreplicated(x, *, axes):
    known = x.manual_axis_type
    return x.update(manual_axis_type=known.update(varying=known.varying - set(axes)))


def _first_cotangent(cotangent, x, *, axes):
    first = jnp.all(jnp.stack([lax.axis_index(axis) == 0 for axis in axes]))
    cotangent = lax.pcast(cotangent, axes, to="varying")
    return [jnp.where(first, cotangent, jnp.zeros_like(cotangent))]


ad.deflinear2(unreplicate, _first_cotangent)
batching.defvectorized(unreplicate)
"""

COMMUNICATION_PRINTERS: Mapping[str, Printer] = {
    CAST: lambda e: call(f"{CAST}.bind", e.codes[0], axes=literal(tuple(e["axes"]))),
    "pvary": _pvary,
    "psum": lambda e: call("lax.psum", e.codes[0], axis_names(e["axes"])),
    "psum_invariant": lambda e: call("lax.psum", e.codes[0], axis_names(e["axes"])),
    "pmax": lambda e: call("lax.pmax", e.codes[0], axis_names(e["axes"])),
    "pmin": lambda e: call("lax.pmin", e.codes[0], axis_names(e["axes"])),
    "all_gather": _all_gather,
    "all_gather_invariant": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "ppermute": _ppermute,
    "axis_index": lambda e: call("lax.axis_index", axis_names(e["axis_name"])),
}

COLLECTIVES = frozenset(
    {"psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant", "reduce_scatter", "all_to_all", "ppermute"}
)
