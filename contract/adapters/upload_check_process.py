"""Check an upload's two files in a sealed process.

Imports no Django and no settings. The work: {"base", "base_name", "base_names", "base_revision",
"max_rank", "file_bytes", "is_base_accepted"}; the files: adapter_config.json, then
adapter_model.safetensors. The answer: {"report", "max_rank"}, or {"problems": [[file, field,
message]], "more": how many others}.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, BinaryIO

from contract.adapters.base_claim import claim_problems
from contract.adapters.base_shape import BaseShape
from contract.adapters.peft_config import UPLOAD_LIMITS
from contract.adapters.problems import AdapterProblems, Problem, shown
from contract.adapters.safetensors_header import FILE as TENSORS_FILE
from contract.adapters.safetensors_header import LENGTH_BYTES, UPLOAD_MAX_BYTES
from contract.adapters.tensor_values import tensors_with_nonfinite
from contract.adapters.upload_check import CheckedAdapter, check_adapter
from contract.process.sealed_process import serve

#: Largest number of problems in one answer.
MAX_PROBLEMS = 20


def check_upload(work: dict[str, Any], files: Sequence[BinaryIO]) -> dict[str, Any]:
    """Return the answer for an upload."""
    try:
        checked = _check(work, *files)
    except AdapterProblems as found:
        first = found.problems[:MAX_PROBLEMS]
        told = [[problem.file, problem.field, problem.message] for problem in first]
        return {"problems": told, "more": len(found.problems) - len(first)}
    return {"report": checked.report(), "max_rank": max(checked.fitted.ranks, default=0)}


def _check(work: dict[str, Any], config: BinaryIO, tensors: BinaryIO) -> CheckedAdapter:
    checked = check_adapter(
        config=config.read(UPLOAD_LIMITS.max_bytes + 1),
        start=_start(tensors),
        file_bytes=work["file_bytes"],
        base=BaseShape.from_config(work["base"]),
        max_rank=work["max_rank"],
    )
    problems: list[Problem] = []
    if not work["is_base_accepted"]:
        problems += claim_problems(
            checked.config.raw,
            name=work["base_name"],
            known_names=work["base_names"],
            revision=work["base_revision"],
        )
    problems += [
        Problem(
            TENSORS_FILE, shown(tensor.name), "it contains NaN or infinity: the training diverged"
        )
        for tensor in tensors_with_nonfinite(tensors, checked.tensors)
    ]
    if problems:
        raise AdapterProblems(problems)
    return checked


def _start(tensors: BinaryIO) -> bytes:
    """Return the beginning of the file: to the end of its header, or as long as a header may be."""
    length = tensors.read(LENGTH_BYTES)
    return length + tensors.read(min(int.from_bytes(length, "little"), UPLOAD_MAX_BYTES))


if __name__ == "__main__":
    serve(check_upload)
