"""Plans as files of plain JAX: no trace of this library is left in them."""

from unity.exporting.errors import ExportError
from unity.exporting.file import source, write

__all__ = ["ExportError", "source", "write"]
