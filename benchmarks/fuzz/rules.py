"""Rules on the fuzzer's data, in every float type, held against the promise of docs/numerics.md; and verdicts on mutants of rules.

A rule is proved over the reals. Here it runs as a rewriting applies it: in each direction in which it may be applied, in each type
for which it may be, with gradients, on ties, infinities, NaN, large and cancelling values. A difference is wrong if the promise
excludes it, and counted otherwise. A mutant that is proved must be equal on data, and one that is refuted must differ.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.fuzz.data import array
from benchmarks.fuzz.programs import Argument
from benchmarks.fuzz.verdict import QUICK, Reference, near, plain
from benchmarks.random_programs import computed
from benchmarks.rules import mutated
from unity.base.errors import UnityError
from unity.pcg.types.accumulation import limited
from unity.substitutions.language.axioms import axioms, default_library
from unity.substitutions.language.rule import Rule
from unity.substitutions.language.term import Term, applications, variables
from unity.substitutions.language.text import print_body
from unity.substitutions.language.typecheck import TensorType, typecheck
from unity.substitutions.rewriting.occurrences import Pattern, patterns
from unity.verify.proofs.bounded import executed_at
from unity.verify.proofs.first_order import Prover
from unity.verify.proofs.instances import at_attributes
from unity.verify.proofs.intermediates import contained
from unity.verify.proofs.small_instances import SmallInstance, small_instances, small_sizes

TYPES = ("float64", "float32", "bfloat16", "float16", "float8_e5m2")
FINITE = ("normal", "small integers", "duplicates", "cancelling", "large", "denormal")
KINDS = (*FINITE, "non-finite", "masked rows")
OTHERS = {"int32": "index 3 outside", "bool": "half"}  # data of arguments that are no floats
SIZES, INSTANCES = (2, 3), 2  # dimensions, and instances of a rule
DRAWS, FEW = 3, 6  # of data for a refuted mutant at each instance, and instances of it
UNPROMISED = "differences outside of what is promised"


@dataclass
class Replacement:
    """One side of a rule in the place of another, at an instance and in a type: both compiled, with gradients.

    Attributes:
        old: the terms that the rule replaces.
        new: what takes their place.
        types: of the variables.
        seed: of data and cotangents.
    """

    old: tuple[Term, ...]
    new: tuple[Term, ...]
    types: dict[str, TensorType]
    seed: int = 0
    reference: Reference = field(init=False)

    def __post_init__(self) -> None:
        old, new = computed(self.old, self.types), computed(self.new, self.types)
        self.reference = Reference(lambda *args: old(*map(_rounded, args)), self.data("normal"), list(self.types), self.seed)
        self.reference.settle()
        steps = [self.reference.step(fn) for fn in (old, new)]
        run: Any = jax.jit(lambda args, cotangents: [step(args, cotangents) for step in steps])
        self.run = run.lower(self.reference.args, self.reference.cotangents).compile(compiler_options=QUICK)

    def data(self, kind: str) -> list[Any]:
        rng = np.random.default_rng(self.seed)
        return [array(Argument(n, t.shape, t.dtype, OTHERS.get(t.dtype, kind)), rng) for n, t in self.types.items()]

    def compared(self, kind: str) -> tuple[str, bool]:
        """Return in words what breaks the promise on data of a kind, "" if nothing does, and whether anything else differs."""
        at = Reference(self.reference.fn, self.data(kind), list(self.types), self.seed, self.reference.order)
        old, new = ([plain(x) for x in side] for side in self.run(at.args, at.cotangents))
        unpromised = [~np.isfinite(y) for y in old]
        lost = not all(np.isfinite(x[~u]).all() for x, u in zip(new, unpromised, strict=True))
        if lost and not (self.is_finite_up_to(_size(at)) if kind in FINITE else self.keeps_infinities_apart):
            unpromised = [u | ~np.isfinite(x) for u, x in zip(unpromised, new, strict=True)]
        unpromised = [u | v for u, v in zip(unpromised, self.passed_back_by_nan(at, old, new), strict=True)]
        differs = not all(near(x[u], y[u], d) for x, y, u, d in zip(new, old, unpromised, self.reference.kinds, strict=True))
        old, new = ([np.where(u, 0, x) for x, u in zip(side, unpromised, strict=True)] for side in (old, new))
        at.whole = old
        if all(near(x, y, d) for x, y, d in zip(new, old, self.reference.kinds, strict=True)):
            return "", differs
        if self.new_is_no_farther(at, old, new):
            return "", differs
        at.perturber = self.reference.perturber
        return "; ".join(map(str, at.differences([x.astype(d) for x, d in zip(new, self.reference.kinds, strict=True)]))), differs

    def passed_back_by_nan(self, at: Reference, old: Sequence[np.ndarray], new: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Mark the elements of results and gradients that differ only in what results that are NaN pass back as gradient."""
        gradients = range(at.outputs, len(old))
        results = [old[k] for k in at.differentiable]
        marked = [np.zeros(x.shape, bool) for x in old]
        if gradients and any(np.isnan(y).any() for y in results):
            cotangents = [np.where(np.isnan(y), 0, c).astype(c.dtype) for y, c in zip(results, at.cotangents, strict=True)]
            without = [[plain(x) for x in side] for side in self.run(at.args, cotangents)]
            for k in gradients:
                marked[k] = _apart(old[k], new[k]) & ~_apart(without[0][k], without[1][k])
        return marked

    def new_is_no_farther(self, at: Reference, old: Sequence[np.ndarray], new: Sequence[np.ndarray]) -> bool:
        """Whether every element of the new side is at most as far as the old side's from that in float64."""
        types = {n: replace(t, dtype="float64") if is_float(t.dtype) else t for n, t in self.types.items()}
        args, cotangents = ([x.astype(np.float64) if is_float(x.dtype) else x for x in xs] for xs in (at.args, at.cotangents))
        exact = [plain(x) for x in at.step(computed(self.old, types))(args, cotangents)]
        with np.errstate(invalid="ignore"):
            return all(((x == y) | (np.abs(y - z) <= np.abs(x - z))).all() for x, y, z in zip(old, new, exact, strict=True))

    @property
    def keeps_infinities_apart(self) -> bool:
        """Whether the new side has no convolution, into whose kernels rules, and XLA for groups, write zeros."""
        return all(term.operator != "conv2d" for term in applications(self.new))

    def is_finite_up_to(self, size: float) -> bool:
        """Whether the old side and its gradients are finite for operands and cotangents of a size, of any signs."""
        args, cotangents = self.data("normal"), self.reference.cotangents
        count = len(args) + 1
        for signs in itertools.product((1.0, -1.0), repeat=count):
            full = [
                np.full(x.shape, size * s).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else x
                for x, s in zip(args, signs, strict=False)
            ]
            old, _ = self.run(full, [np.full(c.shape, size * signs[-1]).astype(c.dtype) for c in cotangents])
            if not all(np.isfinite(plain(x)).all() for x in old):
                return False
        return True


def is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def _apart(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Mark the elements that differ by more than a part in a thousand."""
    with np.errstate(all="ignore"):
        return ~((x == y) | (np.isnan(x) & np.isnan(y)) | (np.abs(x - y) <= 1e-3 * np.abs(y)))


def _size(reference: Reference) -> float:
    """The largest number among operands and cotangents, at least 1."""
    arrays = (x for x in (*reference.args, *reference.cotangents) if jnp.issubdtype(x.dtype, jnp.inexact))
    return max(float(np.max(np.abs(plain(x)), initial=1.0)) for x in arrays)


def _rounded(x: Any) -> Any:
    """Return an argument, rounded once more where evaluations are perturbed: a rule may round what it makes of its operands."""
    return x * jnp.ones((), x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else x


def in_type(instance: SmallInstance, dtype: str) -> dict[str, TensorType]:
    return {n: TensorType(t.shape, t.states, dtype if t.dtype == "float32" else t.dtype) for n, t in instance.types.items()}


def differences(
    pattern: Pattern, instances: Iterable[SmallInstance], types: Sequence[str], kinds: Sequence[str], counts: Counter[str]
) -> Iterator[dict[str, str]]:
    """Yield the cases in which a replacement breaks the promise, in the types for which it may be applied.

    Where a replacement computes more than it uses, the rule applies only in programs that have the rest, too (`Pattern.dropped`).
    """
    for instance in instances:
        at = Pattern(instance.rule, pattern.backward)
        rest = at.other_parts if at.dropped else ()
        for dtype in types:
            if limited(jnp.dtype(dtype)) and not contained(pattern.rule, pattern.backward):
                counts[f"not applied in {dtype}"] += 1
                continue
            try:
                replacement = Replacement(at.left + rest, at.right + rest, in_type(instance, dtype))
            except (TypeError, ValueError, UnityError, NotImplementedError) as error:
                counts[f"does not run in {dtype}: {type(error).__name__}: {str(error)[:60]}"] += 1
                continue
            for kind in kinds:
                counts["runs"] += 1
                words, unpromised = replacement.compared(kind)
                counts[UNPROMISED] += unpromised
                if words:
                    counts["wrong"] += 1
                    row = {"rule": str(pattern), "type": dtype, "data": kind, "words": words[:300]}
                    yield row | {"text": print_body(instance.rule)}


def large(rule: Rule) -> list[SmallInstance]:
    """A few instances of a rule, the largest of the small ones: these are the most telling."""
    return small_instances(rule, (), SIZES, 12)[-INSTANCES:]


def examined(rules: Iterable[Rule], types: Sequence[str] = TYPES) -> tuple[Counter[str], list[dict[str, str]]]:
    """Examine rules in every direction in which they are applied. Return counts, and the cases that break the promise."""
    chosen = patterns(rules)
    counts = Counter({"directions": len(chosen), "wrong": 0})
    with jax.enable_x64(True):
        return counts, [row for pattern in chosen for row in differences(pattern, large(pattern.rule), types, KINDS, counts)]


def library() -> list[Rule]:
    """The library's rules that are no parallelizations: these are plans' business."""
    return [rule for rule in default_library().rules if not rule.parallel]


def imported(paths: Iterable[str]) -> list[Rule]:
    """Rules of other systems' files that unity takes for true."""
    from unity.substitutions.importing.taso import import_taso

    rows = (row for path in paths for row in import_taso(path))
    return [replace(row.rule) for row in rows if row.rule is not None and row.verdict.status == "proved"]


@dataclass(frozen=True)
class Mutant:
    """A rule of the library with something changed, and instances of the rule at which the mutant is well-typed, too."""

    rule: Rule
    instances: tuple[SmallInstance, ...]


def mutants(count: int, seed: int) -> Iterator[Mutant]:
    """Distinct mutants, changed in one or two places. Those that are nowhere well-typed are left out."""
    rng, rules, seen = random.Random(seed), library(), set[str]()
    while len(seen) < count:
        rule = rng.choice(rules)
        changed: Rule | None = rule
        for _ in range(rng.choice((1, 2))):
            changed = changed and mutated(changed, rng)
        if changed is None or print_body(changed) in seen:
            continue
        instances = tuple(at for one in small(rule) if (at := typed(changed, one)) is not None)
        if instances:
            seen.add(print_body(changed))
            yield Mutant(changed, instances)


@cache
def small(rule: Rule) -> list[SmallInstance]:
    return small_instances(rule, (), small_sizes(rule, 2), FEW)


def typed(rule: Rule, instance: SmallInstance) -> SmallInstance | None:
    """A mutant at an instance of the rule that it was; None if its sides have no equal types there."""
    at = at_attributes(rule, {name: value for name, value in instance.attributes.items() if name in rule.attributes})
    if at is None:
        return None
    try:
        types = typecheck(at.sides, instance.types)
    except (KeyError, UnityError):  # KeyError: the rule has fewer variables
        return None
    alike = all(types[x] == types[y] for x, y in zip(at.left, at.right, strict=True))
    return SmallInstance(at, instance.attributes, instance.types) if alike else None


def judged(mutant: Mutant, status: str, counts: Counter[str]) -> Iterator[dict[str, str]]:
    """Yield the cases in which data contradict the verdict on a mutant: proved, but different, or refuted, but equal.

    A side that reads further variables replaces no other one (`Pattern.usable`), so these are finite: y - y is NaN otherwise.
    """
    row = {"rule": f"mutant of {mutant.rule.name}", "type": "float64", "text": print_body(mutant.rule)}
    if status == "proved":
        pattern = Pattern(mutant.rule, False)
        kinds = KINDS if set(variables(pattern.right)) <= set(variables(pattern.left)) else FINITE
        for case in differences(pattern, mutant.instances[-1:], TYPES, kinds, counts):
            yield row | {key: case[key] for key in ("type", "data", "words")}
    elif status == "refuted" and not any(map(differs, mutant.instances)):
        counts["wrong"] += 1
        yield row | {"data": "normal", "words": "equal on data, but refuted"}


def differs(instance: SmallInstance) -> bool:
    """Whether the sides of a rule have different values on some data."""
    types = in_type(instance, "float64")
    sides = [computed(terms, types) for terms in (instance.rule.left, instance.rule.right)]
    for draw in range(DRAWS):
        rng = np.random.default_rng(draw)
        data = [array(Argument(n, t.shape, t.dtype, OTHERS.get(t.dtype, "normal")), rng) for n, t in types.items()]
        left, right = (side(*data) for side in sides)
        if not all(np.allclose(x, y, rtol=1e-6, atol=1e-9) for x, y in zip(left, right, strict=True)):
            return True
    return False


def verdict(mutant: Mutant, prover: Prover) -> str:
    """Return the verdict on a mutant, by execution on symbols where it is known to be well-typed, and then by proof."""
    status = executed_at(mutant.instances, ()).status
    return status if status != "proved" else prover.prove(mutant.rule).status


def examined_mutants(count: int, seed: int, seconds: float) -> tuple[Counter[str], list[dict[str, str]]]:
    """Verify at most `count` mutants, for at most some seconds, and hold the verdicts against data. Return as `examined` does."""
    prover, until = Prover(axioms(), cores=False), time.monotonic() + seconds
    counts, wrong = Counter({"mutants": 0, "wrong": 0}), list[dict[str, str]]()
    for mutant in mutants(count, seed):
        if time.monotonic() > until:
            break
        status = verdict(mutant, prover)
        counts["mutants"] += 1
        counts[status] += 1
        with jax.enable_x64(True):
            wrong += judged(mutant, status, counts)
        if counts["mutants"] % 250 == 0:
            print(f"  … {dict(counts)}", file=sys.stderr, flush=True)
    return counts, wrong


def main(options: Any) -> None:
    """Examine the library, imported rules and mutants; show and record the results."""
    from benchmarks.record import record, show

    parts: dict[str, Callable[[], tuple[Counter[str], list[dict[str, str]]]]] = {"library": lambda: examined(library())}
    if options.imported:
        parts["imported"] = lambda: examined(imported(options.imported))
    if options.rules:
        parts["mutants"] = lambda: examined_mutants(options.rules, options.seed, 60 * options.minutes)
    rows = list[dict[str, Any]]()
    for name, part in parts.items():
        started = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            counts, wrong = part()
        print(f"{name}: {dict(counts)}", file=sys.stderr, flush=True)
        rows.append({"rules of": name, **counts, "found": wrong, "seconds": time.perf_counter() - started})
        show(name, [{k: v for k, v in row.items() if k != "text"} for row in wrong])
    if options.record:
        command = f"python -m benchmarks.fuzz --rules {options.rules} --minutes {options.minutes:g} --record"
        record("fuzz_rules", rows, seed=options.seed, command=command)
