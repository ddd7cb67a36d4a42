"""The errors of training runs.

    EngineError
    └── TrainingError            internal
        ├── RunRefused           invalid_request
        │   ├── RunUnsupported   invalid_request
        │   └── RunTooLarge      invalid_request
        └── RunDiverged          invalid_request

The right column is `code`, as in `engine.errors`.
"""

from __future__ import annotations

from engine.errors import EngineError


class TrainingError(EngineError):
    """The root of a run's errors; `param` names the field of the run that is at fault."""


class RunRefused(TrainingError):
    """The run, its rows or its starting adapter cannot be trained as they are given."""

    code = "invalid_request"


class RunUnsupported(RunRefused):
    """The run asks for something that the batch does not do; `unsupported` says what."""


class RunTooLarge(RunRefused):
    """The run has more parameters than this trainer has room for; another may have it."""


class RunDiverged(TrainingError):
    """The run's loss or its gradient is not a finite number any more.

    step  the optimiser step that was not made, counted from 1
    """

    code = "invalid_request"

    def __init__(self, step: int, what: str) -> None:
        super().__init__(
            f"the {what} is not a number any more at step {step}: lower it", param="learning_rate"
        )
        self.step = step
