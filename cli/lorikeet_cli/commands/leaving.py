"""`lorikeet import-openai`: a fine-tuning job of OpenAI's, made again here."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from lorikeet_cli import fine_tuning, output
from lorikeet_cli.commands.runs import read_settings
from lorikeet_cli.errors import CliError, UsageError
from lorikeet_cli.old_answers import OldAnswers, read_answers
from lorikeet_cli.openai_job import OldJob, read_job
from lorikeet_cli.output import Column
from lorikeet_cli.replay import COLUMNS, WORST_COLUMNS, Replay, replay
from lorikeet_cli.session import Session, command, completer
from lorikeet_cli.uploads import Source

#: Key of the job's metadata that holds the old job's id and a digest of all settings.
IMPORTED = "imported_from"
_COLUMNS: list[Column] = [
    ("MODEL", "fine_tuned_model"),
    ("JOB", "id"),
    ("STATUS", "status"),
    ("BASE MODEL", "model"),
    ("HYPERPARAMETERS", "hyperparameters"),
    ("SEED", "seed"),
    ("TRAINED TOKENS", "trained_tokens"),
]


def add_to(app: typer.Typer) -> None:
    command(app, "import-openai", for_tenant=False)(import_openai)


def import_openai(
    session: Session,
    job: Annotated[Path, typer.Argument(help="The stored job object, JSON.")],
    training_file: Annotated[Path, typer.Option(help="What it was trained on, JSONL.")],
    validation_file: Annotated[Path | None, typer.Option(help="JSONL.")] = None,
    old_answers: Annotated[
        Path | None,
        typer.Option(help='JSONL: {"messages": […], "answer": "…"}, what the old model said.'),
    ] = None,
    base_model: Annotated[
        str | None,
        typer.Option(
            help="What to train here; needed if there are several.",
            autocompletion=completer("base-models"),
        ),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="As rank=8, max_length=2048; repeatable.", metavar="NAME=VALUE"),
    ] = None,
    min_score: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Fail below this mean of all checks (1: the same)."),
    ] = None,
) -> None:
    """Train what OpenAI trained, and compare its answers with the old ones.

    The exit code is 0 if the job succeeded, and with --min-score if its answers are like the old
    ones. Run the same command again to resume its job.
    """
    if min_score is not None and old_answers is None:
        raise UsageError("--min-score is for --old-answers.")
    old = read_job(job)
    answers = None if old_answers is None else read_answers(old_answers)
    files = [
        fine_tuning.digest_of(path) for path in (training_file, validation_file) if path is not None
    ]
    body = _body(session, old, base_model, setting)
    notes = _notes(old, body, answers, has_validation=validation_file is not None)
    for note in notes:
        session.say(f"Different here: {note}")
    made = fine_tuning.wait(session, _made(session, old, body, files))
    compared = None
    if answers is not None:
        compared = replay(
            session,
            adapter=made["lorikeet"]["adapter"],
            model=made["fine_tuned_model"],
            base_model=made["model"],
            cases=answers.cases,
        )
    _print(session, made, notes, compared)
    if compared is not None and min_score is not None and compared.score < min_score:
        raise CliError(f"The answers' score is {compared.score:.4g}, below {min_score:g}.")


def _body(
    session: Session,
    old: OldJob,
    base_model: str | None,
    setting: list[str] | None,
) -> dict[str, Any]:
    """Return the job to create, without its files."""
    own: dict[str, Any] = {"hyperparameters": old.hyperparameters}
    if old.grader is not None:
        own["grader"] = old.grader
    body: dict[str, Any] = {
        "model": base_model or _only_base_model(session),
        "suffix": old.suffix,
        "seed": old.seed,
        "method": {"type": old.method, old.method: own},
        "metadata": old.metadata,
        "lorikeet": read_settings(setting or []),
    }
    return body


def _only_base_model(session: Session) -> str:
    """Return the server's base model. Raises UsageError if there are several."""
    found = session.client.pages(session.own_path("base-models"), limit=100)["data"]
    if len(found) == 1:
        return str(found[0]["name"])
    names = ", ".join(sorted(str(each["name"]) for each in found)) or "none"
    raise UsageError(f"Say which base model to train with --base-model: {names}.")


def _notes(
    old: OldJob, body: dict[str, Any], answers: OldAnswers | None, *, has_validation: bool
) -> list[str]:
    notes = [f"model: {body['model']} is trained in place of {old.model}.", *old.notes]
    if old.has_validation and not has_validation:
        notes.append("validation_file: give it with --validation-file; there is no validation.")
    if answers is not None and answers.num_left_out:
        notes.append(f"old answers: {answers.num_left_out} with tools or no text are left out.")
    return notes


def _made(
    session: Session, old: OldJob, body: dict[str, Any], files: list[Source]
) -> dict[str, Any]:
    """Return the job that an earlier, same command made; else upload the files and make it."""
    asked = json.dumps([old.id, body, [source.sha256 for source in files]], sort_keys=True)
    value = f"{old.id[:64]} {hashlib.sha256(asked.encode()).hexdigest()[:16]}"
    known = fine_tuning.find_job(session, IMPORTED, value)
    if known is not None:
        session.say(f"It was imported before, as {known['id']}.")
        return known
    body = {**body, "metadata": {**body["metadata"], IMPORTED: value}}
    for name, source in zip(("training_file", "validation_file"), files, strict=False):
        body[name] = fine_tuning.upload(session, source)
    path = session.gateway_path("fine_tuning", "jobs")
    made: dict[str, Any] = session.client.call("POST", path, body=body)
    return made


def _print(
    session: Session, job: dict[str, Any], notes: list[str], compared: Replay | None
) -> None:
    if session.is_json:
        document = {"object": "openai_import", "job": job, "not_as_there": notes, "replay": None}
        if compared is not None:
            document["replay"] = {
                "score": compared.score,
                "suite": compared.suite,
                "base": compared.base,
                "new": compared.new,
                "comparison": compared.comparison,
                "worst": compared.worst,
            }
        output.print_json(document)
        return
    session.print_one(job, _COLUMNS)
    if compared is None or session.form is output.Form.ID:
        return
    print(f"\nAgainst {compared.new['num_cases']} old answers (1: the same):\n")
    output.print_table(compared.rows(), COLUMNS)
    if compared.worst:
        print("\nLeast like the old answers:\n")
        output.print_table(compared.worst, WORST_COLUMNS)
