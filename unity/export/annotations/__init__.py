"""The user's source with a plan's sharding constraints written in."""

from unity.export.annotations.annotation import Annotation, Unannotated, annotate

__all__ = ["Annotation", "Unannotated", "annotate"]
