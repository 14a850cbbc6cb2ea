"""The report on a file of released rules, for a terminal."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from statistics import median

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from unity.substitutions.importing.verdict import Imported


def report(rules: Sequence[Imported]) -> Group:
    """Return the number of rules for each verdict and reason, and every rule that was not proved."""
    counts = Counter((rule.verdict.status, _reason(rule)) for rule in rules)
    summary = Table("verdict", "rules", "why", title=f"{len(rules)} rules")
    for (status, why), count in sorted(counts.items(), key=lambda entry: (entry[0][0], -entry[1])):
        summary.add_row(status, str(count), escape(why))
    unproved = Table("rule", "verdict", "why", title="not proved")
    for rule in rules:
        if rule.verdict.status != "proved":
            unproved.add_row(rule.name, rule.verdict.status, escape(rule.verdict.why))
    seconds = [rule.verdict.seconds for rule in rules if rule.verdict.status == "proved"]
    proofs = f"first-order proofs: median {1e3 * median(seconds):.2f} ms, longest {1e3 * max(seconds):.2f} ms" if seconds else ""
    return Group(*([unproved] if unproved.row_count else []), summary, proofs)


def _reason(rule: Imported) -> str:
    """Return the reason for a verdict without the place, so that rules with the same fault are counted together."""
    if rule.verdict.status == "refuted":
        return "counterexample"
    return re.sub(r"^(source|target) operator \d+ | \[[^]]*\]", "", rule.verdict.why)
