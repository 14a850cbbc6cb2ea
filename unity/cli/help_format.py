"""The layout of help texts, and a parser of command lines whose errors link to the documentation."""

from __future__ import annotations

import argparse
import textwrap
from typing import NoReturn


class HelpFormatter(argparse.HelpFormatter):
    """A formatter that wraps prose to the terminal's width and leaves indented lines, such as examples, as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = (line if line.startswith(" ") else textwrap.fill(line, width) for line in text.splitlines())
        return "\n".join(indent + line for line in lines)

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        self._indent()  # subcommands are indented, which argparse ignores when it looks for the longest name
        for subcommand in self._iter_indented_subactions(action):
            self._action_max_length = max(self._action_max_length, len(subcommand.dest) + self._current_indent)
        self._dedent()


class UnityParser(argparse.ArgumentParser):
    """The parser of a command line, and of the commands below it."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and where the documentation is, and exit."""
        super().error(f"{message} (docs: command-line)")
