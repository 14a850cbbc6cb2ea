"""Explanations of a plan: its decisions as tables, and what each costs beside its alternatives."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from unity.plan.face.former_names import former_member

if not TYPE_CHECKING:  # former names are no attributes to a type checker

    def __getattr__(name: str) -> Any:
        if name == "blocked":
            import_module("unity.explain.tables")  # which defines its present form
        return former_member(sys.modules[__name__], "unity.explain", name)
