"""Kinds of plans: which of them a program has, and how plans of each kind are drawn."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import unity
from benchmarks.fuzz.plans import (
    Trial,
    branched_trials,
    count_of,
    pipelined_trials,
    random_trials,
    rewritten_trials,
    searched_trials,
)
from benchmarks.fuzz.programs import Program
from benchmarks.fuzz.transformed_plans import mesh_trials, optional_trials, transformed_trials
from unity.pcg.capture.capture import Captured

# How often programs that were not drawn for one of these kinds have such plans. They are in `transformed_plans`.
TRANSFORMED: dict[str, float] = {
    "loops": 0.2,
    "recomputation": 0.1,
    "padding": 0.15,
    "chain": 0.05,
    "micro-batches": 0.0,
    "mesh": 0.1,
    "options": 0.02,
}
CHOSEN = 2  # lists of plans, each of one machine and one transformation, of a program that was drawn for a chosen kind

Source = Callable[[unity.Machine], Iterator[Trial]]


def sources(
    rng: random.Random, drawing: Program, args: Sequence[Any], captured: Captured, chosen: Sequence[str] = ()
) -> Iterator[tuple[str, Source]]:
    """Ways to plans of a program, each for a machine of its own. Random assignments are by far the cheapest.

    `chosen`: kinds of plans, of which alone there are any; of programs that were drawn for one, of this one.
    """
    if chosen:
        kinds = [drawing.focus] * CHOSEN if drawing.focus in chosen else list(chosen)
    else:
        kinds = ["random", *(["random"] if rng.random() < 0.6 else []), *(["rewritten"] if rng.random() < 0.35 else [])]
        kinds += ["searched"] if rng.random() < 0.08 else []
        if rng.random() < (0.6 if "layers" in drawing.kinds else 0.3 if "scan" in drawing.kinds else 0.0):
            kinds.append(rng.choice(("pipeline 1f1b", "pipeline gpipe")))
        kinds += ["branches"] if rng.random() < (0.6 if "branches" in drawing.kinds else 0.02) else []
        kinds += [kind for kind, often in TRANSFORMED.items() if kind == drawing.focus or rng.random() < often]
    for kind in kinds:
        yield kind, source_of(kind, rng, drawing, args, captured)


def source_of(kind: str, rng: random.Random, drawing: Program, args: Sequence[Any], captured: Captured) -> Source:
    """The plans of one kind, for a machine."""
    first, _, schedule = kind.partition(" ")
    if first == "pipeline":
        return lambda machine: pipelined_trials(rng, drawing, args, machine, schedule)
    if first == "rewritten":
        return lambda machine: rewritten_trials(rng, drawing.function, captured, machine)
    if first == "branches":
        return lambda machine: branched_trials(rng, drawing, args, machine)
    if first == "searched":
        return lambda machine: searched_trials(rng, drawing, args, machine)
    if first == "mesh":
        return lambda machine: mesh_trials(rng, drawing, captured, machine)
    if first == "options":
        return lambda machine: optional_trials(rng, drawing, args, machine)
    if first in ("random", "experts"):
        return lambda machine: random_trials(rng, drawing.function, captured, machine, count_of(captured), first)
    if first in TRANSFORMED:
        return lambda machine: transformed_trials(rng, drawing, captured, machine, first)
    raise ValueError(f"expected a kind of plans, got {kind!r}")
