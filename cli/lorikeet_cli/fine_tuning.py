"""Files and fine-tuning jobs of the gateway, /v1."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lorikeet_cli import progress
from lorikeet_cli.errors import CliError, Interrupted
from lorikeet_cli.output import shown
from lorikeet_cli.session import Session
from lorikeet_cli.uploads import Source

WATCH_INTERVAL_S = 1.0
_ENDED = ("succeeded", "failed", "cancelled")


def upload(session: Session, source: Source) -> str:
    """Upload a file of rows to train on. -> its id

    Raises CliError; the server names lines that are no chats.
    """
    boundary = uuid.uuid4().hex
    name = json.dumps(source.path.name)
    head = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n'
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename={name}\r\n'
        "Content-Type: application/jsonl\r\n\r\n"
    ).encode()
    tail = f"\r\n--{boundary}--\r\n".encode()
    with progress.bar(source.path.name, total=source.num_bytes, is_bytes=True) as bar:

        def content() -> Iterator[bytes]:
            yield head
            yield from source.pieces(bar.show)
            yield tail

        file = session.client.call(
            "POST",
            session.gateway_path("files"),
            content=content,
            headers={
                "Content-Type": f"multipart/form-data; boundary={boundary}",
                "Content-Length": str(len(head) + source.num_bytes + len(tail)),
            },
        )
    return str(file["id"])


def digest_of(path: Path) -> Source:
    """Read a file once, so that its digest is known. Raises CliError."""
    source = Source.of(path)
    for _ in source.pieces(lambda _: None):
        pass
    return source


def find_job(session: Session, key: str, value: str) -> dict[str, Any] | None:
    """Return the newest job with this metadata that has not failed; None if there is none."""
    path = session.gateway_path("fine_tuning", "jobs")
    found = session.client.call("GET", path, params={f"metadata[{key}]": value, "limit": 20})
    usable = [job for job in found["data"] if job["status"] not in ("failed", "cancelled")]
    return usable[0] if usable else None


def wait(session: Session, job: dict[str, Any]) -> dict[str, Any]:
    """Show a job's progress until it has ended. -> the job

    Raises CliError unless it succeeded, Interrupted.
    """
    path = session.gateway_path("fine_tuning", "jobs", job["id"])
    status = None
    try:
        with progress.bar(shown(job["lorikeet"]["adapter"]), total=None) as bar:
            while True:
                if job["status"] != status and not progress.is_shown():
                    session.say(f"{job['id']} is {job['status']}")
                status, at = job["status"], job["lorikeet"]["progress"]
                loss = f"loss {shown(at['loss'])}" if "loss" in at else ""
                bar.show(at.get("step") or 0, at.get("steps"), f"{shown(status)} {loss}")
                if status in _ENDED:
                    break
                time.sleep(WATCH_INTERVAL_S)
                job = session.client.call("GET", path)
    except KeyboardInterrupt:
        raise Interrupted(
            "Interrupted: the job continues. Run the same command again to follow it."
        ) from None
    if status != "succeeded":
        error = (job.get("error") or {}).get("message") or "the server gave no reason"
        raise CliError(f"The job {job['id']} {shown(status)}: {shown(error)}")
    return job
