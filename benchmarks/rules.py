"""The rule library: how long it takes from nothing, what it covers, and whether anything false is in it or near it.

`python -m benchmarks.rules` generates the default library in a folder of its own (nothing reused), the one of two operators, checks
the axioms at every small shape, mutates rules, and runs the library through JAX. `python -m benchmarks.rules axioms` (or
`generate`, `two`, `mutants`, `execute`) does one of these.
"""

from __future__ import annotations

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.record import record, show
from unity.base.errors import RuleError
from unity.substitutions.generator.families import FAMILIES
from unity.substitutions.generator.generate import generate
from unity.substitutions.language.axioms import axioms, default_library
from unity.substitutions.language.rule import Rule
from unity.substitutions.language.term import Apply, Term, Variable, applications, transform
from unity.substitutions.language.text import print_body
from unity.substitutions.language.vocabulary import VOCABULARY
from unity.verify.proofs.bounded import executed
from unity.verify.proofs.first_order import Prover
from unity.verify.proofs.library import verified, verify

Row = dict[str, Any]


def made(max_ops: int) -> Row:
    """A library from nothing."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        library, outcomes = generate([f.limited(max_ops) for f in FAMILIES], axioms(), folder)
        path = Path(folder) / "library.json"
        library.save(path)
        size = path.stat().st_size
    counts = [o.counts for o in outcomes]
    return {
        "what": f"library of {max_ops} operators",
        "seconds": time.perf_counter() - start,
        "rules": len(library),
        "parallel": sum(e.rule.parallel for e in library.entries),
        "instances": sum(e.rule.instances for e in library.entries),
        "graphs": sum(c.graphs for c in counts),
        "equal pairs": sum(c.pairs for c in counts),
        "pairs as TASO counts them": sum(c.distinct for c in counts),
        "chance": sum(c.chance for c in counts),
        "open": sum(c.open for c in counts),
        "bytes": size,
    }


def generated() -> Row:
    """The default library."""
    return made(3)


def two() -> Row:
    """The library of two operators."""
    return made(2)


def checked_axioms() -> Row:
    """Every axiom, at every small instance up to a bound; which follow from the others."""
    start = time.perf_counter()
    checks = {a.name: executed(a, limit=250) for a in axioms()}
    prover = Prover(axioms(), switches=True)
    redundant = [a.name for a in axioms() if prover.prove(a, frozenset({a.name})).status == "proved"]
    return {
        "what": "axioms",
        "seconds": time.perf_counter() - start,
        "axioms": len(checks),
        "instances": sum(c.instances for c in checks.values()),
        "not proved": [n for n, c in checks.items() if c.status != "proved"],
        "redundant": redundant,
    }


def proofs() -> Row:
    """First-order proofs of the library: how long one takes."""
    prover, times = Prover(axioms()), []
    for rule in default_library().rules:
        proof = prover.prove(rule)
        assert proof.status == "proved", rule.name
        times.append(proof.seconds)
    times.sort()
    return {"what": "first-order proofs", "seconds": sum(times), "rules": len(times), "median ms": times[len(times) // 2] * 1e3}


def mutants(count: int = 1000) -> Row:
    """Library rules with something swapped or left out: a false one must not be proved."""
    rng, rules = random.Random(0), default_library().rules
    prover, start = Prover(axioms(), cores=True), time.perf_counter()
    found: Counter[str] = Counter()
    wrong: list[str] = []
    seen: set[str] = set()
    while sum(found.values()) < count:
        mutant = mutated(rng.choice(rules), rng)
        if mutant is None or print_body(mutant) in seen:
            continue
        seen.add(print_body(mutant))
        result = verified(mutant, prover)
        status = result.status
        if status == "open":  # as in a rule that holds only where sizes coincide
            closer = executed(mutant, (2, 4, 8) if mutant.parallel else (1, 2, 3, 4), limit=250).status
            status = {"proved": "true, not proved", "open": "undecided"}.get(closer, closer)
        found[status] += 1
        if result.status == "proved" and executed(mutant, limit=400).status == "refuted":
            wrong.append(print_body(mutant))
    return {"what": "mutants", "seconds": time.perf_counter() - start, **found, "false but proved": wrong}


def mutated(rule: Rule, rng: random.Random) -> Rule | None:
    """One operator of one side changed: operands or parts swapped, a dimension or an axis changed, an operator left out."""
    side = rng.choice([rule.left, rule.right])
    places = [t for t in applications(side)]
    if not places:
        return None
    chosen = rng.choice(places)
    change = rng.choice(MUTATIONS)(chosen, rng)
    if change is None or change == chosen:
        return None

    def swap(term: Term) -> Term:
        if not isinstance(term, Apply) or term.node != chosen:
            return term
        if isinstance(change, Apply) and change.operator == term.operator:
            return replace(change, result=term.result)
        return change if VOCABULARY[term.operator].results == 1 else term

    terms = transform(side, swap)
    try:
        found = replace(rule, left=terms) if side is rule.left else replace(rule, right=terms)
    except RuleError:
        return None
    return found if found != rule else None


def _swapped(term: Apply, rng: random.Random) -> Term | None:
    return replace(term, operands=term.operands[::-1]) if len(term.operands) == 2 else None


def _renumbered(term: Apply, rng: random.Random) -> Term | None:
    kinds = VOCABULARY[term.operator].attributes
    places = [k for k, kind in enumerate(kinds) if kind in ("dim", "axis", "size", "groups")]
    if not places:
        return None
    k = rng.choice(places)
    value = "b" if kinds[k] == "axis" else rng.choice((-1, -2, -3)) if kinds[k] == "dim" else rng.choice((1, 2, 3))
    return replace(term, attributes=(*term.attributes[:k], value, *term.attributes[k + 1 :]))


def _dropped(term: Apply, rng: random.Random) -> Term | None:
    return term.operands[0] if term.operands else None


def _other_variable(term: Apply, rng: random.Random) -> Term | None:
    places = [k for k, x in enumerate(term.operands) if isinstance(x, Variable)]
    if not places:
        return None
    k = rng.choice(places)
    return replace(term, operands=(*term.operands[:k], Variable(rng.choice("xyz")), *term.operands[k + 1 :]))


MUTATIONS: list[Callable[[Apply, random.Random], Term | None]] = [_swapped, _renumbered, _dropped, _other_variable]


def execution() -> Row:
    """The whole library through JAX on devices, values and gradients."""
    start = time.perf_counter()
    results = verify(default_library().rules, axioms(), execute=True)
    bad = [f"{r.rule.name}: {r.why}" for r in results if r.status != "proved"]
    return {"what": "execution", "seconds": time.perf_counter() - start, "rules": len(results), "not proved": bad}


PARTS = {"generate": generated, "two": two, "axioms": checked_axioms, "proofs": proofs, "mutants": mutants, "execute": execution}


def main(names: list[str]) -> None:
    rows = []
    for name in names or PARTS:
        row = PARTS[name]()
        show(row["what"], [{k: str(v)[:300] for k, v in row.items()}])
        rows.append(row)
    if not names:
        record("rules", rows)


if __name__ == "__main__":
    main(sys.argv[1:])
