"""What is wanted of a program that is made anew, with a pipeline or with branches apart: its search, and what it should beat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from unity.pcg.capture.capture import Captured
from unity.search.session import Candidate, Search


@dataclass(frozen=True, eq=False)
class Wish:
    """`search` and `choose` give the best of a program, if any will do; it should beat `than`, if given."""

    search: Callable[[Captured], Search]
    choose: Callable[[Search], Candidate | None]
    worth: Callable[[Candidate], tuple[float, float]]  # what is to be small
    than: tuple[Search, Candidate] | None = None
    say: Callable[[str], None] = lambda stage: None
