"""Random rewritings of random programs: thousands, each with the same results, types and gradients.

`python -m benchmarks.random_rewritings`; with two numbers, the walks of these seeds, not recorded. A walk begins with a random
program (`benchmarks.random_programs`). Of the programs that are one rewriting away some are looked at, and one is gone on from.
Each of them must have the results of the first, of the same shapes and precisions, and its gradients, in float64, as it is and as
it would be run; and what the search makes of it, on four devices, must pass the checker of parallel graphs.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.random_programs import program
from benchmarks.record import record, show
from unity.machine.machine import Machine
from unity.pcg.capture.capture import graph_of
from unity.pcg.ir.dead_code import used
from unity.pcg.ir.program import Body, program_of
from unity.pcg.parallel.check import check
from unity.pcg.parallel.parallelize import parallelize
from unity.search.cost.cost import Training
from unity.search.session import Search
from unity.substitutions.language.axioms import default_library
from unity.substitutions.rewriting.forms import planning_form, search_form
from unity.substitutions.rewriting.occurrences import Occurrence, occurrences, patterns
from unity.substitutions.rewriting.reading import Reading
from unity.substitutions.rewriting.rewriting import rewritten

MACHINE = Machine.grid(1, 4)
MOST = 60  # equations: some rewritings could go on for ever
WALKS, PARTS, STEPS, EACH = 400, 3, 3, 4
NEAR = 1e-9


def run(body: Body, *arguments: Any) -> list[Any]:
    """The program, equation by equation."""
    values = dict(zip(body.inputs, arguments, strict=True))

    def read(atom: Any) -> Any:
        return values[atom] if isinstance(atom, int) else atom.value

    for e in body.equations:
        given = [read(a) for a in e.operands]
        if e.name == "custom_jvp_call":  # of JAX's own functions with a rule the programs here have one
            results = [jax.nn.relu(*given)]
        else:
            found = e.primitive.bind(*given, **e.params)
            results = found if e.primitive.multiple_results else [found]
        values.update(zip(e.results, results, strict=True))
    return [read(a) for a in body.outputs]


def results_and_gradients(body: Body, arguments: Sequence[Any]) -> list[Any]:
    def total(*given: Any) -> Any:
        results = run(body, *given)
        return sum(jnp.sum(jnp.sin(x + k)) for k, x in enumerate(results)), results

    floats = [k for k, x in enumerate(arguments) if jnp.issubdtype(x.dtype, jnp.floating)]
    (_, results), gradients = jax.value_and_grad(total, argnums=floats, has_aux=True)(*arguments)
    return [*results, *gradients]


def same(found: list[Any], wanted: list[Any]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=NEAR, atol=NEAR)


def typed(body: Body) -> None:
    """The program as a graph, parallelized by the search: every operator may have the types that it has there."""
    graph = graph_of(body, [f"x{k}" for k in body.inputs])
    weights = frozenset(k for k, v in enumerate(body.inputs) if body.tensors[v].floating)
    check(parallelize(graph, Search(graph, weights, MACHINE, Training()).fastest.assignment))


def ways(body: Body) -> list[tuple[Occurrence, Body]]:
    """All programs that are one rewriting away."""
    reading = Reading(body)
    found = [(o, rewritten(body, o)) for pattern in patterns(default_library().rules) for o in occurrences(reading, pattern)]
    return [(o, new) for o, new in found if new is not None and len(new.equations) <= MOST]


def walk(seed: int, parts: int = PARTS, steps: int = STEPS, each: int = EACH) -> list[str]:
    """Follows random rewritings of a random program; of those one step away so many are looked at, and the first is taken.
    Returns the rules of all that were."""
    rng, rules = random.Random(seed), []
    with jax.enable_x64(True):
        made = program(rng, parts)
        body = search_form(used(program_of(jax.make_jaxpr(made)(*made.arguments))[0]))
        wanted = results_and_gradients(body, made.arguments)
        for _ in range(steps):
            chosen = rng.sample(found, min(each, len(found))) if (found := ways(body)) else []
            for occurrence, new in chosen:
                same(results_and_gradients(new, made.arguments), wanted)
                same(results_and_gradients(planning_form(new), made.arguments), wanted)
                typed(planning_form(new))
                rules.append(str(occurrence.pattern))
            if chosen:
                body = chosen[0][1]
    return rules


def main() -> None:
    first, last = map(int, sys.argv[1:] or (0, WALKS))
    started, found = time.perf_counter(), Counter()
    for seed in range(first, last):
        found.update(walk(seed))
        print(f"walk {seed}: {found.total()} rewritings by {len(found)} rules", flush=True)
    usable = {str(p) for p in patterns(default_library().rules)}
    row = {"walks": last - first, "rewritings": found.total(), "patterns": len(found), "of": len(usable)}
    row |= {"never": ", ".join(sorted(usable - set(found))), "seconds": time.perf_counter() - started}
    show("random rewritings of random programs", [row])
    if not sys.argv[1:]:
        record("random_rewritings", [row])


if __name__ == "__main__":
    main()
