"""Padding of dimensions that the devices do not divide: the padded program, its transformation, and the choice of sizes."""

from unity.transforms.padding.choose import best
from unity.transforms.padding.padding import Padding, PaddingRecord, padding

__all__ = ["Padding", "PaddingRecord", "best", "padding"]
