"""Upload an adapter's version, and resume an upload that was interrupted.

A note on this machine says which version was begun for a folder. It has no secret, and is only a
hint: the server knows which parts have arrived, and each part of the files here is compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lorikeet_cli.config import state_folder
from lorikeet_cli.errors import ApiError, CliError, Forbidden
from lorikeet_cli.multipart import FileChanged, send_file
from lorikeet_cli.output import say, size
from lorikeet_cli.session import Session
from lorikeet_cli.uploads import Source

try:
    import fcntl
except ImportError:  # Windows: two commands at once for one folder share a version
    fcntl = None  # type: ignore[assignment]

#: Seconds after which a note is useless: the server ends an open upload after a day.
NOTE_EXPIRES_S = 2 * 86400
#: The store may lose parts that had arrived: then they are sent again.
MAX_ROUNDS = 3
_ENDED = ("uploaded", "validating", "ready")


def upload_version(
    session: Session,
    adapter: str,
    sources: Mapping[str, Source],
    *,
    base_model: str | None,
    accepts_base_mismatch: bool = False,
) -> dict[str, Any]:
    """Upload the files as a new version, or resume the upload that was begun for these files.

    accepts_base_mismatch  the version counts although its config names another base model
    Returns the version, whose check is queued. Raises CliError.
    """
    upload = _Upload(session, adapter, sources, base_model, accepts_base_mismatch)
    with _note(session, adapter, sources, accepts_base_mismatch) as note:
        return upload.run(note)


class _Upload:
    def __init__(
        self,
        session: Session,
        adapter: str,
        sources: Mapping[str, Source],
        base_model: str | None,
        accepts_base_mismatch: bool,
    ) -> None:
        self._session, self._adapter, self._sources = session, adapter, sources
        self._body: dict[str, Any] = {
            "files": {file: source.num_bytes for file, source in sources.items()},
            "multipart": True,
        }
        if base_model:
            self._body["base_model"] = base_model
        if accepts_base_mismatch:
            self._body["accept_base_mismatch"] = True

    def run(self, note: _Note) -> dict[str, Any]:
        found = self._go_on(note)
        if found is not None and found["object"] == "adapter_version":
            note.forget()
            return found
        try:
            version = self._send(found or self._begin(note))
        except FileChanged:
            if found is None:
                raise CliError("The files changed during the upload. Run it again.") from None
            self._abort(found["number"])
            version = self._send(self._begin(note))
        note.forget()
        return version

    def _place(self, number: int) -> tuple[str | int, ...]:
        return ("adapters", self._adapter, "versions", number)

    def _abort(self, number: int) -> None:
        """End the upload of this version, unless it is complete."""
        with contextlib.suppress(ApiError):
            self._session.send("DELETE", *self._place(number), "upload")
            say(f"{self._adapter}@{number} was begun with other settings. Starting a new version.")

    def _begin(self, note: _Note) -> dict[str, Any]:
        try:
            version = self._session.send(
                "POST", "adapters", self._adapter, "versions", body=self._body
            )
        except ApiError as error:
            if error.param not in ("multipart", "accept_base_mismatch"):
                raise
            raise CliError(
                f"The server is older than this command line: it does not know {error.param}. "
                "Upgrade the server, or install the command line of its version."
            ) from error
        note.keep(version["number"])
        state: dict[str, Any] = version["upload"]
        return state

    def _go_on(self, note: _Note) -> dict[str, Any] | None:
        """Return the open upload of these files, or its complete version; None: neither."""
        if note.number is None:
            return None
        place = self._place(note.number)
        if not note.is_of_these:
            self._abort(note.number)
            return None
        try:
            version: dict[str, Any] = self._session.get(*place)
            if version["status"] in _ENDED:
                say(f"{version['model']} is already complete.")
                return version
            if version["status"] != "uploading":
                return None
            state: dict[str, Any] = self._session.get(*place, "upload")
        except Forbidden:
            raise
        except ApiError:
            return None
        parts = [part for file in state["files"].values() for part in file["parts"]]
        there = sum(part["num_bytes"] for part in parts if part["is_uploaded"])
        say(f"Resuming {version['model']}: {size(there)} have arrived.")
        return state

    def _send(self, state: dict[str, Any]) -> dict[str, Any]:
        place = self._place(state["number"])
        for is_last in (*[False] * (MAX_ROUNDS - 1), True):
            for file, source in self._sources.items():
                self._send_file(place, file, source, state["files"][file])
            try:
                version: dict[str, Any] = self._session.send("POST", *place, "complete")
            except ApiError as error:
                if error.code != "parts_missing" or is_last:
                    raise
                state = self._session.get(*place, "upload")
            else:
                return version
        raise AssertionError("the last round returns or raises")

    def _send_file(
        self, place: tuple[str | int, ...], file: str, source: Source, state: dict[str, Any]
    ) -> None:
        def sign(number: int, sha256: str) -> dict[str, Any]:
            body = {"file": file, "parts": {str(number): sha256}}
            try:
                signed: dict[str, Any] = self._session.send("POST", *place, "parts", body=body)
            except ApiError as error:
                if error.code == "part_changed":
                    raise FileChanged(f"{source.path} has changed.") from error
                raise
            [part] = signed["data"]
            return dict(part)

        send_file(source, state, sign)


@dataclasses.dataclass(slots=True)
class _Note:
    """The version that was begun for a folder's files; without a path nothing is stored."""

    path: Path | None
    #: Identifies the files and the options of their check.
    files: dict[str, list[int]]
    accepts_base_mismatch: bool
    number: int | None = None
    #: True if this command began the version.
    is_of_these: bool = True

    def keep(self, number: int) -> None:
        self.number = number
        if self.path is not None:
            text = json.dumps(
                {
                    "number": number,
                    "files": self.files,
                    "accepts_base_mismatch": self.accepts_base_mismatch,
                }
            )
            with contextlib.suppress(OSError):
                self.path.write_text(text, encoding="utf-8")

    def forget(self) -> None:
        if self.path is not None:
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)


@contextlib.contextmanager
def _note(
    session: Session, adapter: str, sources: Mapping[str, Source], accepts_base_mismatch: bool
) -> Iterator[_Note]:
    """Yield the note for these files; an empty one when another command is at work on them."""
    files = {
        file: [source.num_bytes, source.path.stat().st_mtime_ns] for file, source in sources.items()
    }
    address = session.account.url + session.tenant_path("adapters", adapter)
    folder = str(next(iter(sources.values())).path.parent.resolve())
    key = hashlib.sha256(f"{address}\n{folder}".encode()).hexdigest()[:32]
    path = state_folder() / "uploads" / f"{key}.json"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_old(path.parent)
        lock = os.open(path.with_suffix(".lock"), os.O_CREAT | os.O_RDWR, 0o600)
        os.utime(path.with_suffix(".lock"))
    except OSError:  # no home, or a full disk: the upload works, but cannot be resumed
        yield _Note(None, files, accepts_base_mismatch)
        return
    try:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        yield _Note(None, files, accepts_base_mismatch)
        return
    try:
        yield _read_note(path, files, accepts_base_mismatch)
    finally:
        os.close(lock)


def _read_note(path: Path, files: dict[str, list[int]], accepts_base_mismatch: bool) -> _Note:
    empty = _Note(path, files, accepts_base_mismatch)
    try:
        noted = json.loads(path.read_text(encoding="utf-8"))
        accepted = noted.get("accepts_base_mismatch", False)
        is_of_these = noted["files"] == files and accepted == accepts_base_mismatch
        return dataclasses.replace(empty, number=int(noted["number"]), is_of_these=is_of_these)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return empty


def _remove_old(folder: Path) -> None:
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < time.time() - NOTE_EXPIRES_S:
                path.unlink()
