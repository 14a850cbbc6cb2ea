"""Rules that the user's constraints exclude from the library (`unity.without_rules`)."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import replace

from unity.base.errors import ConstraintError
from unity.constraints.kinds import Constraint, WithoutRules
from unity.substitutions.language.library import Library


def without(library: Library, constraints: Iterable[Constraint]) -> Library:
    """Return a library without the rules that constraints exclude. Raises ConstraintError for a name that matches no rule."""
    excluded = set[str]()
    for pattern in (n for c in constraints if isinstance(c, WithoutRules) for n in c.names):
        matching = library.matching(pattern)
        if library.entries and not matching:
            names = [entry.rule.name for entry in library.entries]
            near = difflib.get_close_matches(pattern, names, 3)
            hint = f"; the nearest are {', '.join(near)}" if near else ""
            raise ConstraintError(f'no rule of the library is named "{pattern}"{hint} (docs: constraints#rules)')
        excluded.update(entry.rule.name for entry in matching)
    return replace(library, entries=tuple(e for e in library.entries if e.rule.name not in excluded)) if excluded else library
