"""A difference as JSON data for other tools."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from unity.diff.compare import PlanDiff, costs
from unity.diff.graphs.data import to_json
from unity.diff.regions import Region
from unity.plan.summary import Summary

SCHEMA = 1


def data(found: PlanDiff) -> dict[str, Any]:
    """All that is different. `graph` alone is enough to make the second graph of the first."""
    return {
        "unity": "diff",
        "schema": SCHEMA,
        "different": bool(found),
        "before": _side(found.before),
        "after": _side(found.after),
        "costs": {what: asdict(c) for what, c in costs(found).items()},
        "rules": [{"mark": mark, **asdict(use)} for mark, use in found.rules],
        "regions": [_region(r) for r in found.regions],
        "collectives": [{**asdict(c.alike), "count": c.counts, "seconds": asdict(c.seconds)} for c in found.collectives],
        "graph": to_json(found.graph),
    }


def _side(s: Summary) -> dict[str, Any]:
    figures = {k: getattr(s, k) for k in ("name", "machine", "devices", "time", "memory")}
    return {**figures, "operators": len(s.graph), "key": s.graph.key}


def _region(r: Region) -> dict[str, Any]:
    edits = [{"times": times, **{k: v for k, v in asdict(e).items() if k != "line"}} for e, times in r.edits]
    costs = {"computing": asdict(r.computing), "communicating": asdict(r.communicating)}
    return {"line": r.line, "rules": [use.rule for use in r.rules], "edits": edits, **costs}
