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
        matching, loops = library.matching(pattern), library.matching_loops(pattern)
        if library.names and not (matching or loops):
            near = difflib.get_close_matches(pattern, library.names, 3)
            hint = f"; the nearest are {', '.join(near)}" if near else ""
            raise ConstraintError(f'no rule of the library is named "{pattern}"{hint} (docs: constraints#rules)')
        excluded.update(entry.rule.name for entry in matching)
        excluded.update(rule.name for rule in loops)
    if not excluded:
        return library
    entries = tuple(e for e in library.entries if e.rule.name not in excluded)
    return replace(library, entries=entries, loops=tuple(rule for rule in library.loops if rule.name not in excluded))
