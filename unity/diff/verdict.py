"""A verdict on a change of a model: the growth of a step's time and memory, its causes by line, and whether limits admit it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from math import inf, prod
from typing import Any

from unity.base.documents import plain
from unity.base.errors import PlanError
from unity.base.formatting import duration, size, with_article
from unity.diff.comparison import PlanComparison
from unity.diff.document import UNMARKED, Document, DocumentRow, DocumentTable, cut
from unity.diff.edits import VERBS, Edit
from unity.diff.formats import html, markdown, text
from unity.diff.regions import CostChange
from unity.pcg.parallel.traffic import BACKWARD
from unity.pcg.types.axis import LevelPart
from unity.plan.summary import HOST_TRANSFER, Summary
from unity.plan.warnings import PlanWarning

SCHEMA = 1
FORMATS = ("text", "markdown", "json", "html")
MAX_EDITS = 2  # differences of one line that are named
MAX_CAUSES = 10  # causes in a text; JSON has all
WORTH_NAMING = 0.01  # of the largest cause
COLLECTIVE_VERBS = {
    "all-gather": "gathers",
    "all-reduce": "adds up",
    "reduce-scatter": "adds up and scatters",
    "all-to-all": "exchanges",
    "collective-permute": "passes on",
    HOST_TRANSFER: "offloads",
}


@dataclass(frozen=True)
class GrowthLimits:
    """The growth that is admitted.

    Attributes:
        slower: the growth of a step's time, as a part of the time before (0.05 is 5 %); None admits any.
        larger: the growth of the memory on each device, likewise.
        strict: whether new warnings are refused.
    """

    slower: float | None = None
    larger: float | None = None
    strict: bool = False


@dataclass(frozen=True)
class LimitedFigure:
    """The time of a step or the memory on each device, before and after, and the growth that is admitted."""

    cost: CostChange
    limit: float | None

    @property
    def growth(self) -> float:
        """The growth as a part of the figure before, negative if the figure shrank."""
        before, after = self.cost.before, self.cost.after
        return 0.0 if self.cost.same else after / before - 1 if before else inf

    @property
    def exceeded(self) -> bool:
        """Whether the growth is more than admitted."""
        return self.limit is not None and self.growth > self.limit

    def to_json(self) -> dict[str, Any]:
        """Return data for other tools."""
        return {**asdict(self.cost), "growth": self.growth, "limit": self.limit, "exceeded": self.exceeded}


@dataclass(frozen=True)
class Cause:
    """A cause of growth: the user's line, the difference in words, and the seconds or bytes by which a step grows there."""

    line: str
    text: str
    amount: float


@dataclass(frozen=True, eq=False)
class ChangeVerdict:
    """A verdict on the difference of two plans."""

    diff: PlanComparison
    limits: GrowthLimits

    def __post_init__(self) -> None:
        if not (self.diff.before.machine and self.diff.after.machine):
            raise PlanError("graphs have no costs to compare: expected two plans that plan.files.save wrote (docs: ci)")

    @property
    def accepted(self) -> bool:
        """Whether the change is within its limits."""
        return not (self.time.exceeded or self.memory.exceeded or (self.limits.strict and self.new_warnings))

    @property
    def time(self) -> LimitedFigure:
        """Seconds of a step."""
        return LimitedFigure(CostChange(self.diff.before.time, self.diff.after.time), self.limits.slower)

    @property
    def memory(self) -> LimitedFigure:
        """Bytes on each device."""
        return LimitedFigure(CostChange(self.diff.before.memory, self.diff.after.memory), self.limits.larger)

    @cached_property
    def time_causes(self) -> tuple[Cause, ...]:
        """The lines at which a step takes more or less time, the largest change first, in seconds."""
        return _sorted((*_computing(self.diff), *_communicating(self.diff)))

    @cached_property
    def memory_causes(self) -> tuple[Cause, ...]:
        """The lines whose live memory at the peak differs, the largest change first, in bytes."""
        return _sorted(_live(self.diff.renumbered, self.diff.after))

    @cached_property
    def new_warnings(self) -> tuple[PlanWarning, ...]:
        """The warnings about the second plan that the first does not have."""
        known = set(map(_key, self.diff.renumbered.warnings))
        return tuple(w for w in self.diff.after.warnings if _key(w) not in known)

    @property
    def sentence(self) -> str:
        """The verdict in one sentence, with the first difference of the programs, or else the lines that do most of it."""
        growth, more = self.time.growth, self.memory.cost.after - self.memory.cost.before
        first = self.diff.first
        causes = (self.time_causes, self.memory_causes) if first is None else ((), ())
        time = _in_words(growth, f"{abs(growth):.1%}", ("slower", "faster", "as fast as before"), causes[0])
        memory = _in_words(self.memory.growth, size(abs(more)), ("larger", "smaller", "as large as before"), causes[1])
        if first is not None:
            return f"this change makes a step {time} and {memory}. First difference: {first}"
        return f"this change makes a step {time}{';' if ':' in time else ''} and {memory}"

    @cached_property
    def document(self) -> Document:
        """The verdict as a title and tables."""
        before, after = self.diff.before, self.diff.after
        on = after.machine if before.machine == after.machine else f"{after.machine}, before on {before.machine}"
        tables = (self._figures(), *self._causes(), self._warnings())
        return Document(f"{after.name} on {on}: {self.sentence}", tuple(t for t in tables if t.rows))

    def _figures(self) -> DocumentTable:
        rows = _figure_row("one step", self.time, duration), _figure_row("memory on each device", self.memory, size)
        columns = ("predicted", "before", "after", "growth", "limit", "")
        return DocumentTable("accepted" if self.accepted else "refused", columns, rows)

    def _causes(self) -> Iterator[DocumentTable]:
        for title, causes, form in (("time", self.time_causes, duration), ("memory", self.memory_causes, size)):
            shown = [c for c in causes if abs(c.amount) > WORTH_NAMING * abs(causes[0].amount)]
            rows = [DocumentRow(UNMARKED, (_signed(c.amount, form), c.line or "(no line)", c.text)) for c in shown]
            yield DocumentTable(title, ("", "line", "what is different"), cut(rows, "lines", MAX_CAUSES))

    def _warnings(self) -> DocumentTable:
        rows = [DocumentRow(UNMARKED, (w.line or "(no line)", w.text)) for w in self.new_warnings]
        known = len(self.diff.after.warnings) - len(rows)
        more = f" (and {known} as before)" if known else ""
        return DocumentTable(f"new warnings{more}", ("line", "warning"), cut(rows, "warnings"))

    def __str__(self) -> str:
        return text.plain(self.document)

    __repr__ = __str__

    def show(self, file: Any = None) -> None:
        """Print the verdict."""
        text.show(self.document, file)

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as data for other tools, with all causes."""
        sides = {"before": self.diff.before, "after": self.diff.after}
        new = set(map(_key, self.new_warnings))
        return {
            "unity": "verdict",
            "schema": SCHEMA,
            "accepted": self.accepted,
            "sentence": self.sentence,
            "first_difference": None if self.diff.first is None else asdict(self.diff.first),
            **{k: {"name": s.name, "machine": s.machine, "devices": s.devices} for k, s in sides.items()},
            "time": self.time.to_json(),
            "memory": self.memory.to_json(),
            "time_causes": [asdict(c) for c in self.time_causes],
            "memory_causes": [asdict(c) for c in self.memory_causes],
            "warnings": [{**plain(w), "new": _key(w) in new} for w in self.diff.after.warnings],
        }

    def formatted(self, form: str) -> str:
        """Return the verdict in one of `FORMATS`, as the text of a file. Raises PlanError for any other."""
        if form not in FORMATS:
            raise PlanError(f"{form!r} is no format of a verdict: expected one of {', '.join(FORMATS)}")
        writers = {"text": text.plain, "markdown": markdown.markdown, "html": html.html}
        written = json.dumps(self.to_json(), indent=1) if form == "json" else writers[form](self.document)
        return written if written.endswith("\n") else written + "\n"


def _key(w: PlanWarning) -> tuple[str, str, str]:
    return w.topic, w.line, w.subject


def _in_words(growth: float, amount: str, words: tuple[str, str, str], causes: Sequence[Cause]) -> str:
    """Return a growth in words, with the main cause if it is positive. `words` are for more, less, and the same."""
    if growth <= 0:
        return f"{amount} {words[1]}" if growth else words[2]
    main = next((f": {c.line} {c.text}" for c in causes if c.amount > 0), "")
    return f"{amount} {words[0]}{main}"


def _signed(amount: float, form: Callable[[float], str]) -> str:
    return f"{'+' if amount > 0 else '−'}{form(abs(amount))}"


def _figure_row(what: str, figure: LimitedFigure, form: Callable[[float], str]) -> DocumentRow:
    limit = "" if figure.limit is None else f"{figure.limit:.1%}"
    cells = what, form(figure.cost.before), form(figure.cost.after), f"{figure.growth:+.1%}", limit
    return DocumentRow(UNMARKED, (*cells, "exceeded" if figure.exceeded else ""))


def _sorted(causes: Iterable[Cause]) -> tuple[Cause, ...]:
    return tuple(sorted(causes, key=lambda c: -abs(c.amount)))


def _computing(diff: PlanComparison) -> Iterator[Cause]:
    """Yield the lines that compute more or less."""
    for region in diff.regions:
        if not region.computing.same:
            words = list(dict.fromkeys(_edit_in_words(e) for e, _ in region.edits if e.topic != "change"))
            more = [f"and {len(words) - MAX_EDITS} more"] if len(words) > MAX_EDITS else []
            what = "; ".join((*_rules_in_words(diff, region.line), *words[:MAX_EDITS], *more))
            yield Cause(region.line, what or "computes another part", region.computing.after - region.computing.before)


def _rules_in_words(diff: PlanComparison, line: str) -> Iterator[str]:
    """Yield the rules that rewrote a line of only one program, and so made operators that its source does not have."""
    before, after = ({use.rule for use in side.rules if line in use.lines} for side in (diff.renumbered, diff.shown[1]))
    yield from (f"now rewritten by {rule}" for rule in sorted(after - before))
    yield from (f"no longer rewritten by {rule}" for rule in sorted(before - after))


def _edit_in_words(edit: Edit) -> str:
    return f"{VERBS[edit.mark]} {edit.kind}" if edit.mark in VERBS else f"{edit.kind}: {edit.what}"


@dataclass(frozen=True)
class _Traffic:
    """Equal collectives of one line in a step: their seconds and bytes, and the devices that they run over."""

    seconds: float = 0.0
    nbytes: float = 0.0
    over: str = ""


_Place = tuple[str, str, str]  # the user's line, XLA's name of a collective, and what it moves


def _communicating(diff: PlanComparison) -> Iterator[Cause]:
    """Yield the lines that communicate more or less, by the kind of collective and what it moves."""
    before, after = _traffic(diff.renumbered), _traffic(diff.shown[1])
    for place in dict.fromkeys((*after, *before)):
        old, new = before.get(place, _Traffic()), after.get(place, _Traffic())
        if not CostChange(old.seconds, new.seconds).same:
            line, kind, what = place
            yield Cause(line, _traffic_in_words(kind, what, old, new), new.seconds - old.seconds)


def _traffic_in_words(kind: str, what: str, old: _Traffic, new: _Traffic) -> str:
    verb = COLLECTIVE_VERBS.get(kind, f"runs {with_article(kind)} of")
    if not new.seconds:
        return f"no longer {verb} {what} ({kind} of {size(old.nbytes)})"
    if not old.seconds:
        return f"now {verb} {what} ({kind} of {size(new.nbytes)} over {new.over})"
    return f"{verb} {what} otherwise ({kind} of {size(new.nbytes)} over {new.over}, was {size(old.nbytes)} over {old.over})"


def _traffic(summary: Summary) -> Mapping[_Place, _Traffic]:
    """Return the collectives of a step, those of an argument at the line that uses it."""
    axes = summary.graph.axes
    sizes = {axis.name: axis.size for axis in axes} | {axis.whole: axis.whole_size for axis in axes if isinstance(axis, LevelPart)}
    places: dict[_Place, _Traffic] = {}
    for t in summary.talk:
        is_backward = t.why.startswith(BACKWARD)
        place = t.use, t.kind, f"the gradient of {t.value}" if is_backward else t.value
        count = prod(sizes.get(name, 1) for name in t.over.split("·"))
        over = f"all {count} devices" if count == summary.devices else f"{t.over} ({count} of {summary.devices} devices)"
        over = "the link to the host" if t.kind == HOST_TRANSFER else over
        known = places.get(place, _Traffic())
        places[place] = _Traffic(known.seconds + t.seconds, known.nbytes + t.count * t.nbytes, over)
    return places


def _live(before: Summary, after: Summary) -> Iterator[Cause]:
    """Yield the lines whose live memory differs, by the reason for which it is live."""
    sides = [{(b.line, b.kind, b.why): b.nbytes for b in side.live} for side in (before, after)]
    for line, kind, why in dict.fromkeys((*sides[1], *sides[0])):
        nbytes = CostChange(*(side.get((line, kind, why), 0.0) for side in sides))
        if not nbytes.same:
            what = why if kind == "input" else f"{kind}: {why}"
            yield Cause(line, what, nbytes.after - nbytes.before)
