"""Matrix products of any dimension numbers, and convolutions of any rank."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import jax

from unity.pcg.operators.layout import Layout
from unity.pcg.operators.table.sliding import sliding
from unity.pcg.types.accumulation import bounded, narrow, wraps_earlier
from unity.pcg.types.factors import Factor, Facts, Slot, Spec, Window, at, operator

PRODUCT = Facts(linear_in=(at(0), at(1)), product=True, reads_buffers=True, alone=True, extends=True)


def bilinear(operands: Any, result: Any) -> tuple[frozenset[int], ...]:
    """Return the operands, each as a group, in which a product is linear.

    It would read a narrow sum rounded, and a sum of integers wrapped around, unless the result wraps around as early.
    """
    types = ((i, operands[i].dtype) for i in (0, 1))
    return tuple(frozenset({i}) for i, dtype in types if not narrow(dtype) and not wraps_earlier(dtype, result.dtype))


@operator("dot_general", facts=PRODUCT)
def dot_general(params: Any, operands: Any, results: Any) -> Spec:
    """x [batch, free, contracted], y [batch, contracted, free] → [batch, x free, y free], in any order of dimensions.

    Products of booleans are combined by "or".
    """
    (contract_x, contract_y), (batch_x, batch_y) = params["dimension_numbers"]
    x, y = operands
    free_x = [i for i in range(x.ndim) if i not in (*contract_x, *batch_x)]
    free_y = [i for i in range(y.ndim) if i not in (*contract_y, *batch_y)]
    b, m, boolean = len(batch_x), len(batch_x) + len(free_x), results[0].dtype == bool
    factors = (
        *(
            Factor(f"b{k}", x.shape[i], (Slot(i), Slot(j)), (Slot(k),))
            for k, (i, j) in enumerate(zip(batch_x, batch_y, strict=True))
        ),
        *(Factor(f"m{k}", x.shape[i], (Slot(i), None), (Slot(b + k),)) for k, i in enumerate(free_x)),
        *(Factor(f"n{k}", y.shape[j], (None, Slot(j)), (Slot(m + k),)) for k, j in enumerate(free_y)),
        *(
            Factor(f"c{k}", x.shape[i], (Slot(i), Slot(j)), (None,), "or" if boolean else "sum")
            for k, (i, j) in enumerate(zip(contract_x, contract_y, strict=True))
        ),
    )
    terms = prod(x.shape[i] for i in contract_x)
    return Spec(
        tuple(f for f in factors if f.size > 1),
        () if boolean else bilinear(operands, results[0]),
        2.0 * prod(results[0].shape) * terms,
        bounded=bounded((x.dtype, y.dtype), results[0].dtype, terms),
    )


def convolve_pieces(operands: list[jax.Array], layout: Layout) -> list:
    """Convolve pieces: the number of groups follows from the local channels, and halos already include the padding."""
    image, kernel = operands
    numbers, split = layout.params["dimension_numbers"], {d.dim for _, d in layout.operands[0].slices}
    groups = image.shape[numbers.lhs_spec[1]] // kernel.shape[numbers.rhs_spec[1]]
    space = zip(numbers.lhs_spec[2:], layout.params["padding"], strict=True)
    return layout.bind(image, kernel, feature_group_count=groups, padding=tuple((0, 0) if d in split else p for d, p in space))


@operator("conv_general_dilated", local=convolve_pieces, facts=replace(PRODUCT, slides=True))
def convolution(params: Any, operands: Any, results: Any) -> Spec:
    """Image [n, g·c, *space], kernel [g·o, c, *window] → [n, g·o, *space], in any order of dimensions.

    Along spatial dimensions devices exchange halos, if slices of image and result correspond. With batch groups, which occur in
    backward passes only, everything is blocked.
    """
    numbers, groups = params["dimension_numbers"], params["feature_group_count"]
    image, kernel = operands
    (n, c), (o, i), (rn, ro) = numbers.lhs_spec[:2], numbers.rhs_spec[:2], numbers.out_spec[:2]
    window = prod(kernel.shape[d] for d in numbers.rhs_spec[2:])
    flops = 2.0 * prod(results[0].shape) * kernel.shape[i] * window
    if params["batch_group_count"] != 1:
        return Spec((), bilinear(operands, results[0]), flops, tuple((d, "the batch is in groups") for d in numbers.lhs_spec))
    space = zip(
        *(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], params["window_strides"], params["padding"]),
        *(params["rhs_dilation"], params["lhs_dilation"]),
        strict=True,
    )
    windows = [
        (d, Window(image.shape[d], results[0].shape[r], kernel.shape[k], *moves), (Slot(d), None), (Slot(r),))
        for d, k, r, *moves in space
    ]
    spatial, blocked = sliding(windows, "sum")
    factors = (
        Factor("n", image.shape[n], (Slot(n), None), (Slot(rn),)),
        Factor("g", groups, (Slot(c), Slot(o)), (Slot(ro),)),
        Factor("o", kernel.shape[o] // groups, (None, Slot(o, groups)), (Slot(ro, groups),)),
        Factor("c", kernel.shape[i], (Slot(c, groups), Slot(i)), (None,), "sum"),
    )
    return Spec(
        (*(f for f in factors if f.size > 1), *spatial),
        bilinear(operands, results[0]),
        flops,
        blocked,
        tuple(w for _, w, *_ in windows),
    )
