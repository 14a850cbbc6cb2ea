"""The choice of dimensions that are padded: sizes that the devices do not divide or are slow with, together and each alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from unity.base.errors import InfeasibleError
from unity.machine.machine import Machine
from unity.pcg.capture.capture import Bodies, Captured
from unity.search.cost.alignment import aligned_elements
from unity.search.request import Wish
from unity.search.session import Candidate, Search
from unity.transforms.padding.padding import Padding, padding
from unity.transforms.transformation import TransformationCandidate

MOST = 1.6  # a dimension grows by no larger factor: padding that is most of a tensor never pays
SHARE = 0.01  # a size is padded only if its dimensions are in this part of all bytes that the program computes with
ALONE = 3  # as many sizes are tried alone, those in the most bytes


def best(captured: Captured, machine: Machine, wish: Wish, stored: bool, known: Bodies) -> TransformationCandidate[Padding] | None:
    """Return the best padded program that is better than the plan to beat, or None.

    Args:
        captured: The program.
        machine: The devices.
        wish: The request.
        stored: Whether weights may be stored with the padding.
        known: The programs of operators that share domains and prices, for `graph_of`.
    """
    chosen: TransformationCandidate[Padding] | None = None
    for sizes in candidates(captured, machine):
        transformation = padding(captured, sizes, stored, known)
        if transformation is None:
            continue
        wish.say(str(transformation))
        search = wish.search(transformation.after)
        candidate = _best(search, wish)
        if candidate is not None and (chosen is None or wish.worth(candidate) < wish.worth(chosen.candidate)):
            chosen = TransformationCandidate(transformation, search, candidate)
    return chosen


def _best(search: Search, wish: Wish) -> Candidate | None:
    try:
        return wish.choose(search)
    except InfeasibleError:
        return None


def candidates(captured: Captured, machine: Machine) -> Iterator[Mapping[int, int]]:
    """Yield sets of sizes to pad, each with its padded size: those in the most bytes alone, and all together."""
    sizes = odd_sizes(captured, machine)
    for n in list(sizes)[:ALONE]:
        yield {n: sizes[n]}
    if len(sizes) > 1:
        yield sizes


def odd_sizes(captured: Captured, machine: Machine) -> dict[int, int]:
    """Return the sizes of dimensions of inputs that pay to be padded, with padded sizes, those in the most bytes first.

    The devices do not divide such a size, or matrix products over one device's part of it are misaligned.
    """
    body = captured.body
    computed = {v for e in body.equations for v in e.results} | set(body.inputs)
    units = Counter[int]()
    if machine.device.misaligned > 1:
        for tensor in map(body.tensors.__getitem__, computed):
            units |= dict.fromkeys(tensor.shape, aligned_elements(tensor.dtype))
    inputs = {n for v in body.inputs for n in body.tensors[v].shape}
    padded = {n: m for n in inputs if (m := padded_size(n, machine.devices, max(units[n], 1))) is not None}
    if not padded:
        return {}
    nbytes = Counter[int]()
    for v in computed:
        for n in set(body.tensors[v].shape) & padded.keys():
            nbytes[n] += body.tensors[v].nbytes
    total = sum(body.tensors[v].nbytes for v in computed)
    return {n: padded[n] for n, size in nbytes.most_common() if size >= SHARE * total}


def padded_size(n: int, devices: int, unit: int = 1) -> int | None:
    """Return the next size that all devices, or else most of them, divide. None if that is `n` itself or much larger.

    Args:
        n: The size.
        devices: The number of devices.
        unit: The part of each device is a multiple of it, unless that is much larger.
    """
    for parts, part in ((k, u) for k in range(devices, 0, -1) if devices % k == 0 for u in (unit, 1)):
        m = -(-n // (parts * part)) * parts * part
        if m <= MOST * n:
            return m if m > n else None
    return None
