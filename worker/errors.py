"""Errors that the worker answers with an error code."""

from __future__ import annotations

from contract.messages.protocol import ErrorCode


class Refused(Exception):
    """The job cannot be run; `param` is the field of the job that is wrong."""

    def __init__(self, code: ErrorCode, message: str, param: str | None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
