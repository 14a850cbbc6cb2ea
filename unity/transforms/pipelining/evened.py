"""A scan whose steps its stages cannot share evenly, as one with more steps, some of which leave what is carried as it is.

    scan(step, x, w)  =  scan(where(there, step, same), x, (longer(w), there))

Every stage has as many places as the largest has steps, and the last place of some is empty. 14 steps on 4 stages: 4, 4, 3 and 3.
An empty place has the weights of the step before it, so that what it computes in vain is a number wherever the step's results are,
and its gradient is zero. A pipeline takes no longer for it: the largest stages set the pace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from unity.pcg.capture.capture import Captured
from unity.pcg.ir.program import close
from unity.pcg.jaxprs.scan_operands import constants_and_carry
from unity.pcg.local.interpreter import run_body
from unity.pcg.propagation.solver import nested_body
from unity.transforms.pipelining.named import with_steps
from unity.transforms.pipelining.splice import spliced

EVENED = "unity:places"  # the scope of the scan over places, which no model has


def places(steps: int, stages: int) -> list[tuple[int, bool]]:
    """For each place of each stage in turn: the step whose weights are there, and whether it is to be done."""
    most = -(-steps // stages)
    counts = [most - (k >= steps - (most - 1) * stages) for k in range(stages)]
    found: list[tuple[int, bool]] = []
    for end, count in zip(accumulate(counts), counts, strict=True):
        found += [(step, True) for step in range(end - count, end)] + [(end - 1, False)] * (most - count)
    return found


def evened(captured: Captured, number: int, stages: int) -> Captured:
    """The program, one of its scans (by its equation's number) with places for so many stages."""
    e = captured.body.equations[number]
    step, steps = nested_body(e), int(e.params["length"])
    consts, carry = constants_and_carry(e.params)
    found = places(steps, stages)
    there = np.array([flag for _, flag in found])
    none: list[tuple] = [()] * max(len(step.inputs), carry)

    def program(*operands: Any) -> Sequence[Any]:
        fixed, start, weights = operands[:consts], operands[consts : consts + carry], operands[consts + carry :]

        def one(carried: Any, own: Any) -> Any:
            made = run_body(step, (*fixed, *carried, *own[:-1]), none[: len(step.inputs)], none[:carry], ())
            return tuple(lax.select_n(own[-1], old, new) for old, new in zip(carried, made, strict=True)), None

        own = (*(_longer(w, found) for w in weights), jnp.asarray(there))
        return lax.scan(one, tuple(start), own, len(found), unroll=e.params["unroll"])[0]

    made = close(jax.make_jaxpr(program)(*(captured.body.tensor(a).struct for a in e.operands)))
    after = captured.of(spliced(captured.body, set(e.results), e.operands, e.results, made, e, EVENED), captured.bodies)
    return replace(after, graph=with_steps(after.graph, EVENED, step))


def _longer(weights: Any, found: Sequence[tuple[int, bool]]) -> Any:
    """Weights of steps, in places: an empty place begins a slice with what the one before ends with."""
    cuts = [0, *(k for k, (_, there) in enumerate(found) if not there), len(found)]
    return lax.concatenate([lax.slice_in_dim(weights, found[a][0], found[b - 1][0] + 1) for a, b in pairwise(cuts)], 0)
