"""Export of plans as files of plain JAX, which do not import unity."""

from unity.base.errors import ExportError
from unity.export.python_file import source, write

__all__ = ["ExportError", "source", "write"]
