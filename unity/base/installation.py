"""What is installed: the package's version, its folder, and the files that come with it."""

from pathlib import Path

VERSION = "0.1.0"
PACKAGE = Path(__file__).resolve().parents[1]


def data_folder(name: str) -> Path:
    """A folder that comes with the package, such as `rules`: inside of an installed one, beside one that is worked on."""
    inside = PACKAGE / name
    return inside if inside.is_dir() else PACKAGE.parent / name
