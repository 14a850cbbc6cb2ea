"""Random programs with control flow, of narrow types, and of operators that need a whole batch: plans compute what they do.

Several points of the frontier and a random assignment are compared with the function, in values and gradients, and the collectives
of compiled programs with the plan's. `python -m benchmarks.fuzz.kinds` draws more of them.
"""

from __future__ import annotations

import random
import time
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import CI
from jax import lax

from benchmarks.fuzz.kinds import KINDS, Choices, faults_of
from benchmarks.fuzz.verdict import Reference

SEED = 0 if CI else int(time.time())  # a gate must say the same of the same code every time

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize("kind", KINDS)
def test_plans_compute_what_random_programs_do(kind: str) -> None:
    program = KINDS[kind](Choices(random.Random(f"{kind} {SEED}").choice))
    counts = Counter[str]()
    assert faults_of(program, counts=counts) == [], str(program)
    assert counts


def test_loops_whose_rows_end_at_different_times_have_a_spread_of_rounding() -> None:
    """A `while` under `vmap` has a predicate for each row."""

    def halved(x: jax.Array) -> jax.Array:
        return jax.vmap(lambda r: lax.while_loop(lambda r: (r * r).sum() > 1, lambda r: r / 2, r))(x)

    x = np.arange(12.0, dtype="float32").reshape(3, 4)
    reference = Reference(lambda x: jnp.sin(halved(lax.stop_gradient(x))) + x, [x], ["x"], 0)
    for one in reference.perturbed(4):
        np.testing.assert_allclose(one[0], reference.whole[0], rtol=1e-4)
