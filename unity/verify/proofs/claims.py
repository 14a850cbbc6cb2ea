"""What the operator table claims where an operator is split, and which of its claims are proved.

An operator is a program of primitives. Along an axis each of them has a match of the table: its factor, by the kinds of states of
operands and results. Such a claim is proved by symbols, on all devices, values and gradients (`unity.verify.proofs.operators`), for
every application of `tests/support/operator_cases.py`; `rules/operators.json` keeps which are, with a hash of the entry that they
are about. What is said of a program follows from what is said of its primitives."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from itertools import groupby
from pathlib import Path

from unity.base.errors import RuleError
from unity.pcg.ir.program import Body, Equation
from unity.pcg.propagation.placement import along_axis
from unity.pcg.propagation.solver import NESTED, nested_body
from unity.pcg.types.factors import TABLE, Match
from unity.pcg.types.parallel_type import State
from unity.substitutions.language.axioms import folder

CALLS = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "remat2", "checkpoint"})
Claim = tuple[str, str]  # a primitive, and kinds of states: "P R → P"


@lru_cache(maxsize=1 << 14)
def claims(body: Body, operands: tuple[State, ...], results: tuple[State, ...]) -> frozenset[Claim]:
    """What the table must be right about, for an operator to be in these states along an axis. Raises Unmatched if it cannot be."""
    solution = along_axis(body, operands, results)
    if solution is None:
        return frozenset()
    return frozenset(c for e, m in zip(body.equations, solution.matches, strict=bool(solution.matches)) for c in _claims(e, m))


def _claims(e: Equation, match: Match) -> Iterator[Claim]:
    if e.name in CALLS:  # what it calls is said of its program
        yield from claims(nested_body(e), match.operands, match.results)
    elif any(s.kind != "R" for s in match.operands + match.results):
        yield e.name, f"{_kinds(match.operands)} → {_kinds(match.results)}{' with halos' if match.halo else ''}"


def _kinds(states: Sequence[State]) -> str:
    """The kinds of states, those of neighbours that are equal once: a concatenation has any number of operands."""
    return " ".join(kind for kind, _ in groupby(s.kind if s.outer == 1 else "P'" for s in states)) or "nothing"


def source_of(primitive: str) -> str:
    """Stands for an entry of the operator table as it is written; of control flow, for what its choices are found by."""
    entry = TABLE.get(primitive)
    known = (NESTED.get(primitive),) if entry is None else (entry.spec, entry.local)
    text = "".join(inspect.getsource(f) for f in known if f is not None)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def record_path() -> Path:
    """Where the record of what is proved lies."""
    return folder() / "operators.json"


@cache
def _record() -> dict[str, tuple[str, frozenset[str]]]:
    try:
        data = json.loads(record_path().read_text(encoding="utf-8"))
        return {name: (str(one["entry"]), frozenset(one["proved"])) for name, one in data.items()}
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise RuleError(f"{record_path()}: no record of what is proved of operators: {problem}") from None


def proved(claim: Claim) -> bool:
    """Whether a claim is on record as proved, of the entry as it is now."""
    primitive, kinds = claim
    known = _record().get(primitive)
    return known is not None and kinds in known[1] and known[0] == source_of(primitive)
