"""The axioms and the default library, read from `rules/`: beside the package in a checkout, inside it where it is installed."""

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
    """Return the folder of the rules. Raises RuleError if the installation lacks it."""
    rules = data_folder("rules")
    if (rules / "axioms.rules").exists():
        return rules
    raise RuleError(f"there is no rules/axioms.rules beside {PACKAGE}: the installation is incomplete")


@cache
def axioms() -> tuple[Rule, ...]:
    """Return the axioms that proofs of rules may use."""
    return parse_rules((folder() / "axioms.rules").read_text())


def library_path() -> Path:
    """Return the path of the default library."""
    return folder() / "library.json"


@cache
def default_digest() -> str:
    """Return a hash of the default library's file."""
    return hashlib.sha256(library_path().read_bytes()).hexdigest()


@cache
def default_library() -> Library:
    """Return the library that comes with unity."""
    return load(library_path())
