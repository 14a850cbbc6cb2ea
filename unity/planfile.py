"""Plans on disk: JSON with a schema version, written whole or not at all, and refused for any other model or machine.

A plan that a user saves has two summaries in its file (`unity.summary`), so that it can be shown and compared without its function,
and what its report shows beside them (`unity.report.live`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import unity.constraints.bound as constraints
import unity.search.machine as machines
from unity.branches import Forked
from unity.branches import from_json as branched_again
from unity.joining import from_json as joined_again
from unity.made import Made
from unity.pcg import atomic
from unity.pcg.capture import Captured, capture
from unity.pcg.errors import PlanError
from unity.pipelining import from_json as pipelined_again
from unity.plan import Plan
from unity.rewriting import derivation_of, library_of
from unity.rewriting import from_json as again
from unity.search.cost import Training
from unity.search.machine import Machine
from unity.search.session import Candidate, Search
from unity.search.unity_rules.trace import Application
from unity.strategies import from_json, to_json
from unity.substitutions.axioms import default_library
from unity.substitutions.library import Library
from unity.substitutions.parallelized import Parallelization
from unity.verify.parallel import check_parallelization

if TYPE_CHECKING:
    from unity.summary import Summary

SCHEMA = 7


def content(made: Made, chosen: Candidate, points: bool) -> dict[str, Any]:
    """A plan as JSON data, with the points of its frontier that are soon found, or only those that are known."""
    search, captured = made.search, made.captured
    original = made.original
    candidates, exact, whole = made.points if points or made.known else ((), False, True)
    return {
        "unity": "plan",
        "schema": SCHEMA,
        "graph": original.graph.key,
        "arguments": [str(n.tensors[0]) for n in original.graph.inputs],
        "rewriting": None if made.rewriting is None else made.rewriting.to_json(),
        "pipelining": None if made.pipelining is None else made.pipelining.to_json(),
        "branching": None if made.branching is None else made.branching.to_json(),
        "joining": None if made.joining is None else made.joining.to_json(),
        "machine": search.machine.to_json(),
        "training": {"backward": search.training.backward, "optimizer_slots": search.training.optimizer_slots},
        "applications": [[a.rule, a.operator, a.source, list(a.axes)] for a in made.applications],
        "constraints": made.bound.to_json(),
        "limit": made.limit,
        "seconds": made.seconds,
        "exact": exact,
        "whole": whole,
        **to_json(captured.graph, (chosen, *candidates)),
    }


def save(path: str | Path, made: Made, chosen: Candidate) -> None:
    """Saves a plan, and what is soon known of its frontier."""
    from unity.report import live  # which imports rich, as all that shows something does
    from unity.summary import captured_summary_of, summary_of

    plan = Plan(made, chosen)
    planned = summary_of(plan)
    found = {"captured": captured_summary_of(plan).folded(), "planned": planned.folded()}
    found["parallelization"] = plan.parallelization.to_json()
    found["report"] = live.to_json(live.live_of(plan, planned), plan.pcg)
    atomic.save(path, json.dumps({**content(made, chosen, True), **found}, separators=(",", ":")))


def summaries(path: str | Path, data: dict[str, Any]) -> tuple[Summary, Summary]:
    """Of a saved plan's data: the program as it was captured, on one device, and as it is planned. Nothing needs the function."""
    from unity.summary import read_summary

    try:
        return read_summary(data["captured"]), read_summary(data["planned"])
    except KeyError as error:
        raise PlanError(f"{path} lacks the summary {error} of its plan: it is damaged, or an entry of the plan cache") from None
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error


def read(path: str | Path) -> dict[str, Any]:
    """A plan file's data. Raises PlanError if it is not one, damaged, or of another schema."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PlanError(f"{path} cannot be read as a plan: {error}") from error
    if not isinstance(data, dict) or data.get("unity") != "plan":
        raise PlanError(f"{path} is not a plan that unity saved (plan.save writes them)")
    if data.get("schema") != SCHEMA:
        raise PlanError(f"{path} has plan schema {data.get('schema')}, this version of unity reads {SCHEMA}: plan again")
    return data


def load(path: str | Path, fn: Callable[..., Any], *args: Any, argnums: int | tuple[int, ...] = 0, rules: Any = None) -> Plan:
    """The plan that `plan.save` wrote, for the same function and arguments of the same shapes; `rules` as it was planned with.

    Nothing in the file is run: it holds types only, and `fn` is captured again. Raises PlanError, naming the difference, if the
    function, the arguments or the machine are others.
    """
    data = read(path)
    training = data.get("training")
    backward = not isinstance(training, dict) or training.get("backward", True)
    captured = capture(fn, *args, argnums=argnums if backward else ())
    arguments = [str(n.tensors[0]) for n in captured.graph.inputs]
    if arguments != data.get("arguments"):
        pairs = zip((*captured.paths, *("closed over",) * len(captured.consts)), arguments, data.get("arguments", ()), strict=False)
        different = next((f"{p} is {now}, was {then}" for p, now, then in pairs if now != then), "their number differs")
        raise PlanError(f"{path} was made for other arguments: {different}. Plan again with unity.optimize.")
    if captured.graph.key != data.get("graph"):
        raise PlanError(
            f"{path} was made for another function: its graph has the hash {data.get('graph')}, that of"
            f" {getattr(fn, '__name__', 'this function')} is {captured.graph.key}. Plan again with unity.optimize."
        )
    asked = None if rules is None else library_of(rules)
    made, chosen = restore(path, data, captured, fn, lambda: library_of(asked))
    plan = Plan(made, chosen)
    try:
        if made.rewriting is not None:
            made.rewriting.check(derivation_of(data["rewriting"]))
        check_parallelization(plan.serial, plan.pcg, Parallelization.from_json(data.get("parallelization")), default_library())
    except PlanError as error:
        raise PlanError(f"{path} is refused, because its derivation does not replay: {error}") from None
    return plan


def restore(
    path: str | Path, data: dict[str, Any], captured: Captured, fn: Callable[..., Any], library: Callable[[], Library]
) -> tuple[Made, Candidate]:
    """A plan from its data, for a function that was captured again."""
    try:
        rewriting = None if data["rewriting"] is None else again(captured, data["rewriting"], library())
    except KeyError as error:
        raise PlanError(f"{path} is damaged: it lacks {error}") from None
    except PlanError as error:
        raise PlanError(f"{path} cannot be used: {error}. Plan again with unity.optimize.") from None
    captured = captured if rewriting is None else rewriting.after
    try:
        machine = Machine.from_json(data["machine"])
        pipelining = None if data["pipelining"] is None else pipelined_again(captured, data["pipelining"], machine.axes)
        forked = Forked.of(captured, pipelining)
        captured = captured if pipelining is None else pipelining.after
        branching = None if data["branching"] is None else branched_again(forked, data["branching"], machine.axes)
        captured = captured if branching is None else branching.after
        joining = None if data.get("joining") is None else joined_again(captured, data["joining"], machine.devices)
        captured = captured if joining is None else joining.after
        training = Training(**data["training"])
        seconds, exact = float(data["seconds"]), bool(data["exact"])
        applications = tuple(
            Application(rule, operator, source, tuple(axes)) for rule, operator, source, axes in data["applications"]
        )
        limit = None if data.get("limit") is None else float(data["limit"])
        chosen, *candidates = from_json(captured.graph, machine.axes, data)
    except (KeyError, TypeError, ValueError, machines.MachineError) as error:
        raise PlanError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    bound = constraints.restored(data.get("constraints", {"given": [], "weights": []}), captured, fn)
    search = Search(captured.graph, captured.differentiated, machine, training, restrict=bound)
    made = Made(fn, captured, search, seconds, tuple(candidates), exact, rewriting, pipelining, applications=applications)
    made = replace(made, known_whole=bool(data.get("whole", True)))
    return replace(made, branching=branching, joining=joining, bound=bound, limit=limit), chosen
