"""Export of plans as files of plain JAX, which do not import unity, and as the user's source with sharding constraints."""

from unity.base.errors import ExportError
from unity.export.annotations import Annotation, Unannotated, annotate
from unity.export.python_file import source, write

__all__ = ["Annotation", "ExportError", "Unannotated", "annotate", "source", "write"]
