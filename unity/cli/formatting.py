"""How help is laid out."""

from __future__ import annotations

import argparse
import textwrap
from typing import NoReturn


class Lines(argparse.HelpFormatter):
    """Breaks prose where the terminal ends, and leaves what is indented as it is: examples are there to be copied."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = (line if line.startswith(" ") else textwrap.fill(line, width) for line in text.splitlines())
        return "\n".join(indent + line for line in lines)

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        self._indent()  # commands are, which argparse forgets when it looks for the longest name
        for below in self._iter_indented_subactions(action):
            self._action_max_length = max(self._action_max_length, len(below.dest) + self._current_indent)
        self._dedent()


class Parser(argparse.ArgumentParser):
    """Reads a command line. (The commands below are read by others of its kind.)"""

    def error(self, message: str) -> NoReturn:
        """Says what is wrong, and where more is said, and ends."""
        super().error(f"{message} (docs: command-line)")
