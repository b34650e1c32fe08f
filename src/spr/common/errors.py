"""Owns messages to the user: the exceptions that say what was wrong, and how names from files are shown."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Wrong input. The command line prints it as one line and exits with code 2; nothing has been written."""


class Fault(Exception):  # noqa: N818 - of the world, not of ours
    """Something outside failed while a command was at work. It is printed as one line, and the exit code is 1."""


class StorageFault(Fault):
    """Files can't be written any more: a full disk, a folder that was deleted."""


class EnvironmentFault(Fault):
    """An environment failed while it was played: which of those that step together, and a message to the user."""

    def __init__(self, place: int, message: str) -> None:
        super().__init__(message)
        self.place = place


class UnusableError(Exception):
    """A file that can't be used, and why; its reader decides what to do."""


def visible(text: object) -> str:
    r"""Return a text as it may be shown in a terminal: a line in which nothing is obeyed.

    Names and paths come from files. Control characters, escapes, line breaks, marks that turn the direction of writing
    and what is no Unicode are written out, such as \x1b.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def one_line(error: BaseException) -> str:
    """Return what an error says, without line breaks."""
    return " ".join(str(error).split())


def shown(thing: object) -> str:
    """Return the beginning of a value in one line, for a message that refuses it."""
    return f"{' '.join(repr(thing).split()):.60}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the closest known word, or an empty string when nothing is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""


def plural(count: int, noun: str) -> str:
    """Return '1 game', '2 games'."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
