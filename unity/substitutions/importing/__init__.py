"""Import of released rules into this rule language, with a verdict on each: proved, refuted, or ill-typed and why."""

from unity.substitutions.importing.flexflow import import_flexflow
from unity.substitutions.importing.report import report
from unity.substitutions.importing.taso import import_taso
from unity.substitutions.importing.verdict import Counterexample, Imported, Verdict

__all__ = ["Counterexample", "Imported", "Verdict", "import_flexflow", "import_taso", "report"]
