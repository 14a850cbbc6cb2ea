"""Plan files: JSON with a schema version and checksums, written atomically, and refused for any other function or arguments.

The file of a plan that a user saves also has two summaries (`unity.plan.summary`) and the further data of its report
(`unity.report.function_figures`), so that the plan can be shown and compared without its function.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

from msgspec.structs import asdict

import unity.constraints.bound_constraints as constraints
from unity.base import atomic_files as atomic
from unity.base.documents import Misfit, document_kind, encoded, parsed, plain, refuse_unknown, typed
from unity.base.errors import PlanError, PlanFileError, UnityError, file_fault
from unity.constraints.program_shardings import marking
from unity.pcg.capture.capture import Captured, capture
from unity.pcg.ir.graph import PCG
from unity.plan.files.document import SCHEMA, AnyTransformation, PlanDocument, SavedPlan, TrainingRecord
from unity.plan.files.strategies import candidates, strategies
from unity.plan.plan import Plan
from unity.plan.plan_family import PlanFamily
from unity.plan.summary import Summary, captured_summary_of, read_summary, summary_of
from unity.search.session import Candidate, Search
from unity.substitutions.language.axioms import default_library
from unity.substitutions.language.library import Library
from unity.substitutions.language.parallel_derivation import Parallelization
from unity.transforms.rewriting import library_of
from unity.transforms.transformation import Transformation, TransformationSource, transformed
from unity.verify.derivations.parallel import check_parallelization

CHECKSUMS = "checksums"  # of every other part of a file, by its name
WAY_OUT = "Restore the file, or plan again with unity.optimize."
D = TypeVar("D", bound=PlanDocument)


def sealed(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plan's data with a checksum of every part, by which `read` refuses edited files."""
    parts = {name: part for name, part in data.items() if name != CHECKSUMS}
    return {**parts, CHECKSUMS: {name: _checksum(part) for name, part in parts.items()}}


def written(document: PlanDocument) -> bytes:
    """Return the text of a plan's file, with checksums. Numbers are written in their declared types, as a reader has them."""
    as_declared = typed(plain(document), type(document))  # so that saving a loaded plan writes the same bytes
    return encoded(sealed({"unity": "plan", **asdict(as_declared)}))


def _checksum(part: Any) -> str:
    return hashlib.sha256(encoded(part, "sorted")).hexdigest()[:32]


def _check_seal(path: str | Path, data: Mapping[str, Any], sums: Mapping[str, str]) -> None:
    """Raise PlanError, naming the part, unless all parts of a file have their checksums."""
    for name in sorted({*sums, *data} - {CHECKSUMS}):
        if name not in data or sums.get(name) != _checksum(data[name]):
            raise PlanError(
                f"{path} was changed at $.{name} after unity saved it: a plan's figures and strategy are read as they were"
                f" planned, or not at all. {WAY_OUT}"
            )


@contextmanager
def reading(path: str | Path, part: str = "") -> Iterator[None]:
    """Turn errors of reading a part of a plan into a PlanError that names the file and the place."""
    try:
        yield
    except Misfit as fault:
        raise PlanError(f"{path} is damaged at ${part}{fault.place}: {fault.cause}. {WAY_OUT}") from None
    except UnityError as error:
        raise PlanError(f"{path} is damaged, or cannot be used here, at ${part}: {error}\n    {WAY_OUT}") from error


def document_of(family: PlanFamily, chosen: Candidate, points: bool) -> PlanDocument:
    """Return a plan as a document.

    Args:
        family: the plan's family.
        chosen: the plan's point of the frontier.
        points: whether to search for quickly found points of the frontier; otherwise only points known from a file are included.
    """
    search, original = family.search, family.original
    known, exact, whole = family.points if points or family.known else ((), False, True)
    return PlanDocument(
        graph=original.graph.key,
        arguments=tuple(str(n.tensors[0]) for n in original.graph.inputs),
        transformations=tuple(cast(AnyTransformation, t.record) for t in family.transformations),
        machine=search.machine,
        training=TrainingRecord.of(search.training),
        differentiated=tuple(sorted(original.differentiated)),
        applications=family.applications,
        constraints=family.bound.record,
        shardings="free" if original.marking is None else "keep",
        limit=None if family.limit == math.inf else family.limit,
        seconds=family.seconds,
        interrupted=family.interrupted,
        exact=exact,
        whole=whole,
        may_overlap=family.may_overlap,
        **asdict(strategies(family.captured.graph, (chosen, *known))),
    )


def save(path: str | Path, plan: Plan) -> None:
    """Write a plan's file: the plan, quickly found points of its frontier, its derivation, summaries and the report's data."""
    from unity.report import function_figures  # imports rich, which takes a while

    planned = summary_of(plan.program)
    document = SavedPlan(
        **asdict(document_of(plan.program.family, plan.program.candidate, points=True)),
        captured=captured_summary_of(plan.program).record,
        planned=planned.record,
        parallelization=plan.program.parallelization.to_record(),
        report=function_figures.record_of(function_figures.figures_of(plan), plan.program.pcg),
    )
    atomic.save(path, written(document))


def summaries(path: str | Path, document: SavedPlan) -> tuple[Summary, Summary]:
    """Return the summaries in a saved plan: of the captured program on one device, and of the plan.

    The planned function is not needed.
    """
    with reading(path, ".captured"):
        captured = read_summary(document.captured, document.machine)
    with reading(path, ".planned"):
        return captured, read_summary(document.planned, document.machine)


def read(path: str | Path, kind: type[D] = SavedPlan) -> D:
    """Read a plan's file. Raises PlanError if it is not a plan, is damaged, was edited, or has another schema."""
    try:
        data = parsed(atomic.path_of(path).read_bytes())
    except (OSError, PlanFileError) as error:
        raise PlanError(f"{path} cannot be read: {file_fault(error)}") from error
    if not isinstance(data, dict) or data.get("unity") != "plan":
        other = f"is {found}, not" if (found := document_kind(data)) else "is not"
        raise PlanError(f"{path} {other} a plan that unity saved (plan.files.save writes them)")
    if data.get("schema") != SCHEMA:
        raise PlanError(f"{path} has plan schema {data.get('schema')}, this version of unity reads {SCHEMA}: plan again")
    with reading(path):
        document = typed(data, kind)
        refuse_unknown(document.machine, data["machine"], ".machine")
    _check_seal(path, data, document.checksums)
    return document


def load(
    path: str | Path, fn: Callable[..., Any], *args: Any, argnums: int | Sequence[int] | None = None, rules: Any = None
) -> Plan:
    """Read a plan that `plan.files.save` wrote, for the same function and arguments of the same shapes.

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
    document = read(path)
    marks = marking(document.machine) if document.shardings == "keep" else None
    traced = capture(fn, *args, argnums=() if argnums is None else argnums, marking=marks)
    if tuple(str(n.tensors[0]) for n in traced.graph.inputs) != document.arguments:
        different = _first_argument(_captured_graph(path, document), traced.graph)
        raise PlanError(f"{path} was made for other arguments: {different}. Plan again with unity.optimize.")
    captured = _captured(path, document, traced, argnums)
    if captured.graph.key != document.graph:
        different = _first_operator(_captured_graph(path, document), captured.graph)
        name = getattr(fn, "__name__", "this function")
        raise PlanError(
            f"{path} was made for another function than {name}{different}. If it is the same function, another version of unity"
            " captured it as another program. Plan again with unity.optimize."
        )
    library = None if rules is None else library_of(rules)
    family, chosen = restore(path, document, captured, fn, lambda: library_of(library))
    plan = Plan(family, chosen)
    with reading(path, ".points"):
        _ = plan.program.pcg
    try:
        for transformation in family.transformations:
            if transformation.by_rules:  # the others were derived when they were applied
                transformation.check()
        with reading(path, ".parallelization"):
            steps = Parallelization.from_record(document.parallelization)
        check_parallelization(plan.program.serial, plan.program.pcg, steps, default_library())
    except PlanError as error:
        raise PlanError(f"{path} is refused, because its derivation does not replay: {error}") from None
    return plan


def _captured_graph(path: str | Path, document: SavedPlan) -> PCG:
    """Return the graph of the function that a saved plan was made for."""
    with reading(path, ".captured"):
        return read_summary(document.captured, document.machine).graph


def _first_argument(planned: PCG, captured: PCG) -> str:
    """Return the first argument that only one of two programs has, or else whose type differs, by its path."""
    then, now = ({n.name: str(n.tensors[0]) for n in graph.inputs} for graph in (planned, captured))
    differing = (f"{name} is {now[name]}, was {then[name]}" for name in now if name in then and now[name] != then[name])
    missing = (f"there is no {name} ({then[name]})" for name in then if name not in now)
    added = (f"{name} ({now[name]}) is new" for name in now if name not in then)
    return next((text for texts in (missing, added, differing) for text in texts), "they are in another order")


def _first_operator(planned: PCG, captured: PCG) -> str:
    """Return the first difference of two programs, after a colon; "" where their operators print alike."""
    from unity.diff import first_difference

    different = first_difference(planned, captured)
    return "" if different is None else f": {different}"


def _captured(path: str | Path, document: SavedPlan, captured: Captured, argnums: int | Sequence[int] | None) -> Captured:
    """Return the captured function with the differentiated arguments that the plan was saved with."""
    planned, paths = frozenset(document.differentiated), captured.paths
    if not planned <= set(range(len(paths))):
        raise PlanError(f"{path} was made for other arguments: $.differentiated names more than there are. Plan again.")
    if argnums is not None and captured.differentiated != planned:
        names = ", ".join(paths[k] for k in sorted(planned))
        gradients, others = (f"for gradients of {names}", "others") if planned else ("without gradients", "some")
        raise PlanError(
            f"{path} was planned {gradients}, but argnums={argnums!r} names {others}: leave argnums= out, or plan again with"
            " unity.optimize."
        )
    return replace(captured, differentiated=planned)


def restore(
    path: str | Path, document: PlanDocument, captured: Captured, fn: Callable[..., Any], library: Callable[[], Library]
) -> tuple[PlanFamily, Candidate]:
    """Return the family and the point of a plan from its document, for the function as captured again."""
    machine, transformations = document.machine, tuple[Transformation, ...]()
    for k, record in enumerate(document.transformations):
        with reading(path, f".transformations[{k}]"):
            transformations = (*transformations, record.apply(TransformationSource(captured, transformations, machine, library)))
    program = transformed(captured, transformations)
    with reading(path):
        chosen, *known = candidates(program.graph, machine.axes, document)
    with reading(path, ".constraints"):
        bound = constraints.restored(document.constraints, program, fn)
    search = Search(program.graph, program.differentiated, machine, document.training.planned, restrict=bound)
    family = PlanFamily(
        fn,
        captured,
        search,
        document.seconds,
        known=tuple(known),
        known_exact=document.exact,
        known_whole=document.whole,
        transformations=transformations,
        applications=document.applications,
        bound=bound,
        limit=math.inf if document.limit is None else document.limit,
        interrupted=document.interrupted,
        may_overlap=document.may_overlap,
    )
    return family, chosen
