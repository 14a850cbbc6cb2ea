"""The choice of dimensions that are padded: sizes that the devices do not divide, together and each alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from unity.base.errors import InfeasibleError
from unity.pcg.capture.capture import Bodies, Captured
from unity.search.request import Wish
from unity.search.session import Candidate, Search
from unity.transforms.padding.padding import Padding, padding
from unity.transforms.transformation import TransformationCandidate

MOST = 1.6  # a dimension grows by no larger factor: padding that is most of a tensor never pays
SHARE = 0.01  # a size is padded only if its dimensions are in this part of all bytes that the program computes with
ALONE = 3  # as many sizes are tried alone, those in the most bytes


def best(captured: Captured, devices: int, wish: Wish, stored: bool, known: Bodies) -> TransformationCandidate[Padding] | None:
    """Return the best padded program that is better than the plan to beat, or None.

    Args:
        captured: The program.
        devices: The number of devices.
        wish: The request.
        stored: Whether weights may be stored with the padding.
        known: The programs of operators that share domains and prices, for `graph_of`.
    """
    chosen: TransformationCandidate[Padding] | None = None
    for sizes in candidates(captured, devices):
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


def candidates(captured: Captured, devices: int) -> Iterator[Mapping[int, int]]:
    """Yield sets of sizes to pad, each with its padded size: those in the most bytes alone, and all together."""
    sizes = odd_sizes(captured, devices)
    for n in list(sizes)[:ALONE]:
        yield {n: sizes[n]}
    if len(sizes) > 1:
        yield sizes


def odd_sizes(captured: Captured, devices: int) -> dict[int, int]:
    """Return the sizes of dimensions of inputs that the devices do not divide, with padded sizes, those in the most bytes first."""
    body = captured.body
    inputs = {n for v in body.inputs for n in body.tensors[v].shape}
    padded = {n: m for n in inputs if (m := padded_size(n, devices)) is not None}
    if not padded:
        return {}
    computed = {v for e in body.equations for v in e.results} | set(body.inputs)
    nbytes = Counter[int]()
    for v in computed:
        for n in set(body.tensors[v].shape) & padded.keys():
            nbytes[n] += body.tensors[v].nbytes
    total = sum(body.tensors[v].nbytes for v in computed)
    return {n: padded[n] for n, size in nbytes.most_common() if size >= SHARE * total}


def padded_size(n: int, devices: int) -> int | None:
    """Return the next size that all devices, or else most of them, divide. None if that is `n` itself or much larger."""
    for parts in (k for k in range(devices, 1, -1) if devices % k == 0):
        m = -(-n // parts) * parts
        if m <= MOST * n:
            return m if m > n else None
    return None
