"""Libraries of rules as JSON files: sorted, diffable, free of code. Loading refuses rules that were changed or are not proved."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unity.base.atomic_files import write
from unity.base.errors import RuleError
from unity.substitutions.language.rule import Rule, content_hash
from unity.substitutions.language.text import parse_rule, print_body

SCHEMA = 1


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
    """

    rule: Rule
    axioms: tuple[str, ...] = ()
    work: int = 0
    instances: int = 0
    found: Mapping[str, Any] = field(default_factory=dict)
    status: str = "proved"

    @property
    def hash(self) -> str:
        """The hash of the rule's text, which identifies the rule."""
        return content_hash(print_body(self.rule))

    def to_json(self) -> dict[str, Any]:
        """Return JSON data."""
        return {
            "name": self.rule.name,
            "rule": print_body(self.rule),
            "hash": self.hash,
            "status": self.status,
            "axioms": list(self.axioms),
            "work": self.work,
            "instances": self.instances,
            "found": dict(self.found),
        }


@dataclass(frozen=True)
class Library:
    """Rules with their records, and figures about the run that generated them (`made`)."""

    entries: tuple[LibraryEntry, ...]
    made: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def rules(self) -> tuple[Rule, ...]:
        return tuple(e.rule for e in self.entries)

    def __getitem__(self, name: str) -> LibraryEntry:
        for entry in self.entries:
            if entry.rule.name == name:
                return entry
        raise RuleError(f"the library has no rule {name}")

    def save(self, path: str | Path) -> None:
        """Write the library to a file atomically, sorted by name."""
        entries = sorted(self.entries, key=lambda e: e.rule.name)
        lines = ",\n".join("  " + json.dumps(e.to_json(), ensure_ascii=False) for e in entries)
        figures = json.dumps(dict(self.made), ensure_ascii=False)
        write(Path(path), f'{{\n "schema": {SCHEMA},\n "made": {figures},\n "rules": [\n{lines}\n ]\n}}\n')


def load(path: str | Path) -> Library:
    """Read a library. Raises RuleError, naming the rule, if a rule was changed, is not proved, or cannot be parsed."""
    try:
        data = json.loads(Path(path).read_text())
    except (OSError, ValueError) as problem:
        raise RuleError(f"{path}: {problem}") from None
    if not isinstance(data, dict) or not isinstance(data.get("rules"), list):
        raise RuleError(f"{path}: not a library of rules")
    if data.get("schema") != SCHEMA:
        raise RuleError(f"{path}: has schema {data.get('schema')}, and this version reads schema {SCHEMA}")
    return Library(tuple(_entry(path, item) for item in data["rules"]), data.get("made", {}))


def _entry(path: str | Path, item: Any) -> LibraryEntry:
    try:
        name, text = str(item["name"]), str(item["rule"])
        axioms, work, instances = tuple(map(str, item["axioms"])), int(item["work"]), int(item["instances"])
        origin, status, hash_ = dict(item["found"]), str(item["status"]), str(item["hash"])
    except (KeyError, TypeError, ValueError) as problem:
        raise RuleError(f"{path}: an entry lacks {problem}") from None
    if content_hash(text) != hash_:
        raise RuleError(f"{path}: rule {name} was changed after it was proved: its hash is not {hash_}. Verify the library again")
    if status != "proved":
        raise RuleError(f"{path}: rule {name} is {status}, not proved")
    try:
        rule = parse_rule(f"{name} {text}")
    except RuleError as problem:
        raise RuleError(f"{path}: rule {name}: {problem}") from None
    return LibraryEntry(rule, axioms, work, instances, origin, status)


def merged(libraries: Iterable[Library]) -> Library:
    """Return one library of the rules of several. Raises RuleError if two rules have one name."""
    entries: dict[str, LibraryEntry] = {}
    for library in libraries:
        for entry in library.entries:
            if entry.rule.name in entries:
                raise RuleError(f"two libraries have a rule {entry.rule.name}")
            entries[entry.rule.name] = entry
    return Library(tuple(entries[name] for name in sorted(entries)))
