"""Errors as one line for people and one exit code for scripts.

0  done
1  it failed: the server refused it, or a run, a check or a file did
2  usage: the command line itself is wrong
3  not signed in, or the key may not do this
4  the server, or its object store, cannot be reached
130  interrupted by Ctrl-C
"""

from __future__ import annotations


class CliError(Exception):
    """An error whose message is one line that says what to do."""

    exit_code = 1


class UsageError(CliError):
    """The command line asks for something that makes no sense."""

    exit_code = 2


class NotSignedIn(CliError):
    """There is no key, the server does not know it, or it may not do this."""

    exit_code = 3


class Unreachable(CliError):
    """Nobody answers at the address, or the server there is not Lorikeet."""

    exit_code = 4


class Interrupted(CliError):
    """The person pressed Ctrl-C; the message says what is kept."""

    exit_code = 130


class ApiError(CliError):
    """The server's answer is an error."""

    def __init__(self, message: str, *, status: int, code: str | None, param: str | None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


class Forbidden(ApiError):
    """The server answers 401 or 403."""

    exit_code = NotSignedIn.exit_code
