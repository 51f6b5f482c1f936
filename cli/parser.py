"""The argument parser: errors in one line, help that shows defaults."""

import argparse
import os
import sys
from typing import NoReturn

USAGE_STATUS = 2  # The exit status of a command whose options are wrong.


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the description's lines, and has room for the longest options."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)


class Parser(argparse.ArgumentParser):
    """Takes options by their whole names only, so that a new option breaks no script."""

    def __init__(self, **settings: object) -> None:
        settings.setdefault("formatter_class", _HelpFormatter)
        super().__init__(allow_abbrev=False, **settings)  # type: ignore[arg-type]  # passed on

    def error(self, message: str) -> NoReturn:
        fail(self.prog, message)


def leave(status: int) -> NoReturn:
    """End this process at once, without Python's own exit.

    To take apart what a server has loaded takes half a second on a busy machine, and is of no
    use: everything that matters outside of the process has been closed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def fail(program: str, message: str, status: int = USAGE_STATUS) -> NoReturn:
    """Say what is wrong in one line on stderr, and exit."""
    print(f"{program}: {message}", file=sys.stderr, flush=True)
    raise SystemExit(status)
