"""The bodies of /v1/batches: what is taken, and what is answered."""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from controlplane.batches.lines import ENDPOINTS
from controlplane.batches.models import Batch, file_id
from controlplane.gateway.files.bodies import ExpiresAfter
from controlplane.inference.bodies import Body
from controlplane.inference.schemas import Metadata

_STATUSES = (
    *(Batch.Status.IN_PROGRESS, Batch.Status.FINALIZING, Batch.Status.COMPLETED),
    *(Batch.Status.FAILED, Batch.Status.EXPIRED),
    *(Batch.Status.CANCELLING, Batch.Status.CANCELLED),
)


def _endpoint(value: str) -> str:
    if value not in ENDPOINTS:
        raise ValueError(f"must be one of {', '.join(ENDPOINTS)}")
    return value


class BatchBody(Body):
    """POST /v1/batches."""

    input_file_id: Annotated[str, Field(max_length=100)]
    endpoint: Annotated[str, AfterValidator(_endpoint)]
    completion_window: Literal["24h"]
    metadata: Metadata = None
    output_expires_after: ExpiresAfter | None = None


def batch_body(batch: Batch) -> dict[str, Any]:
    errors = {"object": "list", "data": batch.errors} if batch.errors else None
    return {
        "id": batch.public_id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model or None,
        "errors": errors,
        "input_file_id": file_id(batch.input_file_id),
        "completion_window": "24h",
        "status": batch.status,
        "output_file_id": file_id(batch.output_file_id),
        "error_file_id": file_id(batch.error_file_id),
        "created_at": _unix(batch.created_at),
        "expires_at": _unix(batch.expires_at),
        **{f"{status}_at": _unix(getattr(batch, f"{status}_at")) for status in _STATUSES},
        "request_counts": {
            "total": batch.num_lines,
            "completed": batch.num_completed,
            "failed": batch.num_failed,
        },
        "usage": {
            "input_tokens": batch.prompt_tokens,
            "input_tokens_details": {"cached_tokens": batch.cached_tokens},
            "output_tokens": batch.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": batch.prompt_tokens + batch.completion_tokens,
        },
        "metadata": batch.metadata,
    }


def _unix(moment: dt.datetime | None) -> int | None:
    return None if moment is None else int(moment.timestamp())
