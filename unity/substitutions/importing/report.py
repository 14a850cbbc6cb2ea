"""What was found of a file of released rules, to be printed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from statistics import median

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from unity.substitutions.importing.verdict import Imported


def report(found: Sequence[Imported]) -> Group:
    """How many rules came out how, and why; and every rule that was not proved."""
    counts = Counter((i.verdict.status, _reason(i)) for i in found)
    summary = Table("verdict", "rules", "why", title=f"{len(found)} rules")
    for (status, why), count in sorted(counts.items(), key=lambda entry: (entry[0][0], -entry[1])):
        summary.add_row(status, str(count), escape(why))
    rest = Table("rule", "verdict", "why", title="not proved")
    for i in found:
        if i.verdict.status != "proved":
            rest.add_row(i.name, i.verdict.status, escape(i.verdict.why))
    seconds = [i.verdict.seconds for i in found if i.verdict.status == "proved"]
    proofs = f"first-order proofs: median {1e3 * median(seconds):.2f} ms, longest {1e3 * max(seconds):.2f} ms" if seconds else ""
    return Group(*([rest] if rest.row_count else []), summary, proofs)


def _reason(found: Imported) -> str:
    """Why, without where: rules with the same fault are counted together."""
    if found.verdict.status == "refuted":
        return "counterexample"
    return re.sub(r"^(source|target) operator \d+ | \[[^]]*\]", "", found.verdict.why)
