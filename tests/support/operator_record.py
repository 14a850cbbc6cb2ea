"""Writes `rules/operators.json`: which claims of the operator table are proved, by symbols, on all devices, values and gradients.

`python tests/support/operator_record.py`, wherever an entry of the table or a case has changed. Takes some minutes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from operator_cases import CASES  # noqa: E402

from unity.pcg.ir.program import Body, close  # noqa: E402
from unity.pcg.propagation.choices import choices  # noqa: E402
from unity.verify.proofs.claims import Claim, claims, record_path, source_hash  # noqa: E402
from unity.verify.proofs.operators import GradientProof, OperatorProof, fits, inner_digits  # noqa: E402

DEGREES = 2, 3
SLOW = {"batch norm", "conv, 2-D", "conv, other dimension numbers", "dot product attention"}  # their derivatives: of others


def operator(name: str) -> tuple[Body, list]:
    fn, args = CASES[name]
    args = [a() if callable(a) else a for a in args]
    return close(jax.make_jaxpr(lambda *a: jax.tree.leaves(fn(*a)))(*args)), args


def proved_claims(name: str) -> set[Claim]:
    """What is proved by one case: the claims of every choice whose values are proved, and gradients where they can be."""
    body, args = operator(name)
    proofs = [OperatorProof(body, args)] + ([] if name in SLOW else [GradientProof(body, args)])
    found: set[Claim] = set()
    for choice in choices(body, inner_digits(body, 2)):
        degree = next((d for d in DEGREES if fits(body, (choice,), (d,))), None)
        if degree is not None:
            values, *gradients = (p.check((choice,), (degree,)) for p in proofs)
            good = values.answer == "proved" and all(g.answer == "proved" or "there are no gradients" in g.why for g in gradients)
            found |= claims(body, choice.operands, choice.results) if good else set()
    return found


def main() -> None:
    found: dict[str, set[str]] = {}
    with jax.enable_x64(True):
        for name in CASES:
            for primitive, kinds in proved_claims(name):
                found.setdefault(primitive, set()).add(kinds)
    rows = [
        f" {json.dumps(name)}: {json.dumps({'entry': source_hash(name), 'proved': sorted(kinds)}, ensure_ascii=False)}"
        for name, kinds in sorted(found.items())
    ]
    record_path().write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
