"""Assumptions about where the samples of a program are: their number, and the dimension along which an input has them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from unity.pcg.capture.capture import Captured
from unity.pcg.types.parallel_type import REPLICATED, State
from unity.transforms.strided_micro_batches import sample_state

DIMENSIONS = 2  # the samples of an input are along its first or its second dimension
ALONE = 16  # inputs that are tried alone


@dataclass(frozen=True)
class SampleDimensions:
    """An assumption about the samples of a program.

    Attributes:
        size: the number of samples.
        dims: the sample dimension of some inputs, None for those without samples. The other inputs follow from these.
    """

    size: int
    dims: Mapping[int, int | None]

    @property
    def of_one_input(self) -> bool:
        """Whether the assumption is about one input alone."""
        return len(self.dims) == 1

    def states(self, count: int) -> dict[int, State]:
        """Return the states of these inputs along an axis of `count` micro-batches."""
        return {v: REPLICATED if dim is None else sample_state(dim, self.size, count) for v, dim in self.dims.items()}


def divisors(size: int) -> list[int]:
    """Return the numbers of micro-batches that may share the samples, ascending: powers of two, or else all divisors."""
    every = [n for n in range(2, size + 1) if size % n == 0]
    return [n for n in every if n & (n - 1) == 0] or every


def candidates(captured: Captured) -> Iterator[SampleDimensions]:
    """Yield assumptions about a program's samples, the most likely ones first.

    Sizes of the first dimension come first, and of these the size that most inputs have. For each size, all inputs of that size
    have samples at first, and then one input alone: the largest of each argument, then others, largest first. Weights that are
    not differentiated, such as a teacher's, may have as many rows as there are samples.
    """
    body = captured.body
    arguments = [k for k, tree in enumerate(captured.in_tree.children()) for _ in range(tree.num_leaves)]
    argument_of = dict(zip(body.inputs, arguments, strict=False))  # the inputs after them are constants
    data = [v for k, v in enumerate(body.inputs) if k not in captured.differentiated]
    weights = dict.fromkeys(v for k, v in enumerate(body.inputs) if k in captured.differentiated)
    for dim in range(DIMENSIONS):
        sizes = Counter(body.tensors[v].shape[dim] for v in data if body.tensors[v].ndim > dim)
        for size, _ in sizes.most_common():
            alike = [v for v in data if body.tensors[v].ndim > dim and body.tensors[v].shape[dim] == size]
            if size > 1:
                yield SampleDimensions(size, {**weights, **dict.fromkeys(alike, dim)})
                alike.sort(key=lambda v: body.tensors[v].nbytes, reverse=True)
                largest = dict[int | None, int]()  # of each argument
                for v in alike:
                    largest.setdefault(argument_of.get(v), v)
                for v in islice(dict.fromkeys((*largest.values(), *alike)), ALONE):
                    yield SampleDimensions(size, {v: dim})
