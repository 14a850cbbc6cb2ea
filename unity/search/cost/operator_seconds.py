"""Seconds of an operator on one device, forward and backward, for every way to parallelize it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import prod

import numpy as np

from unity.machine.machine import Machine
from unity.machine.profiles.profile import Shapes
from unity.pcg.analysis.views import costs_nothing
from unity.pcg.ir.program import Atom, Body
from unity.search.cost.alignment import depends_on_alignment, row_dimensions, slowdown
from unity.search.cost.branch_operators import Branch, conditionals, is_measured_in_every_branch
from unity.search.cost.profile_lookup import INTERPOLATED, MEASURED, ROOFLINE, Piece, lookup
from unity.search.cost.roofline import dense_work, local_traffic, roofline

Array = np.ndarray


@dataclass(frozen=True, eq=False)
class Pieces:
    """One device's part of an operator, arrays with an entry for each way to parallelize it.

    Args:
        share: The fraction of the work.
        touched: Bytes of operands and results that are read or written.
        zeroed: Bytes of gradients that are zeroed before rows are added to them.
        sizes: Local sizes of all dimensions, one tensor after the other, [ways, dimensions]; None if the seconds do not depend on
            them.
    """

    share: Array
    touched: Array
    zeroed: Array
    sizes: Array | None


def single_piece(
    body: Body, shapes: Sequence[tuple[int, ...]], share: float, differentiated: Sequence[bool], moved: float = 0.0
) -> Pieces:
    """Return one device's part of an operator, parallelized in one way.

    Args:
        body: The operator's program.
        shapes: The local shapes of its operands and results.
        share: The fraction of the work.
        differentiated: For each operand, whether it has a gradient.
        moved: Bytes on the device of values that are moved inside, before and after.
    """
    atoms = (*body.inputs, *body.outputs)
    nbytes = [prod(shape) * body.tensor(a).itemsize for a, shape in zip(atoms, shapes, strict=True)]
    touched, zeroed = local_traffic(body, nbytes, share, differentiated)
    sizes = np.array([[n for shape in shapes for n in shape]], int)
    return Pieces(np.array([share], float), np.array([touched + moved], float), np.array([zeroed], float), sizes)


def seconds(
    body: Body, shapes: Sequence[tuple[int, ...]], pieces: Pieces, differentiated: Sequence[bool], machine: Machine
) -> tuple[Array, Array, Sequence[str]]:
    """Return the seconds forward and backward of every way to parallelize an operator, and their source (see `profile_lookup`).

    There are many ways, but few different pieces, so each distinct piece is looked up once.

    Args:
        body: The operator's program.
        shapes: The global shapes of its operands and results.
        pieces: One device's part of it, for every way.
        differentiated: For each operand, whether it has a gradient.
        machine: The devices, with their profile.
    """
    if costs_nothing(body):
        nothing = np.zeros(len(pieces.share))
        return nothing, nothing, (ROOFLINE,) * len(nothing)
    forward, backward, how = _seconds_without_branches(body, shapes, pieces, differentiated, machine)
    flags = tuple(map(bool, differentiated))
    if not conditionals(body, flags):
        return forward, backward, how
    estimated = ~np.isin(how, (MEASURED, INTERPOLATED)) | (not is_measured_in_every_branch(body))
    bounds = zip((forward, backward), branch_seconds(body, flags, machine).at(pieces.share), strict=True)
    forward, backward = (np.where(estimated, np.maximum(alone, within), alone) for alone, within in bounds)
    return forward, backward, how


def _seconds_without_branches(
    body: Body, shapes: Sequence[tuple[int, ...]], pieces: Pieces, differentiated: Sequence[bool], machine: Machine
) -> tuple[Array, Array, Sequence[str]]:
    """Return the result of `seconds` if branches took no time. Measured seconds include those of the branches that ran."""
    flops, dtype = dense_work(body)
    if machine.profile is None or pieces.sizes is None:
        slower = 1.0, 1.0
        if pieces.sizes is not None and depends_on_alignment(machine.device, body):
            slower = slowdown(machine.device, dtype, *_row_sizes(pieces.sizes, shapes, body))
        count, launched = sum(differentiated), bool(body.equations)
        work = flops * pieces.share
        bounds = roofline(machine.device, work, dtype, pieces.touched, count, launched, slower, pieces.zeroed)
        return *bounds, (ROOFLINE,) * len(pieces.share)
    keys = np.column_stack([pieces.sizes, pieces.share])
    _, first, index = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    flags, ranks = tuple(map(bool, differentiated)), [len(shape) for shape in shapes]
    distinct = [
        lookup(machine.profile, machine.device, body, Piece(_split(pieces.sizes[k], ranks), *size), flags)
        for k, *size in zip(first, flops * pieces.share[first], pieces.touched[first], pieces.zeroed[first], strict=True)
    ]
    index = index.reshape(-1)
    forward, backward = (np.array([getattr(t, name) for t in distinct])[index] for name in ("forward", "backward"))
    return forward, backward, [distinct[k].how for k in index]


@dataclass(frozen=True, eq=False)
class BranchSeconds:
    """Seconds of the branches of an operator's conditionals, [conditional][branch] arrays of the seconds forward and backward.

    Args:
        work: Seconds in proportion to the device's share of the work.
        launches: Seconds of launching the operators.
    """

    work: tuple[tuple[Array, ...], ...]
    launches: tuple[tuple[Array, ...], ...]

    def at(self, share: Array) -> Array:
        """Return the seconds of the slowest branches for every share of the work, [forward and backward, ways]."""
        total = np.zeros((2, len(share)))
        for branches in zip(self.work, self.launches, strict=True):
            total += np.max([launch[:, None] + work[:, None] * share for work, launch in zip(*branches, strict=True)], axis=0)
        return total


@lru_cache(maxsize=4096)
def branch_seconds(body: Body, differentiated: tuple[bool, ...], machine: Machine) -> BranchSeconds:
    """Return the seconds of the operators in the branches of conditionals in an operator's program.

    An operator that a checkpoint in a branch recomputes runs forward once more in the backward pass.
    """
    pairs = [[_seconds_of_branch(b, machine) for b in branches] for branches in conditionals(body, differentiated)]
    work, launches = (tuple(tuple(pair[k] for pair in branches) for branches in pairs) for k in (0, 1))
    return BranchSeconds(work, launches)


def _seconds_of_branch(branch: Branch, machine: Machine) -> tuple[Array, Array]:
    """Return the seconds of the operators of a branch, forward and backward: those of their work, and of launching them."""
    work, launches = np.zeros(2), np.zeros(2)
    for operator in branch:
        piece = single_piece(operator.body, operator.shapes, 1.0, operator.differentiated)
        forward, backward, _ = seconds(operator.body, operator.shapes, piece, operator.differentiated, machine)
        each = np.array([forward[0], backward[0]])
        launch = np.minimum(each, machine.device.launch)
        runs = np.array([[operator.forward, 0], [operator.again, operator.backward]])
        rows = operator.backward * np.array(operator.stacking.seconds(machine.device.launch))
        work, launches = work + runs @ (each - launch), launches + runs @ launch + rows
    return work, launches


def _row_sizes(sizes: Array, shapes: Sequence[tuple[int, ...]], body: Body) -> tuple[list[Array], Array]:
    """Return the local sizes of the rows of a product's operands, and of its result, for every way to parallelize it."""
    (product,) = body.equations
    starts = dict(zip((*body.inputs, *body.outputs), accumulate((len(shape) for shape in shapes), initial=0), strict=False))

    def size(atom: Atom, dims: tuple[int, ...]) -> Array:
        if not isinstance(atom, int):  # every device has all of a literal
            return np.full(len(sizes), prod(atom.tensor.shape[d] for d in dims))
        return np.prod(sizes[:, [starts[atom] + d for d in dims]], axis=1, dtype=int)

    *operands, result = map(size, (*product.operands, *product.results), row_dimensions(body))
    return operands, result


def _split(sizes: Iterable[int], ranks: Iterable[int]) -> Shapes:
    """Split sizes of dimensions into shapes of the given ranks."""
    following = iter(sizes)
    return tuple(tuple(int(next(following)) for _ in range(rank)) for rank in ranks)
