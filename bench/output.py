"""The commands' output: lines that fit 80 columns, progress on a terminal, files written whole or not at all."""

import argparse
import contextlib
import os
import sys
import textwrap
from pathlib import Path

WIDTH = 80


class Unwritable(OSError):
    """A file that could not be written; the message names it."""


def wrap(text: str, indent: str = "  ", first: str = "") -> str:
    """The text in lines of at most 80 columns, those after the first one indented. No word is broken: one longer than a
    line is a path, to be copied."""
    wrapper = textwrap.TextWrapper(WIDTH, first, indent, break_long_words=False, break_on_hyphens=False)
    return wrapper.fill(text)


def say(text: str = "") -> None:
    """Print at once, above the progress bar if there is one."""
    if (tqdm := sys.modules.get("tqdm")) is not None:
        tqdm.tqdm.write(text)
    else:
        print(text)
    sys.stdout.flush()


def define(name: str, text: str, column: int = 14) -> None:
    """Print a name with its text wrapped beside it."""
    # The name goes into `first`, whose spaces are kept; those of the text are not.
    say(wrap(text, indent=" " * (column + 2), first=f"  {name:<{column - 1}} "))


class Progress:
    """A bar with the time left where stderr is a terminal and tqdm is installed; else nothing."""

    def __init__(self, total: int, unit: str) -> None:
        self._bar = None
        with contextlib.suppress(ImportError):
            from tqdm import tqdm

            tqdm.monitor_interval = 0  # no thread of tqdm's runs beside what is timed
            # The note last: where the terminal is narrow, tqdm cuts the end off.
            form = f"{{n_fmt}}/{{total_fmt}} {unit} |{{bar:10}}| {{elapsed}}, {{remaining}} left: {{desc}}"
            self._bar = tqdm(total=total, bar_format=form, disable=None, leave=False, dynamic_ncols=True)

    def note(self, text: str) -> None:
        """Show what happens now."""
        if self._bar is not None:
            self._bar.set_description_str(text)

    def step(self) -> None:
        if self._bar is not None:
            self._bar.update()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def check_writable(parser: argparse.ArgumentParser, option: str, path: Path) -> None:
    """A usage error where `write_text` could not write this file; makes its folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_other = path.exists() and not path.is_file()
        _partial(path).exists()  # whose name is longer
    except OSError as failure:  # a name of 250 characters too
        parser.error(f"argument {option}: {path}: {failure.strerror}")
    if is_other:  # /dev/full would be replaced
        parser.error(f"argument {option}: {path} is no regular file")
    if not os.access(path.parent, os.W_OK):
        parser.error(f"argument {option}: {path} cannot be written")


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all.

    Raises:
        Unwritable: the disk is full, or the folder gone.
    """
    write_bytes(path, text.encode(errors="backslashreplace"))  # names of files need not be UTF-8


def write_bytes(path: Path, content: bytes) -> None:
    """`write_text` for bytes."""
    partial = _partial(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content)
        partial.replace(path)
    except BaseException as failure:  # Ctrl-C too
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(failure, OSError):
            raise Unwritable(f"{path} was not written: {failure.strerror}") from None
        raise


def _partial(path: Path) -> Path:
    """Where a file is until all of it is written."""
    return path.with_name(path.name + ".partial")


def three_digits(value: float) -> str:
    """12.3 and 0.0123 and 1234: three digits, no exponent."""
    decimals = 0
    while decimals < 6 and value * 10**decimals < 100:
        decimals += 1
    return f"{value:.{decimals}f}"
