"""A plan's other uses, on a sample: run eagerly, saved and loaded, exported as source, its collectives checked."""

from __future__ import annotations

import runpy
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

import unity
from benchmarks.fuzz.plans import Trial
from benchmarks.fuzz.verdict import QUICK, Reference, plain
from unity.base.errors import DerivationError
from unity.exec.compiled.check import predicted_elements
from unity.export import ExportError
from unity.pcg.parallel.traffic import FORWARD
from unity.plan.step import step_of

UNNAMED = "as source it would not be what the plan runs"  # a refusal that docs/export.md does not name
MORE, FEWER = 0.02, 0.25  # collectives than predicted, in elements


def lives(one: Trial, reference: Reference) -> Iterator[tuple[str, Callable[[], str]]]:
    """Names of what may be done with a plan, and how: what is wrong then, in words."""
    yield "eager", lambda: eager(one, reference)
    if one.kind != "rewritten":  # whose rewriting is by hand, and no part of the plan
        yield "loaded", lambda: loaded(one, reference)
    yield "exported", lambda: exported(one, reference)
    yield "check", lambda: checked(one, reference)
    if one.plan.program.family.transformations:
        yield "derived", lambda: derived(one)
    if one.plan.program.packing and reference.order == 1:
        yield "packed", lambda: packed(one, reference)


def words(reference: Reference, results: list[Any]) -> str:
    return "; ".join(str(d) for d in reference.differences(results) if not d.known)


def eager(one: Trial, reference: Reference) -> str:
    """Run the plan without jit. XLA rewrites some NaNs of the jitted function into numbers: those without jit are right, too."""
    results = reference.step(one.plan)(reference.args, reference.cotangents)
    return words(reference, results) and words(reference, reference.as_with_jit(results))


def simplified(one: Trial, reference: Reference, results: list[Any]) -> bool:
    """Return whether XLA's simplifications and fusions explain all differences of a plan's results from the function's.

    A product with a mask becomes a choice, which is finite where the product is NaN; an integer divided by itself becomes one; an
    element is computed twice, rounded differently, and so is not the largest. Every element must be the function's, with or without
    jit, or a number where the function has NaN in both, if the plan without jit is right.
    """
    right = reference.as_with_jit(results)
    return not words(reference, right) or (not words(reference, reference.with_nans(right)) and not eager(one, reference))


def loaded(one: Trial, reference: Reference) -> str:
    """Saves the plan and loads it: the same parallel graph must come back."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        one.plan.files.save(path)
        again = unity.load(path, reference.fn, *reference.args, argnums=tuple(reference.floating) or 0)
    return "" if again.program.pcg.key == one.plan.program.pcg.key else "another parallel graph is loaded than was saved"


def derived(one: Trial) -> str:
    """Derives the transformed program again."""
    try:
        one.plan.program.check_derivation()
    except DerivationError as error:
        return f"underived: {error}"
    return ""


def packed(one: Trial, reference: Reference) -> str:
    """Run the plan on packed weights: gradients are packed, too, and zero in the padding."""
    args = list(one.plan.shard(*reference.args)) if len(reference.args) > 1 else [one.plan.shard(*reference.args)]
    results = list(jax.jit(reference.step(one.plan))(args, reference.cotangents))
    gradients = dict(zip(reference.floating, results[reference.outputs :], strict=True))
    packing = one.plan.program.packing
    whole = packing.unpack([gradients.get(k, x) for k, x in enumerate(args)])
    wrong = words(reference, [*results[: reference.outputs], *(whole[k] for k in reference.floating)])
    again = packing.pack(whole)
    for k, x in gradients.items():
        if not np.array_equal(plain(again[k]), plain(x), equal_nan=True) and np.isfinite(plain(x)).all():
            wrong += f"; the packed gradient of {reference.names[k]} is not zero in the padding"
    return wrong


def exported(one: Trial, reference: Reference) -> str:
    """Export the plan and run the source, which takes packed weights.

    A file may refuse second derivatives (docs/export.md), and has the first ones then.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "exported.py"
        try:
            one.plan.files.export(path)
        except ExportError as error:
            if UNNAMED not in str(error):
                raise
            return f"refused: {error}"
        source = runpy.run_path(str(path), run_name="exported")["fn"]
    fn = lambda *args: source(*one.plan.program.packing.pack(args))  # noqa: E731
    try:
        lowered: Any = jax.jit(reference.step(fn)).lower(reference.args, reference.cotangents)
    except NotImplementedError as error:
        if reference.order < 2 or "a second derivative of a call" not in str(error):
            raise
        reference = replace(reference, order=1)
        lowered = jax.jit(reference.step(fn)).lower(reference.args, reference.cotangents)
    return words(reference, lowered.compile(compiler_options=QUICK)(reference.args, reference.cotangents))


def checked(one: Trial, reference: Reference) -> str:
    """Compares the collectives of the compiled program with those that the plan predicts. Of small tensors XLA merges some.

    XLA computes a gradient that depends on no argument, such as that of `sum(ifft(fft(x)))`, when it compiles, and sends nothing of
    it. Only collectives of the backward pass may be missing then.
    """
    total = (found := one.plan.check()).total
    least = total.predicted
    if reference.has_known_gradients:
        step = step_of(one.plan, one.plan.program.training(None))
        least = sum(predicted_elements(step.graph, step.differentiated, FORWARD).values())
    good = (1 - FEWER) * least <= total.compiled <= (1 + MORE) * total.predicted
    return "" if good else str(found).partition("\nmemory")[0]
