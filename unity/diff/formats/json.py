"""A difference as JSON data for other tools."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from unity.base.documents import plain
from unity.diff.comparison import PlanComparison
from unity.diff.graph_diff_json import to_json
from unity.diff.regions import RegionDiff, step_costs
from unity.plan.summary import Summary

SCHEMA = 1


def data(diff: PlanComparison) -> dict[str, Any]:
    """Return all differences. The second graph can be built from the first and `graph` alone."""
    return {
        "unity": "diff",
        "schema": SCHEMA,
        "different": bool(diff),
        "before": _side(diff.before),
        "after": _side(diff.after),
        "costs": {what: asdict(c) for what, c in step_costs(diff.before, diff.after).items()},
        "rules": [{"mark": mark, **plain(use)} for mark, use in diff.rules],
        "regions": [_region(r) for r in diff.regions],
        "collectives": [{**plain(c.alike), "count": c.counts, "seconds": asdict(c.seconds)} for c in diff.collectives],
        "graph": to_json(diff.graph),
    }


def _side(s: Summary) -> dict[str, Any]:
    figures = {k: getattr(s, k) for k in ("name", "machine", "devices", "time", "memory")}
    return {**figures, "operators": len(s.graph), "key": s.graph.key}


def _region(r: RegionDiff) -> dict[str, Any]:
    edits = [{"times": times, **{k: v for k, v in asdict(e).items() if k != "line"}} for e, times in r.edits]
    costs = {"computing": asdict(r.computing), "communicating": asdict(r.communicating)}
    return {"line": r.line, "rules": [use.rule for use in r.rules], "edits": edits, **costs}
