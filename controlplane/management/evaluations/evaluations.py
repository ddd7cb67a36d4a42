"""/api/v1/suites, /api/v1/evaluations and /api/v1/judges."""

from __future__ import annotations

import uuid
from typing import Any, ClassVar

from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.errors import InvalidRequest
from controlplane.evaluations import judge, services, suites
from controlplane.evaluations.comparison import Comparison, evaluations_compare, interval_json
from controlplane.evaluations.models import (
    Case,
    Evaluation,
    Judge,
    Result,
    Suite,
    SuiteVersion,
)
from controlplane.gateway.rest.fields import DescribedField
from controlplane.gateway.rest.paging import PAGE_PARAMETERS, page, page_of
from controlplane.management.base import BoundedJSONParser, StrictSerializer, TenantAPIView
from controlplane.tenants.auth import Permission

_SIDES = [
    OpenApiParameter("before", OpenApiTypes.UUID, required=True, description="An evaluation."),
    OpenApiParameter(
        "after", OpenApiTypes.UUID, required=True, description="The other evaluation."
    ),
]
_CASE_HELP = (
    "Each with `messages` as in a chat, `expected`, `checks` and `slice`; docs/evaluation.md has "
    "the checks."
)
_MAX_REQUESTS = 200


class SuiteSerializer(serializers.ModelSerializer[Suite]):
    object = serializers.CharField(default="suite", read_only=True)
    version = serializers.IntegerField(source="last_number", help_text="The newest version.")

    class Meta:
        model = Suite
        fields = ("id", "object", "name", "description", "version", "created_at")


class SuiteVersionSerializer(serializers.ModelSerializer[SuiteVersion]):
    object = serializers.CharField(default="suite_version", read_only=True)
    suite = serializers.CharField(source="suite.name")
    version = serializers.IntegerField(source="number")
    origin = serializers.DictField(help_text="The source of its cases.")
    has_requests = serializers.BooleanField(
        help_text="Whether its cases have words of requests: reading them and the answers "
        "needs requests:content."
    )

    class Meta:
        model = SuiteVersion
        fields = (
            "id", "object", "suite", "version", "num_cases", "num_bytes", "origin",
            "has_requests", "created_at",
        )  # fmt: skip


class CaseSerializer(serializers.ModelSerializer[Case]):
    object = serializers.CharField(default="case", read_only=True)
    messages = serializers.ListField(child=serializers.DictField())
    checks = serializers.ListField(child=serializers.DictField())

    class Meta:
        model = Case
        fields = ("id", "object", "position", "slice", "messages", "expected", "checks")


class FromDatasetSerializer(StrictSerializer):
    dataset = serializers.CharField(max_length=63)
    checks = serializers.ListField(child=serializers.DictField(), default=list)
    every = serializers.IntegerField(
        default=1, min_value=1, max_value=1000, help_text="Take every n-th row,"
    )
    offset = serializers.IntegerField(
        default=0, min_value=0, max_value=999, help_text="beginning with this one."
    )
    slice = serializers.CharField(default="", allow_blank=True, max_length=63)


class FromRequestsSerializer(StrictSerializer):
    requests = serializers.ListField(
        child=serializers.CharField(max_length=64), min_length=1, max_length=_MAX_REQUESTS
    )
    checks = serializers.ListField(child=serializers.DictField(), default=list)
    slice = serializers.CharField(default="", allow_blank=True, max_length=63)


class SuiteSetSerializer(StrictSerializer):
    description = serializers.CharField(required=False, allow_blank=True, max_length=500)
    cases = serializers.ListField(
        child=serializers.DictField(),
        required=False,
        max_length=suites.MAX_CASES,
        help_text=_CASE_HELP,
    )
    from_dataset = FromDatasetSerializer(
        required=False, help_text="The last answer of each row is the expected one."
    )
    from_requests = FromRequestsSerializer(
        required=False, help_text="Requests of the log; needs requests:content."
    )


class EvaluationSerializer(serializers.ModelSerializer[Evaluation]):
    object = serializers.CharField(default="evaluation", read_only=True)
    suite = serializers.CharField(source="suite_version.suite.name")
    suite_version = serializers.IntegerField(source="suite_version.number")
    num_cases = serializers.IntegerField(source="suite_version.num_cases")
    served = serializers.CharField(
        help_text="The exact model that `model` meant, to which all requests go."
    )
    summary = serializers.DictField(
        help_text="Means: `score` of all checks, `logprob` of a token of the expected answers, "
        "`checks` by type, `slices`; and the number of `errors`."
    )

    class Meta:
        model = Evaluation
        fields = (
            "id", "object", "model", "served", "suite", "suite_version", "status",
            "num_cases", "num_done", "summary", "error", "max_tokens", "seed",
            "created_at", "started_at", "finished_at",
        )  # fmt: skip


class EvaluationCreateSerializer(StrictSerializer):
    model = serializers.CharField(
        max_length=200, help_text="A version (`invoices@3`), an alias, an adapter or a base model."
    )
    suite = serializers.CharField(max_length=63)
    suite_version = serializers.IntegerField(
        required=False, allow_null=True, default=None, help_text="Left out: the newest version."
    )
    max_tokens = serializers.IntegerField(
        default=256,
        min_value=1,
        max_value=services.MAX_TOKENS,
        help_text="Most tokens of each answer.",
    )
    seed = serializers.IntegerField(default=0, min_value=0, max_value=services.MAX_SEED)


class ResultSerializer(serializers.ModelSerializer[Result]):
    object = serializers.CharField(default="evaluation_result", read_only=True)
    position = serializers.IntegerField(source="case.position", help_text="Slice of the case.")
    slice = serializers.CharField(source="case.slice")
    scores = serializers.ListField(
        child=serializers.FloatField(allow_null=True),
        help_text="Score of each check, from 0 to 1; null while a judge has not answered.",
    )
    logprob = serializers.FloatField(
        allow_null=True, help_text="Log-probability of the expected answer's tokens, summed."
    )

    class Meta:
        model = Result
        fields = (
            "id", "object", "position", "slice", "output", "finish_reason", "error",
            "scores", "score", "logprob", "num_tokens",
        )  # fmt: skip


_INTERVAL = {
    "type": "object",
    "properties": {
        "num": {"type": "integer", "description": "Cases that both have."},
        "mean": {"type": "number"},
        "low": {"type": "number"},
        "high": {"type": "number"},
        "smallest_drop": {"type": "number", "description": "The minimum detectable effect."},
    },
}


class _DifferenceSerializer(serializers.Serializer[Any]):
    metric = serializers.CharField(help_text="`score`, or `logprob`: of a token, in nats.")
    slice = serializers.CharField(help_text="Empty: all cases.")
    before = serializers.FloatField()
    after = serializers.FloatField()
    interval = DescribedField(
        _INTERVAL, help_text="Difference of `after` less `before`, case by case."
    )

    def to_representation(self, instance: Any) -> dict[str, Any]:
        told: dict[str, Any] = super().to_representation(instance)
        return {**told, "interval": interval_json(instance.interval)}


class _ChangedSerializer(serializers.Serializer[Any]):
    position = serializers.IntegerField(source="case.position")
    slice = serializers.CharField(source="case.slice")
    messages = serializers.ListField(source="case.messages", child=serializers.DictField())
    expected = serializers.CharField(source="case.expected")
    before = serializers.CharField(source="before.output")
    after = serializers.CharField(source="after.output")
    score_before = serializers.FloatField(source="before.score", allow_null=True)
    score_after = serializers.FloatField(source="after.score", allow_null=True)


class ComparisonSerializer(serializers.Serializer[Comparison]):
    object = serializers.CharField(default="evaluation_comparison", read_only=True)
    before = EvaluationSerializer()
    after = EvaluationSerializer()
    num_cases = serializers.IntegerField()
    num_better = serializers.IntegerField()
    num_worse = serializers.IntegerField()
    method = serializers.CharField(help_text="The method of the intervals.")
    differences = _DifferenceSerializer(many=True)
    changed = _ChangedSerializer(
        many=True,
        help_text="The answers that changed most; empty without the right to read the cases.",
    )


class JudgeSerializer(serializers.ModelSerializer[Judge]):
    object = serializers.CharField(default="judge", read_only=True)

    class Meta:
        model = Judge
        fields = ("id", "object", "name", "url", "model", "created_at")


class JudgeSetSerializer(StrictSerializer):
    url = serializers.CharField(
        max_length=480,
        help_text="Address of an OpenAI-compatible endpoint, up to /v1: https, a public host.",
    )
    model = serializers.CharField(max_length=200)
    api_key = serializers.CharField(
        required=False,
        allow_blank=True,
        help_text="It is not shown again. Left out: it stays; needed if `url` changes.",
    )


_WRITES = dict.fromkeys(("POST", "PUT", "DELETE"), Permission.TRAINING_WRITE)


class _EvaluationAPIView(TenantAPIView):
    permissions: ClassVar = _WRITES


class SuitesView(_EvaluationAPIView):
    @extend_schema("suites_list", PAGE_PARAMETERS, responses=page_of(SuiteSerializer))
    def get(self, request: Request) -> Response:
        """List the tenant's suites, newest first."""
        return page(request, Suite.objects.all(), SuiteSerializer)


class SuiteView(_EvaluationAPIView):
    @extend_schema(responses=SuiteSerializer)
    def get(self, request: Request, name: str) -> Response:
        return Response(SuiteSerializer(suites.suite_get(name=name)).data)

    @extend_schema(responses={204: None})
    def delete(self, request: Request, name: str) -> Response:
        """Delete the suite with its versions and evaluations. 409 while a gate or run needs it."""
        suites.suite_delete(suite=suites.suite_get(name=name))
        return Response(status=204)


class _CasesParser(BoundedJSONParser):
    """A parser of cases, which are longer than other bodies and have no Idempotency-Key."""

    max_bytes = 2 * 1024**2


class SuiteVersionsView(_EvaluationAPIView):
    parser_classes = (_CasesParser,)

    @extend_schema("suite_versions", PAGE_PARAMETERS, responses=page_of(SuiteVersionSerializer))
    def get(self, request: Request, name: str) -> Response:
        """List the suite's versions, newest first."""
        rows = SuiteVersion.objects.filter(suite=suites.suite_get(name=name))
        return page(request, rows.select_related("suite"), SuiteVersionSerializer)

    @extend_schema(request=SuiteSetSerializer, responses={201: SuiteVersionSerializer})
    def post(self, request: Request, name: str) -> Response:
        """Make the suite's next version: whole, from `cases`, dataset rows or logged requests.

        If there is no suite of this name, it is made.
        """
        body = SuiteSetSerializer.parsed(request)
        sources = [each for each in ("cases", "from_dataset", "from_requests") if each in body]
        if len(sources) != 1:
            raise InvalidRequest(
                "Send exactly one of cases, from_dataset, from_requests.", param="cases"
            )
        (cases, has_requests), origin = self._cases(body, sources[0])
        version = suites.suite_version_create(
            name=name,
            cases=cases,
            origin=origin,
            description=body.get("description"),
            created_by=self.principal.user,
            has_requests=has_requests,
        )
        return Response(SuiteVersionSerializer(version).data, status=201)

    def _cases(self, body: dict[str, Any], source: str) -> tuple[suites.Cases, dict[str, Any]]:
        if source == "cases":
            return suites.Cases(body["cases"]), {"kind": "api"}
        said = dict(body[source])
        if source == "from_dataset":
            name = said.pop("dataset")
            origin = {"kind": "dataset", "dataset": name, "every": said["every"]}
            cases = suites.cases_of_dataset(name=name, by=self.principal, **said)
            return cases, {**origin, "offset": said["offset"]}
        ids = said.pop("requests")
        cases = suites.cases_of_requests(request_ids=ids, by=self.principal, **said)
        return cases, {"kind": "requests", "requests": len(ids)}


class SuiteCasesView(_EvaluationAPIView):
    @extend_schema("suite_cases", PAGE_PARAMETERS, responses=page_of(CaseSerializer))
    def get(self, request: Request, name: str, number: int) -> Response:
        """List a version's cases, the last one first.

        If `has_requests` is true of the version, this needs requests:content.
        """
        suite = suites.suite_get(name=name)
        version = suites.suite_version_get(suite=suite, number=number)
        return page(request, suites.cases_of(version, by=self.principal), CaseSerializer)


class EvaluationsView(_EvaluationAPIView):
    permissions: ClassVar = {"POST": Permission.INFER}

    @extend_schema("evaluations_list", PAGE_PARAMETERS, responses=page_of(EvaluationSerializer))
    def get(self, request: Request) -> Response:
        """List the tenant's evaluations, newest first."""
        rows = Evaluation.objects.allowed().select_related("suite_version__suite")
        return page(request, rows, EvaluationSerializer)

    @extend_schema(request=EvaluationCreateSerializer, responses={201: EvaluationSerializer})
    def post(self, request: Request) -> Response:
        """Run a suite on a model.

        Its requests come after interactive ones; the tenant's limits and budgets hold for them.
        """
        body = EvaluationCreateSerializer.parsed(request)
        suite = suites.suite_get(name=body["suite"], param="suite")
        version = suites.suite_version_get(
            suite=suite, number=body["suite_version"], param="suite_version"
        )
        evaluation = services.evaluation_create(
            principal=self.principal,
            model=body["model"],
            suite_version=version,
            max_tokens=body["max_tokens"],
            seed=body["seed"],
            created_by=self.principal.user,
        )
        return Response(EvaluationSerializer(evaluation).data, status=201)


class EvaluationView(_EvaluationAPIView):
    permissions: ClassVar = {"DELETE": Permission.INFER}

    @extend_schema(responses=EvaluationSerializer)
    def get(self, request: Request, evaluation_id: uuid.UUID) -> Response:
        evaluation = services.evaluation_get(evaluation_id=evaluation_id)
        return Response(EvaluationSerializer(evaluation).data)

    @extend_schema(responses={204: None})
    def delete(self, request: Request, evaluation_id: uuid.UUID) -> Response:
        """Delete the evaluation with its results; a running one stops."""
        evaluation = services.evaluation_get(evaluation_id=evaluation_id)
        services.evaluation_delete(evaluation=evaluation)
        return Response(status=204)


class EvaluationCancelView(_EvaluationAPIView):
    permissions: ClassVar = {"POST": Permission.INFER}

    @extend_schema(request=None, responses=EvaluationSerializer)
    def post(self, request: Request, evaluation_id: uuid.UUID) -> Response:
        """Cancel an evaluation that waits or runs; its results so far stay."""
        evaluation = services.evaluation_get(evaluation_id=evaluation_id)
        evaluation = services.evaluation_cancel(evaluation=evaluation)
        return Response(EvaluationSerializer(evaluation).data)


class EvaluationResultsView(_EvaluationAPIView):
    @extend_schema("evaluation_results", PAGE_PARAMETERS, responses=page_of(ResultSerializer))
    def get(self, request: Request, evaluation_id: uuid.UUID) -> Response:
        """List the results of an evaluation's cases, the last one first.

        If `has_requests` is true of the suite's version, this needs requests:content.
        """
        evaluation = services.evaluation_get(evaluation_id=evaluation_id)
        rows = services.results_of(evaluation, by=self.principal)
        return page(request, rows, ResultSerializer)


class EvaluationComparisonView(_EvaluationAPIView):
    @extend_schema("evaluation_comparison", _SIDES, responses=ComparisonSerializer)
    def get(self, request: Request) -> Response:
        """Compare two evaluations of one version of a suite, case by case and by slice."""
        before, after = (self._side(request, name) for name in ("before", "after"))
        return Response(
            ComparisonSerializer(evaluations_compare(before, after, by=self.principal)).data
        )

    def _side(self, request: Request, name: str) -> Evaluation:
        try:
            found = uuid.UUID(request.query_params.get(name, ""))
        except ValueError:
            raise InvalidRequest("This must be the id of an evaluation.", param=name) from None
        return services.evaluation_get(evaluation_id=found, param=name)


class JudgesView(_EvaluationAPIView):
    @extend_schema("judges_list", PAGE_PARAMETERS, responses=page_of(JudgeSerializer))
    def get(self, request: Request) -> Response:
        """List the tenant's judges, newest first."""
        return page(request, Judge.objects.all(), JudgeSerializer)


class JudgeView(_EvaluationAPIView):
    @extend_schema(responses=JudgeSerializer)
    def get(self, request: Request, name: str) -> Response:
        return Response(JudgeSerializer(judge.judge_get(name=name)).data)

    @extend_schema(request=JudgeSetSerializer, responses=JudgeSerializer)
    def put(self, request: Request, name: str) -> Response:
        """Make or replace a judge: a model elsewhere that gives marks to answers.

        A judge of suites with words of requests needs requests:content.
        """
        body = JudgeSetSerializer.parsed(request)
        return Response(JudgeSerializer(judge.judge_set(name=name, by=self.principal, **body)).data)

    @extend_schema(responses={204: None})
    def delete(self, request: Request, name: str) -> Response:
        """Delete the judge; evaluations that still need it fail."""
        judge.judge_delete(judge=judge.judge_get(name=name))
        return Response(status=204)
