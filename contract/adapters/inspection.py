"""The job of the inspector's child process, and the bounds of its answer.

The control plane runs `python -m worker.inspect_adapter JOB.json` with the job below. The child
prints one JSON object: `reference`, what PEFT computes on the probe's prompts, and `doctor`, what
the weights look like; `worker.inspect_adapter` describes both.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

#: The `endpoint` of a probe's requests: they are neither billed nor shown as their tenant's.
PROBE_ENDPOINT = "probe"
#: Number of prompts in a probe, and of tokens in each.
MAX_PROMPTS = 5
MAX_PROMPT_TOKENS = 32
#: Number of likeliest tokens that are compared at the last position.
TOP = 5
#: Largest answer of the child, in bytes.
MAX_ANSWER_BYTES = 4 << 20
_MAX_JOB_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectJob:
    """The adapter and the base to inspect: the content of JOB.json.

    adapter_dir   with adapter_config.json and adapter_model.safetensors
    memory_bytes  the most memory that the process may take for data; None: no limit
    """

    base_model_dir: Path
    adapter_dir: Path
    memory_bytes: int | None = None

    def write(self, path: Path) -> None:
        """Write the job where `read` finds it."""
        path.write_text(json.dumps(dataclasses.asdict(self), default=lambda of: str(of.resolve())))

    @classmethod
    def read(cls, path: Path) -> InspectJob:
        """Return the job in a file. Raises ValueError when it is not one."""
        with path.open("rb") as file:
            fields = json.loads(file.read(_MAX_JOB_BYTES))
        if not isinstance(fields, dict):
            raise ValueError("the job must be an object")
        for name in ("base_model_dir", "adapter_dir"):
            if not isinstance(fields.get(name), str) or not fields[name]:
                raise ValueError(f"{name} must be a path")
        memory_bytes = fields.get("memory_bytes")
        if memory_bytes is not None and (type(memory_bytes) is not int or memory_bytes < 1):
            raise ValueError("memory_bytes must be a positive number")
        return cls(
            base_model_dir=Path(fields["base_model_dir"]),
            adapter_dir=Path(fields["adapter_dir"]),
            memory_bytes=memory_bytes,
        )
