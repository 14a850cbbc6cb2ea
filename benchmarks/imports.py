"""How long released rule files take to import and verify, each in a fresh process: start-up, translation, proof, execution.
And how many of their true rules our own library derives.

python -m benchmarks.imports taso rules.pb flexflow rules.json
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from statistics import median
from typing import Any

from benchmarks.record import record, show

LIMITS = {"taso": 5.0, "flexflow": 30.0}  # seconds


def measured(kind: str, path: str) -> dict[str, Any]:
    """One file, imported in a process of its own."""
    start = time.perf_counter()
    out = subprocess.run(
        [sys.executable, "-m", "benchmarks.imports", "--one", kind, path], check=True, capture_output=True, text=True
    )
    seconds = time.perf_counter() - start
    return {"file": kind, "seconds": seconds, "limit": LIMITS[kind], **json.loads(out.stdout)}


def one(kind: str, path: str) -> dict[str, Any]:
    """What a process finds of a file."""
    from unity.substitutions import importing

    found = (importing.import_taso if kind == "taso" else importing.import_flexflow)(path)
    proofs = [1e3 * i.verdict.seconds for i in found if i.verdict.status == "proved"]
    figures = {"rules": len(found), **Counter(i.verdict.status for i in found)}
    return figures | {"median proof, ms": median(proofs), "longest proof, ms": max(proofs)}


def derived(kind: str, path: str) -> dict[str, Any]:
    """How many of a file's true rules follow from our library by rewriting (parallelization an operator like others)."""
    from unity.substitutions import importing
    from unity.substitutions.language.axioms import default_library
    from unity.verify.proofs.first_order import Prover

    found = (importing.import_taso if kind == "taso" else importing.import_flexflow)(path)
    prover = Prover(default_library().rules, values=False)
    true = [(i.name, i.rule) for i in found if i.verdict.status == "proved" and i.rule is not None]
    missing = [name for name, rule in true if prover.prove(rule).status != "proved"]
    return {"true": len(true), "derived": len(true) - len(missing), "part": 1 - len(missing) / len(true), "not derived": missing}


def main(arguments: list[str]) -> None:
    if arguments[0] == "--one":
        print(json.dumps(one(*arguments[1:])))
        return
    pairs = list(zip(arguments[::2], arguments[1::2], strict=True))
    rows = [measured(kind, path) | derived(kind, path) for kind, path in pairs]
    show("imports", rows)
    record("imports", rows)


if __name__ == "__main__":
    main(sys.argv[1:])
