"""The table of operations, and the draw of a step from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.fuzz.programs import Draw, Rejected

Operation = Callable[[Draw], Any]
OPERATIONS: dict[str, tuple[float, Operation]] = {}


def operation(weight: float) -> Callable[[Operation], Operation]:
    """Enters a function into the table, under its name."""

    def enter(fn: Operation) -> Operation:
        OPERATIONS[fn.__name__.replace("_", " ").strip()] = weight, fn
        return fn

    return enter


def draw_step(d: Draw, tries: int = 40, names: Sequence[str] = ()) -> None:
    """One more step (and what it needs), of a random operation, or of one of some names, which are drawn alike."""
    weights = [1.0] * len(names)
    if not names:
        names = [n for n in OPERATIONS if d.depth < 2 or n not in NESTED]
        weights = [OPERATIONS[n][0] for n in names]
    for _ in range(tries):
        name = d.rng.choices(names, weights)[0]
        steps = len(d.steps)
        try:
            OPERATIONS[name][1](d)
            d.root.kinds.append(name)
            return
        except Rejected:
            d.forget(steps)
    raise Rejected("nothing fits")


def pick_along(d: Draw, letters: str = "f") -> tuple[str, tuple[int, ...], int]:
    """A value with dimensions, its shape, and one of its dimensions."""
    x = d.pick(letters, least=1)
    return x, tuple(d.of(x).shape), d.axis(x)


NESTED = (
    "scan",
    "layers",
    "while loop",
    "branch",
    "remat",
    "vmapped",
    "micro batches",
    "gradient",
    "custom rule",
    "branches",
    "constrained",
    "recurrent",
    "experts",
    "offloaded",
)
