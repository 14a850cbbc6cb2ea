"""Plans as files of plain JAX: no trace of this library is left in them."""

from unity.export.errors import ExportError
from unity.export.file import source, write

__all__ = ["ExportError", "source", "write"]
