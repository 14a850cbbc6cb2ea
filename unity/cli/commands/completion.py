"""The command `unity completion bash | zsh`. It prints a static script, since starting Python at every key would take seconds."""

from __future__ import annotations

import argparse

from unity.cli.errors import CommandError

HELP = "print a script that completes commands in bash or zsh"
SHELLS = ("bash", "zsh")


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Describe `unity completion`."""
    command.set_defaults(run=run)
    command.description = "Prints a shell script that completes commands, options and files. Needs the extra `completion`."
    command.epilog = (
        "examples:\n"
        "  unity completion bash > ~/.local/share/bash-completion/completions/unity\n"
        '  unity completion zsh > "${fpath[1]}/_unity"'
    )
    command.add_argument("shell", choices=SHELLS)


def run(options: argparse.Namespace) -> int:
    """Print the script."""
    try:
        import shtab  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise CommandError("completion needs shtab: pip install 'unity-jax[completion]'") from None
    for action in _actions(options.top):
        if action.metavar in ("FILE", "A", "B", "PATH"):
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # as shtab wants it
    print(shtab.complete(options.top, options.shell))
    return 0


def _actions(command: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the arguments of a command and of all its subcommands."""
    actions = list(command._actions)
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            actions += [a for below in action.choices.values() for a in _actions(below)]
    return actions
