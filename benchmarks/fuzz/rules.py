"""Rules on the fuzzer's data, in every float type: sides of the library's rules, of imported ones, and of mutants that are proved.

A rule is proved over the reals; here both sides run, with gradients, on ties, infinities, NaN, large and cancelling values, in
narrow types too. A difference is one that the left side's own rounding does not explain (`verdict`). A mutant that is proved but
differs on benign data would be a false proof.
"""

from __future__ import annotations

import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from benchmarks.fuzz.data import array
from benchmarks.fuzz.programs import Argument
from benchmarks.fuzz.verdict import QUICK, Reference, near, plain
from benchmarks.random_programs import computed
from benchmarks.rules import mutated
from unity.base.errors import UnityError
from unity.substitutions.language.axioms import axioms, default_library
from unity.substitutions.language.rule import Rule
from unity.substitutions.language.text import print_body
from unity.substitutions.language.typecheck import TensorType
from unity.verify.proofs.first_order import Prover
from unity.verify.proofs.library import verified
from unity.verify.proofs.small_instances import Instance, small_instances

TYPES = ("float64", "float32", "bfloat16", "float16")
KINDS = ("normal", "small integers", "duplicates", "non-finite", "cancelling", "large", "denormal", "masked rows")
BENIGN = KINDS[:3]
SIZES, INSTANCES = (2, 3), 2  # dimensions, and instances of a rule


def instances(rule: Rule) -> list[Instance]:
    """A few small instances, their attributes chosen; the largest are the most telling."""
    return small_instances(rule, (), SIZES, 12)[-INSTANCES:]


def differences(instance: Instance, dtype: str, seed: int = 0) -> Iterator[tuple[str, str]]:
    """Kinds of data on which both sides differ in a type, and how."""
    types = {n: TensorType(t.shape, t.states, dtype if t.dtype == "float32" else t.dtype) for n, t in instance.types.items()}
    left, right = (computed(terms, types) for terms in (instance.rule.left, instance.rule.right))

    def data(kind: str) -> list[Any]:
        rng = np.random.default_rng(seed)
        others = {"int32": "index 3 outside", "bool": "half"}
        return [array(Argument(n, t.shape, t.dtype, others.get(t.dtype, kind)), rng) for n, t in types.items()]

    with jax.enable_x64(True):
        shapes = data("normal")
        reference = Reference(left, shapes, list(types), seed)
        reference.settle()
        steps = [reference.step(fn) for fn in (left, right)]
        run: Any = jax.jit(lambda args, cotangents: [step(args, cotangents) for step in steps])
        compiled = run.lower(shapes, reference.cotangents).compile(compiler_options=QUICK)
        for kind in KINDS if any(t.dtype == dtype for t in types.values()) else BENIGN[:1]:
            at = Reference(left, data(kind), list(types), seed, reference.order)
            first, second = compiled(at.args, at.cotangents)
            at.whole = [plain(x) for x in first]
            if not all(near(plain(x), y, kind) for x, y, kind in zip(second, at.whole, reference.kinds, strict=True)):
                at.perturber = reference.perturber
            wrong = at.differences(second)
            if wrong:
                yield kind, "; ".join(map(str, wrong))


def examined(rules: Iterator[tuple[str, Rule]], types: tuple[str, ...] = TYPES) -> tuple[Counter[str], list[dict[str, str]]]:
    """How many rules were run, and which differ where."""
    counts, found = Counter[str](), list[dict[str, str]]()
    for name, rule in rules:
        counts["rules"] += 1
        for instance in instances(rule):
            for dtype in types:
                counts["runs"] += 1
                try:
                    for kind, words in differences(instance, dtype):
                        counts[f"different in {dtype}"] += 1
                        row = {"rule": name, "type": dtype, "data": kind, "words": words[:300]}
                        found.append(row | {"text": print_body(instance.rule)})
                except (TypeError, ValueError, UnityError, NotImplementedError) as error:
                    counts[f"does not run in {dtype}: {type(error).__name__}: {str(error)[:60]}"] += 1
    return counts, found


def library() -> Iterator[tuple[str, Rule]]:
    """The library's rules that are no parallelizations: these are plans' business."""
    for rule in default_library().rules:
        if not rule.parallel:
            yield rule.name, rule


def proved_mutants(count: int, seed: int, tally: Counter[str]) -> Iterator[tuple[str, Rule]]:
    """Of so many distinct mutants of the library's rules those that are proved, by all layers: most are refuted at a glance."""
    rng, rules = random.Random(seed), [r for _, r in library()]
    prover, seen = Prover(axioms(), cores=False), set[str]()
    while len(seen) < count:
        mutant = mutated(rng.choice(rules), rng)
        if mutant is None or print_body(mutant) in seen:
            continue
        seen.add(print_body(mutant))
        status = verified(mutant, prover).status
        tally[status] += 1
        if status == "proved":
            yield f"mutant {len(seen)} of {mutant.name}", mutant


def imported(paths: list[str]) -> Iterator[tuple[str, Rule]]:
    """Rules of other systems' files that unity takes for true."""
    from unity.substitutions.importing.taso import import_taso

    for path in paths:
        for one in import_taso(path):
            if one.rule is not None and one.verdict.status == "proved":
                yield one.name, replace(one.rule)


def main(options: Any) -> None:
    """Examines the library, imported rules and mutants, and records what differs."""
    from benchmarks.record import record, show

    started, rows = time.perf_counter(), list[dict[str, Any]]()
    parts: list[tuple[str, Callable[[Counter[str]], Iterator[tuple[str, Rule]]]]] = [("library", lambda tally: library())]
    parts += [("imported", lambda tally: imported(options.imported))] if options.imported else []
    parts += [("mutants", lambda tally: proved_mutants(options.rules, options.seed, tally))] if options.rules else []
    for name, rules in parts:
        tally = Counter[str]()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            counts, found = examined(rules(tally), TYPES if name != "mutants" else TYPES[:1])
        print(f"{name}: {dict(tally)} {dict(counts)}", file=sys.stderr, flush=True)
        rows.append({"rules of": name, **tally, **counts, "different": found, "seconds": time.perf_counter() - started})
        show(name, [{k: v for k, v in f.items() if k != "text"} for f in found])
    if options.record:
        record("fuzz_rules", rows, seed=options.seed)
