"""The bodies of /v1/files and /v1/uploads: what is taken, and what is answered."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from django.http import QueryDict
from pydantic import AfterValidator, Field

from controlplane.errors import InvalidRequest
from controlplane.files.models import File, Purpose, Upload, UploadPart
from controlplane.files.services import FileForm
from controlplane.inference.bodies import Body, without_nul

MIN_EXPIRES_S, MAX_EXPIRES_S = 3600, 30 * 24 * 3600
_FORM_FIELDS = {"purpose", "expires_after[anchor]", "expires_after[seconds]"}
#: What a client may say; what the platform makes has purposes of its own.
PURPOSES = tuple(purpose.value for purpose in Purpose if purpose != Purpose.BATCH_OUTPUT)


def _purpose(value: str) -> str:
    if value not in PURPOSES:
        raise ValueError(f"must be one of {', '.join(PURPOSES)}")
    return value


PurposeName = Annotated[str, AfterValidator(_purpose)]


class ExpiresAfter(Body):
    """When a file is removed, counted from its creation."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=MIN_EXPIRES_S, le=MAX_EXPIRES_S)]


class UploadBody(Body):
    """POST /v1/uploads."""

    filename: Annotated[str, Field(min_length=1, max_length=255), AfterValidator(without_nul)]
    purpose: PurposeName
    bytes: Annotated[int, Field(ge=1)]
    mime_type: Annotated[str, Field(min_length=1, max_length=255), AfterValidator(without_nul)]
    expires_after: ExpiresAfter | None = None

    def form(self) -> FileForm:
        expires = self.expires_after
        return FileForm(
            purpose=Purpose(self.purpose),
            filename=self.filename,
            expires_s=expires.seconds if expires else None,
        )


class CompleteBody(Body):
    """POST /v1/uploads/{id}/complete."""

    part_ids: Annotated[list[Annotated[str, Field(max_length=100)]], Field(min_length=1)]
    md5: Annotated[str | None, Field(pattern="^[0-9a-fA-F]{32}$")] = None


def file_form(fields: QueryDict, filename: str) -> FileForm:
    """What the form around a file says. Raises InvalidRequest that names the field."""
    for name in fields:
        if name not in _FORM_FIELDS:
            raise InvalidRequest(
                f"Unrecognized request argument supplied: {name[:100]}.",
                param=name[:100],
                code="unknown_parameter",
            )
    purpose = fields.get("purpose")
    if purpose is None:
        raise InvalidRequest(
            "Missing required parameter: 'purpose'.",
            param="purpose",
            code="missing_required_parameter",
        )
    if purpose not in PURPOSES:
        raise InvalidRequest(f"purpose is one of {', '.join(PURPOSES)}.", param="purpose")
    return FileForm(purpose=Purpose(purpose), filename=filename, expires_s=_expires_s(fields))


def _expires_s(fields: QueryDict) -> int | None:
    anchor, text = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and text is None:
        return None
    if anchor != "created_at":
        raise InvalidRequest("The anchor is created_at.", param="expires_after.anchor")
    is_number = text is not None and text.isascii() and text.isdigit() and len(text) <= 9
    if not is_number or not MIN_EXPIRES_S <= int(text or 0) <= MAX_EXPIRES_S:
        raise InvalidRequest(
            f"seconds is a number from {MIN_EXPIRES_S} to {MAX_EXPIRES_S}.",
            param="expires_after.seconds",
        )
    return int(text or 0)


def file_body(file: File) -> dict[str, Any]:
    return {
        "id": file.public_id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": int(file.created_at.timestamp()),
        "expires_at": int(file.expires_at.timestamp()) if file.expires_at else None,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def upload_body(upload: Upload) -> dict[str, Any]:
    is_assembling = upload.status == Upload.Status.ASSEMBLING
    file = None if is_assembling else upload.file
    return {
        "id": upload.public_id,
        "object": "upload",
        "bytes": upload.num_bytes,
        "created_at": int(upload.created_at.timestamp()),
        "expires_at": int(upload.expires_at.timestamp()),
        "filename": upload.filename,
        "purpose": upload.purpose,
        "status": "pending" if is_assembling else upload.status,
        "file": file_body(file) if file is not None else None,
    }


def part_body(part: UploadPart, upload_id: str) -> dict[str, Any]:
    return {
        "id": part.public_id,
        "object": "upload.part",
        "created_at": int(part.created_at.timestamp()),
        "upload_id": upload_id,
    }
