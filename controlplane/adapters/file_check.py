"""Check the files of a version in a sealed child process, and read its answer."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import re
from pathlib import Path
from typing import Any

from django.conf import settings

from contract.adapters import upload_check_process
from contract.adapters.peft_config import MAX_RANK
from controlplane.adapters.models import AdapterVersion, BaseModel
from controlplane.adapters.rejection import MAX_REASONS, Reason, Rejected
from controlplane.infra import metrics, sealed_child
from controlplane.infra.sealed_child import Bounds

log = logging.getLogger(__name__)

_MODULE = upload_check_process.__name__
_MEMORY_BYTES = 192 << 20
_CPU_S = 60
_CPU_S_PER_GB = 30
#: A busy machine gives a child a part of a core.
_WALL_PER_CPU = 4
_ANSWER_BYTES = 256 << 10
_REPORT_BYTES = 64 << 10
_MESSAGE_CHARS = 2000
_CONTROL = re.compile("[\x00-\x1f\x7f]")
_UNSTORABLE = re.compile(r"\\u|NaN|Infinity")
#: Number of times a child that was killed from outside is started again within one task.
_TRIES = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The result of the check of good files.

    report  facts for the version's page
    """

    max_rank: int
    report: dict[str, Any]


def files_check(version: AdapterVersion, config: Path, tensors: Path) -> Accepted:
    """Check two files, which have the stated lengths.

    Raises Rejected, also when the files crash the check; sealed_child.Lost when it should be tried
    again.
    """
    base: BaseModel = version.adapter.base_model
    work = {
        "base": base.config,
        "base_name": base.name,
        "base_names": base.known_names,
        "base_revision": base.revision,
        "max_rank": base.max_rank,
        "file_bytes": version.num_bytes,
        "is_base_accepted": version.accepts_base_mismatch,
    }
    cpu_s = _CPU_S + _CPU_S_PER_GB * version.num_bytes // 2**30
    bounds = Bounds(
        memory_bytes=_MEMORY_BYTES,
        cpu_s=cpu_s,
        wall_s=_WALL_PER_CPU * cpu_s,
        answer_bytes=_ANSWER_BYTES,
    )
    ended = _run(work, (config, tensors), bounds)
    log.info(
        "adapter files checked",
        extra={
            "version_id": str(version.pk),
            "cpu_s": round(ended.cpu_s, 3),
            "peak_mb": ended.peak_bytes >> 20,
        },
    )
    try:
        return _read(ended.answer)
    except sealed_child.Broken as error:
        raise _broken(error) from error


def _broken(error: sealed_child.Broken) -> Rejected:
    """Return the rejection of files that found a defect of ours, and tell the operator."""
    metrics.CHECKS_ENDED.labels("broken").inc()
    log.error("the check of adapter files failed: %s", error)
    message = "the check failed by a defect of the server: send the operator this version's id"
    return Rejected.because("", message)


def _run(work: dict[str, Any], paths: tuple[Path, Path], bounds: Bounds) -> sealed_child.Ended:
    for left in reversed(range(_TRIES)):
        try:
            with contextlib.ExitStack() as stack:
                files = [stack.enter_context(path.open("rb")) for path in paths]
                ended = sealed_child.run_sealed(
                    _MODULE, work, files, environment=settings.TRAINER_ENVIRONMENT, bounds=bounds
                )
        except sealed_child.OverBounds as error:
            metrics.CHECKS_ENDED.labels("over_bounds").inc()
            raise Rejected.because("", f"the check of its files was stopped: {error}") from error
        except sealed_child.Broken as error:
            raise _broken(error) from error
        except sealed_child.Lost as error:
            metrics.CHECKS_ENDED.labels("lost").inc()
            log.warning("a check of adapter files was lost: %s", error)
            if not left:
                raise
        else:
            metrics.CHECKS_ENDED.labels("answered").inc()
            if "seccomp" not in ended.walls:
                log.warning("adapter files are checked without seccomp: see docs/security.md")
            return ended
    raise AssertionError("unreachable")


def _read(answer: dict[str, Any]) -> Accepted:
    """Read the answer of the child, which is not trusted. Raises Rejected, Broken."""
    problems = answer.get("problems")
    if isinstance(problems, list) and problems:
        reasons = [_reason(problem) for problem in problems[:MAX_REASONS]]
        more = answer.get("more")
        raise Rejected(reasons, num_more=max(0, more) if type(more) is int else 0)
    max_rank, report = answer.get("max_rank"), answer.get("report")
    if type(max_rank) is int and 0 <= max_rank <= MAX_RANK and isinstance(report, dict):
        text = json.dumps(report)
        # NUL, lone surrogates and NaN cannot be stored; a report is in ASCII.
        if len(text) <= _REPORT_BYTES and not _UNSTORABLE.search(text):
            return Accepted(max_rank=max_rank, report=report)
    raise sealed_child.Broken("its answer has the wrong form")


def _reason(problem: Any) -> Reason:
    if not isinstance(problem, list) or len(problem) != 3:
        raise sealed_child.Broken("its answer has the wrong form")
    file, field, message = (
        _CONTROL.sub("?", str(part)[:_MESSAGE_CHARS].encode("ascii", "backslashreplace").decode())
        for part in problem
    )
    return Reason(field or file, message)
