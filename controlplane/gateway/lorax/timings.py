"""LoRAX's headers of a whole answer: its tokens, and its times in whole milliseconds."""

from __future__ import annotations

import dataclasses

from contract.messages.protocol import Usage


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Of one request, in milliseconds, as the gateway saw it.

    validation_ms  until it was accepted
    queue_ms       from then until its prompt was begun, without loading adapters
    """

    total_ms: float
    validation_ms: float
    queue_ms: float

    @property
    def inference_ms(self) -> float:
        """The rest."""
        return max(0.0, self.total_ms - self.validation_ms - self.queue_ms)


def whole_headers(usage: Usage, timings: Timings) -> dict[str, str]:
    """Source: LoRAX's router, `generate`."""
    numbers = {
        "x-compute-time": timings.total_ms,
        "x-total-time": timings.total_ms,
        "x-validation-time": timings.validation_ms,
        "x-queue-time": timings.queue_ms,
        "x-inference-time": timings.inference_ms,
        "x-time-per-token": timings.inference_ms / max(1, usage.completion_tokens),
        "x-prompt-tokens": usage.prompt_tokens,
        "x-generated-tokens": usage.completion_tokens,
        "x-total-tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    return {name: str(int(number)) for name, number in numbers.items()}
