"""Claims of the operator table about split operators, and the record of the claims that are proved.

An operator is a program of primitives. Along an axis, each primitive matches a factor of the table, described by the kinds of
states of its operands and results. Such a claim is proved on symbols, on all devices, for values and gradients
(`unity.verify.proofs.operators`), for every application in `tests/support/operator_cases.py`. `rules/operators.json` records the
proved claims, with a hash of the table's entry. A split program is correct if the claims about its primitives are.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache, partial
from itertools import groupby
from pathlib import Path

from unity.base.errors import RuleError, file_fault
from unity.pcg.ir.program import Body, Equation
from unity.pcg.jaxprs.jaxprs import CALLS
from unity.pcg.propagation.nested.derivative_rules import is_reverse_only
from unity.pcg.propagation.nested.programs import nested_body
from unity.pcg.propagation.placement import placed
from unity.pcg.propagation.propagation import Solution
from unity.pcg.propagation.solver import NESTED, call_solutions
from unity.pcg.types.factors import TABLE, Match
from unity.pcg.types.parallel_type import State
from unity.substitutions.language.axioms import folder

Claim = tuple[str, str]  # a primitive, and kinds of states: "P R → P"


@lru_cache(maxsize=1 << 14)
def claims(body: Body, operands: tuple[State, ...], results: tuple[State, ...]) -> frozenset[Claim]:
    """Return the claims on which an operator relies in these states along an axis. Raises Unmatched if it cannot be in them."""
    solution = placed(body, operands, results)
    return frozenset() if solution is None else frozenset(_solution_claims(body, solution))


def _solution_claims(body: Body, solution: Solution) -> Iterator[Claim]:
    """Yield the claims on which a solution of a program relies."""
    return (c for e, m in zip(body.equations, solution.matches, strict=bool(solution.matches)) for c in _claims(e, m))


def _claims(e: Equation, match: Match) -> Iterator[Claim]:
    """Yield the claims on which one equation relies; none where all its operands and results are replicated."""
    solutions = call_solutions(e, match.operands, match.results) if is_reverse_only(e) else None
    if solutions is not None:  # its program is not differentiated, so devices may reduce any value in it
        yield from _solution_claims(nested_body(e), solutions[0])
    elif e.name in CALLS:
        yield from claims(nested_body(e), match.operands, match.results)
    elif any(s.kind != "R" for s in match.operands + match.results):
        yield e.name, f"{_kinds(match.operands)} → {_kinds(match.results)}{' with halos' if match.halo else ''}"


def _kinds(states: Sequence[State]) -> str:
    """Return the kinds of states as text, equal neighbours once: a concatenation has any number of operands."""
    return " ".join(kind for kind, _ in groupby(s.kind if s.outer == 1 else "P'" for s in states)) or "nothing"


def source_hash(primitive: str) -> str:
    """Return a hash of the source of a primitive's entry in the operator table, or of the choices of a nested program."""
    entry = TABLE.get(primitive)
    functions = (NESTED.get(primitive),) if entry is None else (entry.spec, entry.local)
    text = "".join(inspect.getsource(f.func if isinstance(f, partial) else f) for f in functions if f is not None)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def record_path() -> Path:
    """Return the path of the record of proved claims."""
    return folder() / "operators.json"


@cache
def _record() -> dict[str, tuple[str, frozenset[str]]]:
    """Return for each primitive the hash of its entry, and the kinds of states that are proved of it."""
    try:
        data = json.loads(record_path().read_text(encoding="utf-8"))
        return {name: (str(row["entry"]), frozenset(row["proved"])) for name, row in data.items()}
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise RuleError(f"{record_path()}: not a valid record of proved operators: {file_fault(problem)}") from None


def proved(claim: Claim) -> bool:
    """Return whether a claim is on record as proved, for the entry as it is now."""
    primitive, kinds = claim
    entry_hash, proved_kinds = _record().get(primitive, ("", frozenset[str]()))
    return kinds in proved_kinds and entry_hash == source_hash(primitive)
