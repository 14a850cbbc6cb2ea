"""The user's source with a plan's sharding constraints written in."""

from unity.export.annotations.annotation import Annotation, annotate
from unity.export.annotations.constraint_writer import Unannotated

__all__ = ["Annotation", "Unannotated", "annotate"]
