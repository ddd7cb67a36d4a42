"""/v1/fine_tuning/jobs: the tenant's training runs, as OpenAI's fine-tuning jobs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar

from django.db.models import QuerySet
from django.http import HttpResponseBase
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.errors import InvalidRequest
from controlplane.gateway.door import GatewayRequest
from controlplane.gateway.files.receiving import in_file_thread
from controlplane.gateway.fine_tuning import services
from controlplane.gateway.fine_tuning.answers import (
    FineTuningCheckpointSerializer,
    FineTuningEventSerializer,
    FineTuningJobSerializer,
)
from controlplane.gateway.fine_tuning.bodies import FineTuningJobBody
from controlplane.gateway.fine_tuning.checkpoints import job_checkpoints
from controlplane.gateway.fine_tuning.live import PAGE, Page, live_events
from controlplane.gateway.rest.paging import Paging, page, page_of, page_of_items
from controlplane.gateway.row_views import GatewayAPIView
from controlplane.inference.schemas import MAX_METADATA
from controlplane.infra.web.threads import query_in_thread
from controlplane.tenancy.public_ids import parse_id
from controlplane.tenants.auth import authorize
from controlplane.tenants.permissions import Permission
from controlplane.training.models import TrainingEvent, TrainingRun
from controlplane.training.runs import pausing
from controlplane.training.runs import services as run_services

_JOBS = Paging(id_prefix=TrainingRun.PREFIX)
_EVENTS = Paging(id_prefix=TrainingEvent.PREFIX)
_KEY = re.compile(r"metadata\[(.{1,64})\]", re.DOTALL)
_METADATA = OpenApiParameter(
    "metadata",
    {"type": "object", "additionalProperties": {"type": "string"}},
    style="deepObject",
    explode=True,
    description="Only jobs with these; `metadata=null`: only those without any.",
)
_STREAM = OpenApiParameter(
    "stream", bool, description="Server-sent events, the oldest first, until the job has ended."
)


class JobsView(GatewayAPIView):
    permissions: ClassVar = {"GET": Permission.READ, "POST": Permission.TRAINING_WRITE}
    run_in_thread = staticmethod(in_file_thread)

    @extend_schema(
        "gateway_fine_tuning_jobs",
        [*_JOBS.parameters(), _METADATA],
        responses=page_of(FineTuningJobSerializer),
    )
    def get(self, request: Request) -> Response:
        """List the tenant's fine-tuning jobs, newest first: its training runs."""
        return page(request, _with_metadata(request), FineTuningJobSerializer, paging=_JOBS)

    @extend_schema(
        "gateway_fine_tuning_job_create",
        request=FineTuningJobBody,
        responses=FineTuningJobSerializer,
    )
    def post(self, request: Request) -> Response:
        """Train an adapter on a file. The result becomes its next version."""
        authorize(self.principal, Permission.FILES_READ)  # it reads a file
        body = self.body_of_write(FineTuningJobBody)
        run = services.job_create(principal=self.principal, form=body.form())
        return Response(FineTuningJobSerializer(run).data)


def _with_metadata(request: Request) -> QuerySet[TrainingRun]:
    """Return the jobs that the query asks for. Raises InvalidRequest."""
    rows, wanted, is_bad = services.jobs_list(), {}, False
    for name, value in request.query_params.items():
        if match := _KEY.fullmatch(name):
            wanted[match[1]] = value
        elif name.startswith("metadata["):
            is_bad = True  # ignored, it would list jobs that were not asked for
    is_null = request.query_params.get("metadata")
    is_bad = is_bad or is_null not in (None, "null") or len(wanted) > MAX_METADATA
    if is_bad or (is_null and wanted):
        raise InvalidRequest(
            "A filter is metadata[key]=value, or metadata=null alone.", param="metadata"
        )
    if is_null:
        return rows.filter(metadata__isnull=True)
    return rows.filter(metadata__contains=wanted) if wanted else rows


class JobView(GatewayAPIView):
    permissions: ClassVar = {"GET": Permission.READ}

    @extend_schema("gateway_fine_tuning_job", responses=FineTuningJobSerializer)
    def get(self, request: Request, job_id: str) -> Response:
        """One job."""
        return Response(FineTuningJobSerializer(services.job_get(job_id)).data)


class _JobChangeView(GatewayAPIView):
    permissions: ClassVar = {"POST": Permission.TRAINING_WRITE}

    def answer(self, change: Callable[..., TrainingRun], job_id: str) -> Response:
        change(run=services.job_get(job_id))
        return Response(FineTuningJobSerializer(services.job_get(job_id)).data)


class JobCancelView(_JobChangeView):
    @extend_schema(
        "gateway_fine_tuning_job_cancel", request=None, responses=FineTuningJobSerializer
    )
    def post(self, request: Request, job_id: str) -> Response:
        """Cancel a job; one that runs is `cancelled` within seconds."""
        return self.answer(run_services.training_run_cancel, job_id)


class JobPauseView(_JobChangeView):
    @extend_schema("gateway_fine_tuning_job_pause", request=None, responses=FineTuningJobSerializer)
    def post(self, request: Request, job_id: str) -> Response:
        """Pause a job; one that runs is `paused` within seconds. It keeps its place.

        One that had begun writes its state first; resumed, it continues from there.
        """
        return self.answer(pausing.training_run_pause, job_id)


class JobResumeView(_JobChangeView):
    @extend_schema(
        "gateway_fine_tuning_job_resume", request=None, responses=FineTuningJobSerializer
    )
    def post(self, request: Request, job_id: str) -> Response:
        """Queue a paused job again."""
        return self.answer(pausing.training_run_resume, job_id)


class JobEventsView(GatewayAPIView):
    permissions: ClassVar = {"GET": Permission.READ}

    @extend_schema(
        "gateway_fine_tuning_job_events",
        [*_EVENTS.parameters(), _STREAM],
        responses=page_of(FineTuningEventSerializer),
    )
    def get(self, request: Request, job_id: str) -> Response:
        """List a job's events and the metrics of its steps, newest first; or stream them."""
        run = services.job_get(job_id)
        return page(request, run.events.all(), FineTuningEventSerializer, paging=_EVENTS)

    @classmethod
    async def answered(
        cls, request: GatewayRequest, work: Callable[[], HttpResponseBase]
    ) -> HttpResponseBase:
        stream = request.http.GET.get("stream", "false")
        if stream == "false":
            return await super().answered(request, work)
        if stream != "true":
            raise InvalidRequest("stream is true or false.", param="stream")
        job_id = request.http.resolver_match.kwargs["job_id"]  # type: ignore[union-attr]

        async def ask(after: str | None) -> Page:
            # Again each time: a key may be revoked while it streams.
            await request.authenticate(Permission.READ)
            return await query_in_thread(request.as_caller(lambda: _next(job_id, after)))

        after = request.http.GET.get("after") or request.http.headers.get("Last-Event-ID")
        return await live_events(request.principal.tenant.id, ask, after)


def _next(job_id: str, after: str | None) -> Page:
    """Return the events after one. Raises NotFound, InvalidRequest."""
    run = services.job_get(job_id)  # before its events: those of its end are there when it says so
    rows = run.events.order_by("pk")
    if after is not None:
        pk = parse_id(TrainingEvent.PREFIX, after)
        if pk is None:
            raise InvalidRequest("after is the id of an event.", param="after")
        rows = rows.filter(pk__gt=pk)
    found: list[Any] = [FineTuningEventSerializer(event).data for event in rows[:PAGE]]
    return Page(found, run.status not in TrainingRun.ACTIVE and len(found) < PAGE)


class JobCheckpointsView(GatewayAPIView):
    permissions: ClassVar = {"GET": Permission.READ}

    @extend_schema(
        "gateway_fine_tuning_job_checkpoints",
        _JOBS.parameters(),
        responses=page_of(FineTuningCheckpointSerializer),
    )
    def get(self, request: Request, job_id: str) -> Response:
        """List the models that a job made, newest first: its checkpoints and its result."""
        found = job_checkpoints(services.job_get(job_id))
        return page_of_items(request, found, FineTuningCheckpointSerializer, cursor="id")
