"""Rules that the user's constraints exclude from the library (`unity.without_rules`)."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatchcase

from unity.base.errors import ConstraintError
from unity.constraints.kinds import Constraint, WithoutRules
from unity.substitutions.language.library import Library


def without(library: Library, constraints: Iterable[Constraint]) -> Library:
    """Return a library without the rules that constraints exclude. Raises ConstraintError for a name that matches no rule."""
    for pattern in (n for c in constraints if isinstance(c, WithoutRules) for n in c.names):
        excluded = {entry.hash for entry in library.entries if any(fnmatchcase(name, pattern) for name in entry.names)}
        if library.entries and not excluded:
            names = [entry.rule.name for entry in library.entries]
            near = difflib.get_close_matches(pattern, names, 3)
            hint = f"; the nearest are {', '.join(near)}" if near else ""
            raise ConstraintError(f'no rule of the library is named "{pattern}"{hint} (docs: constraints#rules)')
        library = replace(library, entries=tuple(e for e in library.entries if e.hash not in excluded))
    return library
