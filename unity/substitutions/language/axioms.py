"""Where the axioms and the library lie: `rules/` beside the package in a checkout, inside it where it is installed."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from unity.base.errors import RuleError
from unity.base.installation import PACKAGE, data_folder
from unity.substitutions.language.library import Library, load
from unity.substitutions.language.rule import Rule
from unity.substitutions.language.text import parse_rules


@cache
def folder() -> Path:
    """The folder of the rules."""
    rules = data_folder("rules")
    if (rules / "axioms.rules").exists():
        return rules
    raise RuleError(f"there is no rules/axioms.rules beside {PACKAGE}: the installation is incomplete")


@cache
def axioms() -> tuple[Rule, ...]:
    """The axioms that proofs of rules may use."""
    return parse_rules((folder() / "axioms.rules").read_text())


def library_path() -> Path:
    """Where the default library is."""
    return folder() / "library.json"


@cache
def default_digest() -> str:
    """Stands for the content of the default library."""
    return hashlib.sha256(library_path().read_bytes()).hexdigest()


@cache
def default_library() -> Library:
    """The library that comes with unity."""
    return load(library_path())
