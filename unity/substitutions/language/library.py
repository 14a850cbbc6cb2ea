"""Libraries of rules as JSON files: sorted, diffable, free of code. Loading refuses rules that were changed or are not proved."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from unity.base.atomic_files import write
from unity.base.documents import LIBRARY, Record, document_kind, parsed, plain, typed
from unity.base.errors import PlanFileError, RuleError, file_fault
from unity.substitutions.language.loop_rules import LOOP_RULES, LoopRule
from unity.substitutions.language.rule import Rule, content_hash
from unity.substitutions.language.text import parse_rule, print_body

SCHEMA = 1


class LibraryRow(Record):
    """A `LibraryEntry` in a file, with the hash of its text."""

    name: str
    rule: str
    hash: str
    status: str
    axioms: tuple[str, ...]
    work: int
    instances: int
    found: dict[str, Any]
    reason: str = ""
    pays: str = ""
    former: str = ""


class LibraryDocument(Record):
    """A `Library` in a file."""

    schema: int
    rules: tuple[LibraryRow, ...]
    made: dict[str, Any] = msgspec.field(default_factory=dict)
    loops: tuple[str, ...] = ()


@dataclass(frozen=True)
class LibraryEntry:
    """A rule of a library, with the record of its proof and its origin.

    Attributes:
        rule: the rule.
        axioms: the axioms that the proof uses.
        work: the work of the first-order proof in Z3's own count, which does not depend on the machine, unlike seconds.
        instances: the number of instances that were executed symbolically.
        found: the origin of the rule, such as its family.
        status: "proved", or why not.
        reason: a sentence for people that says why the two sides are equal, or what the rule is good for.
        pays: the models or machines on which it pays, in a few words.
        former: the name that the generator makes of its operators, by which earlier files refer to it; empty if that is its name.
    """

    rule: Rule
    axioms: tuple[str, ...] = ()
    work: int = 0
    instances: int = 0
    found: Mapping[str, Any] = field(default_factory=dict)
    status: str = "proved"
    reason: str = ""
    pays: str = ""
    former: str = ""

    @property
    def generated_name(self) -> str:
        """The name that the generator makes of the rule's operators, by which libraries are sorted."""
        return self.former or self.rule.name

    @property
    def hash(self) -> str:
        """The hash of the rule's text, which identifies the rule."""
        return content_hash(print_body(self.rule))

    def to_json(self) -> dict[str, Any]:
        """Return JSON data."""
        numbers, words = (self.axioms, self.work, self.instances), (self.reason, self.pays, self.former)
        row = LibraryRow(self.rule.name, print_body(self.rule), self.hash, self.status, *numbers, dict(self.found), *words)
        return {name: value for name, value in plain(row).items() if value != ""}


@dataclass(frozen=True)
class Library:
    """Rules with their records, figures about the run that generated them (`made`), and rules of loops."""

    entries: tuple[LibraryEntry, ...]
    made: Mapping[str, Any] = field(default_factory=dict)
    loops: tuple[LoopRule, ...] = ()

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def names(self) -> list[str]:
        """The names of all rules."""
        return [*(e.rule.name for e in self.entries), *(rule.name for rule in self.loops)]

    @property
    def rules(self) -> tuple[Rule, ...]:
        return tuple(e.rule for e in self.entries)

    def __getitem__(self, name: str) -> LibraryEntry:
        entry = self.find(name)
        if entry is None:
            raise RuleError(f"the library has no rule {name}")
        return entry

    def find(self, name: str) -> LibraryEntry | None:
        """Return the rule with a name, or else the rule that had it formerly; None if the library has neither."""
        return self._by_name.get(name)

    def matching(self, pattern: str) -> list[LibraryEntry]:
        """Return the rules whose names match a pattern of `fnmatch` or, if there are none, those whose former names do."""
        named = [entry for entry in self.entries if fnmatchcase(entry.rule.name, pattern)]
        return named or [entry for entry in self.entries if fnmatchcase(entry.former, pattern)]

    def matching_loops(self, pattern: str) -> list[LoopRule]:
        """Return the rules of loops whose names match a pattern of `fnmatch`."""
        return [rule for rule in self.loops if fnmatchcase(rule.name, pattern)]

    @cached_property
    def _by_name(self) -> Mapping[str, LibraryEntry]:
        return {e.former: e for e in self.entries if e.former} | {e.rule.name: e for e in self.entries}

    def present_name(self, name: str) -> str:
        """Return the name of the rule that has or had a name; a name that the library does not know stays as it is."""
        entry = self.find(name)
        return name if entry is None else entry.rule.name

    def named_as(self, known: Library) -> Library:
        """Return these rules with the names, reasons and former names that they have in another library, and its rules of loops."""
        named = {e.hash: e for e in known.entries if e.former}
        entries = tuple(_renamed(e, named[e.hash]) if e.hash in named else e for e in self.entries)
        return replace(self, entries=entries, loops=known.loops)

    def save(self, path: str | Path) -> None:
        """Write the library to a file atomically, sorted by generated names, so that a better name moves no rule."""
        entries = sorted(self.entries, key=lambda e: e.generated_name)
        lines = ",\n".join("  " + json.dumps(e.to_json(), ensure_ascii=False) for e in entries)
        figures = json.dumps(dict(self.made), ensure_ascii=False)
        loops = f' "loops": {json.dumps([rule.name for rule in self.loops])},\n' if self.loops else ""
        write(Path(path), f'{{\n "schema": {SCHEMA},\n "made": {figures},\n{loops} "rules": [\n{lines}\n ]\n}}\n')


def load(path: str | Path) -> Library:
    """Read a library. Raises RuleError, naming the rule, if a rule was changed, is not proved, or cannot be parsed."""
    try:
        data = parsed(Path(path).read_bytes())
        if (kind := document_kind(data)) not in ("", LIBRARY):
            raise RuleError(f"{path} is {kind}, not {LIBRARY}")
        document = typed(data, LibraryDocument)
    except (OSError, PlanFileError) as problem:
        raise RuleError(f"{path} cannot be read: {file_fault(problem)}") from None
    if document.schema != SCHEMA:
        raise RuleError(f"{path}: has schema {document.schema}, and this version reads schema {SCHEMA}")
    unknown = [name for name in document.loops if name not in LOOP_RULES]
    if unknown:
        raise RuleError(f"{path}: this version of unity has no rule of loops called {', '.join(unknown)}")
    loops = tuple(LOOP_RULES[name] for name in document.loops)
    return Library(tuple(_entry(path, row) for row in document.rules), document.made, loops)


def _entry(path: str | Path, row: LibraryRow) -> LibraryEntry:
    name = row.name
    if content_hash(row.rule) != row.hash:
        reason = f"its hash is not {row.hash}. Verify the library again"
        raise RuleError(f"{path}: rule {name} was changed after it was proved: {reason}")
    if row.status != "proved":
        raise RuleError(f"{path}: rule {name} is {row.status}, not proved")
    try:
        rule = parse_rule(f"{name} {row.rule}")
    except RuleError as problem:
        raise RuleError(f"{path}: rule {name}: {problem}") from None
    return LibraryEntry(rule, row.axioms, row.work, row.instances, row.found, row.status, row.reason, row.pays, row.former)


def _renamed(entry: LibraryEntry, known: LibraryEntry) -> LibraryEntry:
    """Return an entry with the name, the reason and the former name of a known one of the same rule."""
    rule = replace(entry.rule, name=known.rule.name)
    return replace(entry, rule=rule, reason=known.reason, pays=known.pays, former=known.former)


def merged(libraries: Iterable[Library]) -> Library:
    """Return one library of the rules of several. Raises RuleError if two rules of graphs have one name."""
    entries: dict[str, LibraryEntry] = {}
    loops: dict[str, LoopRule] = {}
    for library in libraries:
        loops |= {rule.name: rule for rule in library.loops}
        for entry in library.entries:
            if entry.rule.name in entries:
                raise RuleError(f"two libraries have a rule {entry.rule.name}")
            entries[entry.rule.name] = entry
    return Library(tuple(sorted(entries.values(), key=lambda e: e.generated_name)), loops=tuple(loops.values()))
