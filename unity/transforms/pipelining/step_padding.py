"""Padding of a scan whose steps stages cannot share evenly: further steps leave the carry unchanged.

    scan(step, x, w)  =  scan(where(there, step, same), x, (longer(w), there))

Every stage has as many places as the largest has steps, and the last place of some stages is empty: 14 steps on 4 stages are 4, 4,
3 and 3. An empty place has the weights of the step before it, so that its discarded results are finite wherever the step's are, and
its gradient is zero. The pipeline is not slower for it: the largest stages set the pace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from unity.pcg.capture.capture import Captured
from unity.pcg.ir.tracing import trace
from unity.pcg.jaxprs.loops import constants_and_carry
from unity.pcg.local.interpreter import run_body
from unity.pcg.propagation.nested.programs import nested_body
from unity.transforms.splice import spliced, with_steps

EVENED = "unity:places"  # scope of the scan over places; no model has it


def places(steps: int, stages: int) -> list[tuple[int, bool]]:
    """Return, for each place of each stage in turn, the step whose weights it has, and whether the step runs."""
    most = -(-steps // stages)
    counts = [most - (k >= steps - (most - 1) * stages) for k in range(stages)]
    filled: list[tuple[int, bool]] = []
    for end, count in zip(accumulate(counts), counts, strict=True):
        filled += [(step, True) for step in range(end - count, end)] + [(end - 1, False)] * (most - count)
    return filled


def evened(captured: Captured, number: int, stages: int) -> Captured:
    """Return the program with a scan, given by its equation's number, padded to the places of `stages` stages."""
    e = captured.body.equations[number]
    step, steps = nested_body(e), int(e.params["length"])
    consts, carry = constants_and_carry(e.params)
    filled = places(steps, stages)
    there = np.array([flag for _, flag in filled])
    none: list[tuple] = [()] * max(len(step.inputs), carry)

    def program(*operands: Any) -> Sequence[Any]:
        fixed, start, weights = operands[:consts], operands[consts : consts + carry], operands[consts + carry :]

        def one(carried: Any, own: Any) -> Any:
            results = run_body(step, (*fixed, *carried, *own[:-1]), none[: len(step.inputs)], none[:carry], ())
            return tuple(lax.select_n(own[-1], old, new) for old, new in zip(carried, results, strict=True)), None

        own = (*(_longer(w, filled) for w in weights), jnp.asarray(there))
        return lax.scan(one, tuple(start), own, len(filled), unroll=e.params["unroll"])[0]

    padded = trace(program, (captured.body.tensor(a).struct for a in e.operands), step.tensors.values())
    after = captured.of(spliced(captured.body, set(e.results), e.operands, e.results, padded, e, EVENED), captured.bodies)
    return replace(after, graph=with_steps(after.graph, EVENED, step, captured.graph))


def _longer(weights: Any, filled: Sequence[tuple[int, bool]]) -> Any:
    """Return the weights of steps by place: an empty place repeats the weights of the step before it."""
    cuts = [0, *(k for k, (_, there) in enumerate(filled) if not there), len(filled)]
    return lax.concatenate([lax.slice_in_dim(weights, filled[a][0], filled[b - 1][0] + 1) for a, b in pairwise(cuts)], 0)
