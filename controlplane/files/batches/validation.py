"""Check that every line of a batch's file is a request, in bounded memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from controlplane.errors import ApiError
from controlplane.files.batches import lines
from controlplane.files.batches.lines import Line, LineFault, parse_line
from controlplane.inference import access
from controlplane.inference.model_selector import ModelSelector
from controlplane.inference.service import new_request_id
from controlplane.tenants.auth import Principal

#: Number of faults after which the check ends.
MAX_FAULTS = 100

#: Largest number of refusals in memory.
_REFUSALS = 500

#: (the line's number, its line in the error file)
RefusedLine = tuple[int, str]


@dataclasses.dataclass(kw_only=True)
class Found:
    """The outcome of the check."""

    num_lines: int = 0
    models: set[str] = dataclasses.field(default_factory=set)
    #: As the batch's `errors` have them; without any, the batch is good.
    faults: list[dict[str, Any]] = dataclasses.field(default_factory=list)


def validate(
    raw_lines: Iterable[bytes],
    *,
    endpoint: str,
    principal: Principal,
    keep: Callable[[list[RefusedLine]], None],
) -> Found:
    """Check all lines; call it in a thread.

    A line that is not a request for this endpoint, or names a model that the key cannot use, is
    a fault, and the batch fails. A body that the live API would refuse is refused with the same
    answer, and the other lines are answered.

    keep  gets the refusals, some at a time
    """
    check = _Check(endpoint, principal, keep)
    found = check.found
    for number, raw in enumerate(raw_lines, start=1):
        is_empty = not raw.strip()
        found.num_lines += not is_empty
        if found.num_lines > lines.MAX_LINES or number > lines.MAX_RAW_LINES:
            message = f"The file has more than {lines.MAX_LINES} lines: split it."
            found.faults.append(LineFault("too_many_lines", message).told(number))
            break
        if is_empty:
            continue
        try:
            check.line(number, raw)
        except LineFault as fault:
            found.faults.append(fault.told(number))
        if len(found.faults) >= MAX_FAULTS:
            break
    check.flush()
    if found.num_lines == 0 and not found.faults:
        found.faults.append(LineFault("empty_file", "The file has no lines.").told(None))
    return found


class _Check:
    """The state of the check from line to line."""

    def __init__(
        self, endpoint: str, principal: Principal, keep: Callable[[list[RefusedLine]], None]
    ) -> None:
        self.found = Found()
        self._endpoint = endpoint
        self._principal = principal
        self._keep = keep
        self._refused: list[RefusedLine] = []
        self._custom_ids: set[str] = set()
        self._known: dict[ModelSelector, ApiError | None] = {}

    def line(self, number: int, raw: bytes) -> None:
        """Check one line. Raises LineFault."""
        line = parse_line(number, raw, self._endpoint)
        if line.custom_id in self._custom_ids:
            raise LineFault(
                "duplicate_custom_id",
                f"custom_id {line.custom_id!r} is used twice: each must be unique in the file.",
                "custom_id",
            )
        self._custom_ids.add(line.custom_id)
        self._request(line)

    def flush(self) -> None:
        if self._refused:
            self._keep(self._refused)
            self._refused = []

    def _request(self, line: Line) -> None:
        """Check a line's body and model. Raises LineFault for the model."""
        self.found.models.add(line.model)
        try:
            request = lines.parse_request(line, self._endpoint, self._principal.tenant.id)
        except ApiError as error:
            if line.model:
                self._check_named(ModelSelector.model(line.model))
            output = lines.error_line(line.custom_id, new_request_id(), error, self._endpoint)
            self._refused.append((line.number, output))
            if len(self._refused) >= _REFUSALS:
                self.flush()
            return
        self._check_named(request.body.selector())

    def _check_named(self, selector: ModelSelector) -> None:
        if selector not in self._known:
            self._known[selector] = self._look_up(selector)
        error = self._known[selector]
        if error is not None:
            raise LineFault(error.code or error.type, error.message, f"body.{error.param}")

    def _look_up(self, selector: ModelSelector) -> ApiError | None:
        try:
            access.resolve_now(self._principal, selector)
        except ApiError as error:
            if error.status >= 500:
                raise  # not the model's fault
            return error
        return None
