"""The bodies of requests to /v1/files and /v1/uploads, and of their answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from django.http import QueryDict
from drf_spectacular.utils import extend_schema_field
from pydantic import AfterValidator, Field
from rest_framework import serializers

from controlplane.errors import InvalidRequest
from controlplane.files.models import MADE, File, Purpose, Upload, UploadPart
from controlplane.files.services import FileForm
from controlplane.gateway.rest.fields import Constant, PublicId, UnixTime
from controlplane.inference.bodies import Body, without_nul

MIN_EXPIRES_S, MAX_EXPIRES_S = 3600, 30 * 24 * 3600
#: Purposes that a client may name; files that the platform makes have one of their own.
PURPOSES = tuple(purpose.value for purpose in Purpose if purpose not in MADE)
#: The form around a file, as a JSON schema.
FILE_FORM: dict[str, Any] = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"enum": list(PURPOSES)},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {
            "type": "integer",
            "minimum": MIN_EXPIRES_S,
            "maximum": MAX_EXPIRES_S,
        },
    },
    "additionalProperties": False,
}
_FORM_FIELDS = FILE_FORM["properties"].keys() - {"file"}
#: As clients see them.
UPLOAD_STATUSES = tuple(
    status.value for status in Upload.Status if status != Upload.Status.ASSEMBLING
)


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
    """Check the fields of the form around a file. Raises InvalidRequest that names the field."""
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


class FileSerializer(serializers.Serializer[File]):
    """A file, as OpenAI writes it."""

    id = PublicId(File.PREFIX)
    object = Constant("file")
    bytes = serializers.IntegerField(source="num_bytes")
    created_at = UnixTime()
    expires_at = UnixTime(allow_null=True)
    filename = serializers.CharField()
    purpose = serializers.ChoiceField(Purpose.choices)
    status = Constant("processed")
    status_details = Constant(None)


class FileDeletedSerializer(serializers.Serializer[Any]):
    id = serializers.CharField()
    object = Constant("file")
    deleted = Constant(True)


class UploadSerializer(serializers.Serializer[Upload]):
    """An upload, as OpenAI writes it: one that is being put together is pending."""

    id = PublicId(Upload.PREFIX)
    object = Constant("upload")
    bytes = serializers.IntegerField(source="num_bytes")
    created_at = UnixTime()
    expires_at = UnixTime()
    filename = serializers.CharField()
    purpose = serializers.ChoiceField(PURPOSES)
    status = serializers.SerializerMethodField()
    file = serializers.SerializerMethodField()

    @extend_schema_field(serializers.ChoiceField(UPLOAD_STATUSES))
    def get_status(self, upload: Upload) -> str:
        is_assembling = upload.status == Upload.Status.ASSEMBLING
        return Upload.Status.PENDING.value if is_assembling else upload.status

    @extend_schema_field(FileSerializer(allow_null=True))
    def get_file(self, upload: Upload) -> Any:
        is_assembling = upload.status == Upload.Status.ASSEMBLING
        file = None if is_assembling else upload.file
        return None if file is None else FileSerializer(file).data


def part_body(part: UploadPart, upload_id: str) -> dict[str, Any]:
    return {
        "id": part.public_id,
        "object": "upload.part",
        "created_at": int(part.created_at.timestamp()),
        "upload_id": upload_id,
    }
