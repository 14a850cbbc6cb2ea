"""Plan files: JSON with a schema version and checksums, written atomically, and refused for any other function or arguments.

The file of a plan that a user saves also has two summaries (`unity.plan.summary`) and the further data of its report
(`unity.report.live`), so that the plan can be shown and compared without its function.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import unity.constraints.bound as constraints
from unity.base import atomic_files as atomic
from unity.base.errors import PlanError, UnityError
from unity.constraints.stated import marking
from unity.machine.machine import Machine
from unity.pcg.capture.capture import Captured, capture
from unity.plan.options import refuse_machine
from unity.plan.plan import Plan
from unity.plan.plan_family import PlanFamily
from unity.plan.strategies import from_json, to_json
from unity.plan.summary import Summary, captured_summary_of, read_summary, summary_of
from unity.search.cost.cost import Training
from unity.search.session import Candidate, Search
from unity.search.substitution.trace import RuleApplication
from unity.substitutions.language.axioms import default_library
from unity.substitutions.language.library import Library
from unity.substitutions.language.parallel_derivation import Parallelization
from unity.transforms.branches import Forked
from unity.transforms.branches import from_json as branching_from
from unity.transforms.packing import from_json as joining_from
from unity.transforms.pipelining import from_json as pipelining_from
from unity.transforms.rewriting import derivation_of, library_of
from unity.transforms.rewriting import from_json as rewriting_from
from unity.verify.derivations.parallel import check_parallelization

SCHEMA = 8
CHECKSUMS = "checksums"  # of every other part of a file, by its name
# The exceptions that decoding data of unexpected types raises.
DAMAGED = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def sealed(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plan's data with a checksum of every part, by which `read` refuses edited files."""
    parts = {name: part for name, part in data.items() if name != CHECKSUMS}
    return {**parts, CHECKSUMS: {name: _checksum(part) for name, part in parts.items()}}


def _checksum(part: Any) -> str:
    text = json.dumps(part, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:32]


def _check_seal(path: str | Path, data: Mapping[str, Any]) -> None:
    """Raise PlanError, naming the part, unless all parts of a file have their checksums."""
    sums = data.get(CHECKSUMS)
    if not isinstance(sums, dict):
        raise PlanError(f"{path} is damaged at $.{CHECKSUMS}: expected the checksums of its parts, got {type(sums).__name__}")
    parts = {name: part for name, part in data.items() if name != CHECKSUMS}
    for name in (*sums, *parts):
        if name not in parts:
            raise PlanError(f"{path} is damaged at $.{name}: it is missing")
        if sums.get(name) != _checksum(parts[name]):
            raise PlanError(
                f"{path} was changed at $.{name} after unity saved it: a plan's figures and strategy are read as they were"
                " planned, or not at all. Restore the file, or plan again with unity.optimize."
            )


@contextmanager
def reading(path: str | Path, part: str) -> Iterator[None]:
    """Turn errors of decoding into a PlanError that names the file and the part."""
    try:
        yield
    except UnityError as error:
        problem = f"{path} is damaged, or cannot be used here, at $.{part}"
        raise PlanError(f"{problem}: {error}\n    Plan again with unity.optimize.") from error
    except DAMAGED as error:
        raise PlanError(f"{path} is damaged at $.{part}: {type(error).__name__}: {error}") from error


def content(family: PlanFamily, chosen: Candidate, points: bool) -> dict[str, Any]:
    """Return a plan as JSON data.

    Args:
        family: the plan's family.
        chosen: the plan's point of the frontier.
        points: whether to search for quickly found points of the frontier; otherwise only points known from a file are included.
    """
    search, captured = family.search, family.captured
    original = family.original
    candidates, exact, whole = family.points if points or family.known else ((), False, True)
    return {
        "unity": "plan",
        "schema": SCHEMA,
        "graph": original.graph.key,
        "arguments": [str(n.tensors[0]) for n in original.graph.inputs],
        "rewriting": None if family.rewriting is None else family.rewriting.to_json(),
        "pipelining": None if family.pipelining is None else family.pipelining.to_json(),
        "branching": None if family.branching is None else family.branching.to_json(),
        "joining": None if family.joining is None else family.joining.to_json(),
        "machine": search.machine.to_json(),
        "training": {"backward": search.training.backward, "optimizer_slots": search.training.optimizer_slots},
        "differentiated": sorted(original.differentiated),
        "applications": [[a.rule, a.operator, a.source, list(a.axes)] for a in family.applications],
        "constraints": family.bound.to_json(),
        "shardings": "free" if original.marking is None else "keep",
        "limit": family.limit,
        "seconds": family.seconds,
        "interrupted": family.interrupted,
        "exact": exact,
        "whole": whole,
        **to_json(captured.graph, (chosen, *candidates)),
    }


def save(path: str | Path, family: PlanFamily, chosen: Candidate) -> None:
    """Write a plan's file: the plan, quickly found points of its frontier, its derivation, summaries and the report's data."""
    from unity.report import live  # imports rich, which takes a while

    plan = Plan(family, chosen)
    planned = summary_of(plan)
    data = content(family, chosen, points=True)
    data |= {"captured": captured_summary_of(plan).folded(), "planned": planned.folded()}
    data["parallelization"] = plan.parallelization.to_json()
    data["report"] = live.to_json(live.live_of(plan, planned), plan.pcg)
    atomic.save(path, json.dumps(sealed(data), separators=(",", ":")))


def summaries(path: str | Path, data: dict[str, Any]) -> tuple[Summary, Summary]:
    """Return the summaries in a saved plan's data: of the captured program on one device, and of the plan.

    The planned function is not needed. Raises PlanError for an entry of the plan cache, which has no summaries.
    """
    both: list[Summary] = []
    for part in ("captured", "planned"):
        if part not in data:
            raise PlanError(f"{path} lacks the summary $.{part} of its plan: it is an entry of the plan cache")
        with reading(path, part):
            both.append(read_summary(data[part]))
    return both[0], both[1]


def read(path: str | Path) -> dict[str, Any]:
    """Return a plan file's data. Raises PlanError if the file is not a plan, is damaged, or has another schema."""
    try:
        data = json.loads(atomic.path_of(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # ValueError: the file is not UTF-8, or not JSON
        raise PlanError(f"{path} cannot be read as a plan: {error}") from error
    if not isinstance(data, dict) or data.get("unity") != "plan":
        raise PlanError(f"{path} is not a plan that unity saved (plan.save writes them)")
    if data.get("schema") != SCHEMA:
        raise PlanError(f"{path} has plan schema {data.get('schema')}, this version of unity reads {SCHEMA}: plan again")
    _check_seal(path, data)
    return data


def load(
    path: str | Path, fn: Callable[..., Any], *args: Any, argnums: int | Sequence[int] | None = None, rules: Any = None
) -> Plan:
    """Read a plan that `plan.save` wrote, for the same function and arguments of the same shapes.

    Nothing in the file is executed: it contains only types, and `fn` is captured again.

    Args:
        path: the file.
        fn: the function that was planned.
        args: its arguments, or `jax.ShapeDtypeStruct`s in their place.
        argnums: the differentiated arguments, to be checked against those of the plan. By default they are not checked: the plan
            is always for those that it was saved with.
        rules: the rules that the function was planned with, if they were not the default.

    Raises:
        PlanError: the function, the arguments or `argnums` differ from those planned, or the file was changed. The message names
            the place.
    """
    data = read(path)
    with reading(path, "machine"):
        kept = marking(Machine.from_json(data["machine"])) if data.get("shardings") == "keep" else None
    traced = capture(fn, *args, argnums=() if argnums is None else argnums, marking=kept)
    captured = _captured(path, data, traced, argnums)
    arguments = [str(n.tensors[0]) for n in captured.graph.inputs]
    if arguments != data.get("arguments"):
        with reading(path, "arguments"):
            names = (*captured.paths, *("closed over",) * len(captured.consts))
            pairs = list(zip(names, arguments, data["arguments"], strict=False))
        different = next((f"{p} is {now}, was {then}" for p, now, then in pairs if now != then), "their number differs")
        raise PlanError(f"{path} was made for other arguments: {different}. Plan again with unity.optimize.")
    if captured.graph.key != data.get("graph"):
        raise PlanError(
            f"{path} was made for another function: its graph has the hash {data.get('graph')}, that of"
            f" {getattr(fn, '__name__', 'this function')} is {captured.graph.key}. Plan again with unity.optimize."
        )
    library = None if rules is None else library_of(rules)
    family, chosen = restore(path, data, captured, fn, lambda: library_of(library))
    plan = Plan(family, chosen)
    with reading(path, "points"):
        _ = plan.pcg
    try:
        if family.rewriting is not None:
            family.rewriting.check(derivation_of(data["rewriting"]))
        with reading(path, "parallelization"):
            steps = Parallelization.from_json(data.get("parallelization"))
        check_parallelization(plan.serial, plan.pcg, steps, default_library())
    except PlanError as error:
        raise PlanError(f"{path} is refused, because its derivation does not replay: {error}") from None
    return plan


def _captured(path: str | Path, data: Mapping[str, Any], captured: Captured, argnums: int | Sequence[int] | None) -> Captured:
    """Return the captured function with the differentiated arguments that the plan was saved with."""
    with reading(path, "differentiated"):
        planned = frozenset(map(int, data["differentiated"]))
    paths = captured.paths
    if not planned <= set(range(len(paths))):
        raise PlanError(f"{path} was made for other arguments: $.differentiated names more than there are. Plan again.")
    if argnums is not None and planned and captured.differentiated != planned:
        names = ", ".join(paths[k] for k in sorted(planned))
        raise PlanError(
            f"{path} was planned for gradients of {names}, but argnums={argnums!r} names others: leave argnums= out, or plan again"
            " with unity.optimize."
        )
    return replace(captured, differentiated=planned)


def restore(
    path: str | Path, data: dict[str, Any], captured: Captured, fn: Callable[..., Any], library: Callable[[], Library]
) -> tuple[PlanFamily, Candidate]:
    """Return the family and the point of a plan from its data, for the function as captured again."""
    with reading(path, "rewriting"):
        rewriting = None if data["rewriting"] is None else rewriting_from(captured, data["rewriting"], library())
    captured = captured if rewriting is None else rewriting.after
    with reading(path, "machine"):
        machine = Machine.from_json(data["machine"])
    with reading(path, "pipelining"):
        pipelining = None if data["pipelining"] is None else pipelining_from(captured, data["pipelining"], machine.axes)
    forked = Forked.of(captured, pipelining)
    captured = captured if pipelining is None else pipelining.after
    with reading(path, "branching"):
        branching = None if data["branching"] is None else branching_from(forked, data["branching"], machine.axes)
    captured = captured if branching is None else branching.after
    with reading(path, "joining"):
        joining = None if data["joining"] is None else joining_from(captured, data["joining"], machine.devices)
    captured = captured if joining is None else joining.after
    with reading(path, "training"):
        training = Training(**data["training"])
        refuse_machine(None, None, training.optimizer_slots)
    with reading(path, "seconds, exact, whole, interrupted or limit"):
        seconds, limit = float(data["seconds"]), None if data["limit"] is None else float(data["limit"])
        exact, whole, interrupted = (bool(data[name]) for name in ("exact", "whole", "interrupted"))
    with reading(path, "applications"):
        applications = tuple(
            RuleApplication(rule, operator, source, tuple(axes)) for rule, operator, source, axes in data["applications"]
        )
    with reading(path, "points"):
        chosen, *candidates = from_json(captured.graph, machine.axes, data)
    with reading(path, "constraints"):
        bound = constraints.restored(data["constraints"], captured, fn)
    search = Search(captured.graph, captured.differentiated, machine, training, restrict=bound)
    family = PlanFamily(
        fn,
        captured,
        search,
        seconds,
        known=tuple(candidates),
        known_exact=exact,
        known_whole=whole,
        rewriting=rewriting,
        pipelining=pipelining,
        branching=branching,
        joining=joining,
        applications=applications,
        bound=bound,
        limit=limit,
        interrupted=interrupted,
    )
    return family, chosen
