"""A plan's other uses, on a sample: run eagerly, saved and loaded, exported as source, its collectives checked."""

from __future__ import annotations

import runpy
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

import unity
from benchmarks.fuzz.plans import Trial, argnums_of
from benchmarks.fuzz.verdict import QUICK, Reference, plain

MORE, FEWER = 0.02, 0.25  # collectives than predicted, in elements


def lives(one: Trial, reference: Reference) -> Iterator[tuple[str, Callable[[], str]]]:
    """Names of what may be done with a plan, and how: what is wrong then, in words."""
    yield "eager", lambda: eager(one, reference)
    if one.kind != "rewritten":  # whose rewriting is by hand, and no part of the plan
        yield "loaded", lambda: loaded(one, reference)
    yield "exported", lambda: exported(one, reference)
    yield "check", lambda: checked(one)


def words(reference: Reference, results: list[Any]) -> str:
    return "; ".join(str(d) for d in reference.differences(results) if not d.known)


def eager(one: Trial, reference: Reference) -> str:
    """Run the plan without jit. XLA rewrites some NaNs of the jitted function into numbers: those without jit are right, too."""
    results = reference.step(one.plan)(reference.args, reference.cotangents)
    if not words(reference, results):
        return ""
    without_jit = replace(reference)
    without_jit.whole = [plain(x) for x in reference.step(reference.fn)(reference.args, reference.cotangents)]
    return words(without_jit, results)


def loaded(one: Trial, reference: Reference) -> str:
    """Saves the plan and loads it: the same parallel graph must come back."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        one.plan.files.save(path)
        again = unity.load(path, reference.fn, *reference.args, argnums=argnums_of(reference.args) or 0)
    return "" if again.program.pcg.key == one.plan.program.pcg.key else "another parallel graph is loaded than was saved"


def exported(one: Trial, reference: Reference) -> str:
    """Export the plan and run the source. A file may refuse second derivatives (docs/export.md), and has the first ones then."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "exported.py"
        one.plan.files.export(path)
        fn = runpy.run_path(str(path), run_name="exported")["fn"]
    try:
        lowered: Any = jax.jit(reference.step(fn)).lower(reference.args, reference.cotangents)
    except NotImplementedError as error:
        if reference.order < 2 or "a second derivative of a call" not in str(error):
            raise
        reference = replace(reference, order=1)
        lowered = jax.jit(reference.step(fn)).lower(reference.args, reference.cotangents)
    return words(reference, lowered.compile(compiler_options=QUICK)(reference.args, reference.cotangents))


def checked(one: Trial) -> str:
    """Compares the collectives of the compiled program with those that the plan predicts. Of small tensors XLA merges some."""
    total = (found := one.plan.check()).total
    good = (1 - FEWER) * total.predicted <= total.compiled <= (1 + MORE) * total.predicted
    return "" if good else str(found).partition("\nmemory")[0]
