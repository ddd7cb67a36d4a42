"""Read a fine-tuning job of OpenAI's API: the settings to use here, and notes about the others."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from lorikeet_cli.errors import CliError

MAX_BYTES = 1 << 20
MAX_METADATA = 16
#: This server's learning rates by method, which a `learning_rate_multiplier` multiplies.
LEARNING_RATES = {"supervised": 0.001, "dpo": 0.0001, "reinforcement": 0.0001}
_MAX_NAME = 63
_HYPERPARAMETERS = ("n_epochs", "batch_size", "learning_rate_multiplier")
_OF_METHOD = {
    "supervised": _HYPERPARAMETERS,
    "dpo": (*_HYPERPARAMETERS, "beta"),
    "reinforcement": (*_HYPERPARAMETERS, "compute_multiplier", "eval_interval"),
}
#: Fields about the job's course there; they have no effect here.
_HISTORY = {
    "object", "id", "status", "created_at", "finished_at", "estimated_finish", "error",
    "organization_id", "trained_tokens", "result_files", "fine_tuned_model", "training_file",
    "usage_metrics", "shared_with_openai", "eval_id",
}  # fmt: skip
_KNOWN = _HISTORY | {
    "model", "validation_file", "hyperparameters", "method", "seed", "metadata", "integrations",
    "suffix", "user_provided_suffix",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OldJob:
    """The settings of a job object.

    method  supervised, dpo or reinforcement, which has a grader
    suffix  the adapter's name here; None: the server gives one
    notes   what cannot be taken over, or means something else here: a sentence each
    """

    id: str
    model: str
    suffix: str | None
    method: str
    grader: dict[str, Any] | None = None
    hyperparameters: dict[str, Any]
    seed: int | None
    metadata: dict[str, str]
    has_validation: bool
    notes: tuple[str, ...]


def read_job(path: Path) -> OldJob:
    """Read a stored job object. Raises CliError if it is not one, or cannot be repeated here."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise CliError(f"Cannot read {path}: {error.strerror}.") from error
    try:
        found = json.loads(content) if len(content) <= MAX_BYTES else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("model"), str):
        raise CliError(
            f"{path} is not a fine-tuning job: store what `client.fine_tuning.jobs.retrieve(id)"
            ".to_json()` returns."
        )
    notes: list[str] = []
    method, hyperparameters = _method(found)
    grader = _grader(found["method"], notes) if method == "reinforcement" else None
    return OldJob(
        id=_text(found.get("id")),
        model=found["model"],
        suffix=_suffix(found, notes),
        method=method,
        grader=grader,
        hyperparameters=_hyperparameters(method, hyperparameters, notes),
        seed=_seed(found.get("seed"), notes),
        metadata=_metadata(found.get("metadata"), notes),
        has_validation=bool(found.get("validation_file")),
        notes=(*notes, *_others(found)),
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _method(job: dict[str, Any]) -> tuple[str, Any]:
    """Return the job's method and its hyperparameters. Raises CliError for an unknown method."""
    method = job.get("method")
    method = method if isinstance(method, dict) else {}
    kind = method.get("type", "supervised")
    if kind not in tuple(_OF_METHOD):
        raise CliError(
            f"The job's method is {kind}: {', '.join(_OF_METHOD)} jobs can run here. Train on good "
            'answers, as a job with `"method": {"type": "supervised"}`.'
        )
    own = method.get(kind)
    found = own.get("hyperparameters") if isinstance(own, dict) else None
    return kind, found or job.get("hyperparameters")


def _grader(method: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return the job's grader without what means nothing here. Raises CliError without one."""
    own = method.get("reinforcement")
    grader = own.get("grader") if isinstance(own, dict) else None
    if not isinstance(own, dict) or not isinstance(grader, dict):
        raise CliError("The job has no grader: add method.reinforcement.grader to it.")
    if own.get("response_format"):
        notes.append(
            "response_format: answers are sampled freely; grade their schema by a grader of type "
            "checks."
        )
    return _kept(grader, "grader", notes)


def _kept(grader: dict[str, Any], place: str, notes: list[str]) -> dict[str, Any]:
    found = dict(grader)
    if found.pop("image_tag", None):
        notes.append(f"{place}.image_tag: the process here has Python's standard library alone.")
    if found.get("type") == "score_model":
        notes.append(
            f"{place}.model: {found.get('model')} must be a model here, or `judge:NAME`, an "
            "address that you set as a judge."
        )
    if found.get("type") == "multi" and isinstance(found.get("graders"), dict):
        found["graders"] = {
            name: _kept(part, f"{place}.{name}", notes) if isinstance(part, dict) else part
            for name, part in found["graders"].items()
        }
    return found


def _hyperparameters(method: str, given: Any, notes: list[str]) -> dict[str, Any]:
    """Return the numbers and "auto"s."""
    found: dict[str, Any] = {}
    for name, value in (given if isinstance(given, dict) else {}).items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if name not in _OF_METHOD[method] or not (is_number or value in ("auto", None)):
            notes.append(f"hyperparameters.{name}: it is not known here.")
        elif value is not None:
            found[name] = value
    rate = found.get("learning_rate_multiplier", "auto")
    if rate != "auto":
        notes.append(
            f"learning_rate_multiplier: {rate:g} is taken over, but of "
            f"{LEARNING_RATES[method]:g}, this server's rate; OpenAI's is not public."
        )
    return found


def _suffix(job: dict[str, Any], notes: list[str]) -> str | None:
    """Return the job's suffix as a name of an adapter."""
    parts = _text(job.get("fine_tuned_model")).split(":")
    of_model = parts[3] if len(parts) > 4 else ""
    given = _text(job.get("user_provided_suffix")) or _text(job.get("suffix")) or of_model
    name = re.sub(r"[^a-z0-9._-]+", "-", given.lower())[:_MAX_NAME].strip("._-")
    if given and name != given:
        notes.append(f"suffix: {given!r} becomes {name!r}, as adapters' names are.")
    return name or None


def _seed(value: Any, notes: list[str]) -> int | None:
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31:
        return value
    notes.append(f"seed: {value!r} is not a seed here; it is 0.")
    return None


def _metadata(value: Any, notes: list[str]) -> dict[str, str]:
    """Return the job's metadata, with one key free."""
    found = {
        name: text
        for name, text in (value if isinstance(value, dict) else {}).items()
        if isinstance(text, str)
    }
    if len(found) >= MAX_METADATA:
        last = sorted(found)[MAX_METADATA - 1 :]
        notes.append(f"metadata: without {', '.join(last)}, which would be too many keys.")
        found = {name: text for name, text in found.items() if name not in last}
    return found


def _others(job: dict[str, Any]) -> list[str]:
    """Describe the other fields that are not taken over."""
    notes = []
    if job["model"].startswith("ft:"):
        notes.append(f"model: the weights of {job['model']} stay there; it begins from the base.")
    if integrations := job.get("integrations"):
        kinds = [_text(each.get("type")) for each in integrations if isinstance(each, dict)]
        notes.append(f"integrations: {', '.join(kinds) or 'some'}; there are none here.")
    if job.get("result_files"):
        notes.append("result_files: they stay there; download them.")
    names = sorted(name for name, value in job.items() if name not in _KNOWN and value)
    return [*notes, *(f"{name}: it is not known here." for name in names)]
