"""The installed package: its version, its folder, and the data that comes with it."""

from pathlib import Path

VERSION = "0.1.0"
PACKAGE = Path(__file__).resolve().parents[1]


def data_folder(name: str) -> Path:
    """Return a folder of data, such as `rules`: it lies inside of an installed package, and beside one in a checkout."""
    inside = PACKAGE / name
    return inside if inside.is_dir() else PACKAGE.parent / name
