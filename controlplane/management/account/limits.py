"""/api/v1/limits and /api/v1/budgets."""

from __future__ import annotations

import uuid
from typing import Any, ClassVar

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.errors import NotFound
from controlplane.gateway.rest.paging import PAGE_PARAMETERS, page, page_of
from controlplane.management.base import StrictSerializer, TenantAPIView
from controlplane.management.fields import ChoiceField
from controlplane.tenants.auth import Permission
from controlplane.tenants.key_services import api_key_get
from controlplane.usage.limits import quotas, services
from controlplane.usage.limits.models import Budget, RateLimit

_MAX_INT, _MAX_BIGINT = 2**31 - 1, 2**63 - 1
_KEY_HELP = "The public id of the key it applies to; null: all keys of the tenant."
_MODEL_HELP = "`invoices` applies to every version, `invoices@3` to that one. Empty: all models."


_QUOTA_HELP = {
    "storage_bytes": "Bytes of files, adapters, datasets and saved states of training together.",
    "training_runs": "Training runs that wait or run.",
    "training_at_once": "Training runs that run at the same time.",
    "training_steps": "Steps of one training run.",
    "training_tokens": "Tokens of one training run: steps x batch_size x max_length.",
    "training_device_seconds": "Seconds of a GPU, or of a trainer without one, in 24 hours. Runs "
    "wait when they are used up.",
    "training_samples": "Answers that one run by reinforcement samples.",
    "grader_calls": "Calls of models that grade one run's answers.",
    "grading_seconds": "Seconds that the grading of one run's answers takes.",
    "adapter_checks": "Adapter versions that wait for their check.",
}


_STAYS = "Left out: it stays as it is."


class QuotaStateSerializer(serializers.Serializer[Any]):
    limit = serializers.IntegerField()
    used = serializers.IntegerField(
        required=False, help_text="The present use; absent from the limits of a single run."
    )


class QuotaSerializer(serializers.Serializer[Any]):
    object = serializers.CharField(default="quota", read_only=True)

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        own = {name: QuotaStateSerializer(help_text=text) for name, text in _QUOTA_HELP.items()}
        return {**super().get_fields(), **own}


class QuotaSetSerializer(StrictSerializer):
    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        own = {
            name: serializers.IntegerField(
                required=False,
                allow_null=True,
                min_value=0,
                max_value=_MAX_BIGINT if name in _LONG else _MAX_INT,
                help_text=f"{text} Null: the default of all tenants. {_STAYS}",
            )
            for name, text in _QUOTA_HELP.items()
        }
        return {**super().get_fields(), **own}


_LONG = ("storage_bytes", "training_tokens")


class LimitSerializer(serializers.ModelSerializer[RateLimit]):
    object = serializers.CharField(default="limit", read_only=True)
    api_key = serializers.CharField(
        source="api_key.public_id", default=None, allow_null=True, help_text=_KEY_HELP
    )
    model = serializers.CharField(help_text=_MODEL_HELP)

    class Meta:
        model = RateLimit
        fields = ("id", "object", "api_key", "model", *RateLimit.RATES, "created_at", "updated_at")


def _rate(help_text: str) -> serializers.IntegerField:
    return serializers.IntegerField(
        required=False,
        allow_null=True,
        min_value=1,
        max_value=_MAX_INT,
        help_text=f"{help_text} Null: not limited. {_STAYS}",
    )


class RatesSerializer(StrictSerializer):
    requests_per_minute = _rate("Requests that begin within a minute.")
    tokens_per_minute = _rate("Tokens, read and written, within a minute.")
    max_concurrent = _rate("Requests that are answered at the same time.")
    max_waiting = _rate("Requests that may wait for a worker.")


class LimitSetSerializer(RatesSerializer):
    api_key = serializers.CharField(
        required=False, allow_null=True, default=None, max_length=64, help_text=_KEY_HELP
    )
    model = serializers.CharField(
        required=False, default="", max_length=200, allow_blank=True, help_text=_MODEL_HELP
    )


class BudgetSerializer(serializers.ModelSerializer[Budget]):
    object = serializers.CharField(default="budget", read_only=True)
    api_key = serializers.CharField(
        source="api_key.public_id", default=None, allow_null=True, help_text=_KEY_HELP
    )

    class Meta:
        model = Budget
        fields = (
            "id", "object", "api_key", "period", "hard_limit", "soft_limit",
            "created_at", "updated_at",
        )  # fmt: skip


def _tokens(help_text: str) -> serializers.IntegerField:
    return serializers.IntegerField(
        required=False,
        allow_null=True,
        min_value=0,
        max_value=_MAX_BIGINT,
        help_text=f"{help_text} Null: none. {_STAYS}",
    )


class BudgetSetSerializer(StrictSerializer):
    api_key = serializers.CharField(
        required=False, allow_null=True, default=None, max_length=64, help_text=_KEY_HELP
    )
    period = ChoiceField(Budget.Period.choices, required=False, default=Budget.Period.MONTH)
    hard_limit = _tokens("Tokens above which requests are refused; 0: all are.")
    soft_limit = _tokens("Tokens above which responses have a warning header.")


class LimitsView(TenantAPIView):
    permissions: ClassVar = {"PUT": Permission.LIMITS_MANAGE}

    @extend_schema("limits_list", PAGE_PARAMETERS, responses=page_of(LimitSerializer))
    def get(self, request: Request) -> Response:
        """List the limits of the tenant, of keys and of models."""
        return page(request, services.rate_limits(), LimitSerializer)

    @extend_schema("limits_set", request=LimitSetSerializer, responses=LimitSerializer)
    def put(self, request: Request) -> Response:
        """Set the limits of one key, of one model, or of a key's use of a model.

        Fields left out stay as they are; null removes a limit. Only the operator can set the limits
        of the whole tenant.
        """
        body = LimitSetSerializer.parsed(request)
        row = services.rate_limit_set(
            api_key_id=_key_id(body["api_key"]),
            model=body["model"],
            by=self.principal,
            **{name: body[name] for name in RateLimit.RATES if name in body},
        )
        return Response(LimitSerializer(row).data)


class LimitView(TenantAPIView):
    permissions: ClassVar = {"DELETE": Permission.LIMITS_MANAGE}

    @extend_schema(responses=LimitSerializer)
    def get(self, request: Request, limit_id: uuid.UUID) -> Response:
        return Response(LimitSerializer(services.rate_limit_get(limit_id=limit_id)).data)

    @extend_schema(responses={204: None})
    def delete(self, request: Request, limit_id: uuid.UUID) -> Response:
        """Remove these limits."""
        services.limit_remove(services.rate_limit_get(limit_id=limit_id), by=self.principal)
        return Response(status=204)


class BudgetsView(TenantAPIView):
    permissions: ClassVar = {"PUT": Permission.LIMITS_MANAGE}

    @extend_schema("budgets_list", PAGE_PARAMETERS, responses=page_of(BudgetSerializer))
    def get(self, request: Request) -> Response:
        """List the budgets of the tenant and of its keys, in tokens."""
        return page(request, Budget.objects.select_related("api_key"), BudgetSerializer)

    @extend_schema("budgets_set", request=BudgetSetSerializer, responses=BudgetSerializer)
    def put(self, request: Request) -> Response:
        """Set the daily or monthly budget of the tenant, or of a key.

        Fields left out stay as they are; null removes a limit.
        """
        body = BudgetSetSerializer.parsed(request)
        row = services.budget_set(
            api_key_id=_key_id(body["api_key"]),
            period=body["period"],
            by=self.principal,
            **{name: body[name] for name in ("hard_limit", "soft_limit") if name in body},
        )
        return Response(BudgetSerializer(row).data)


class BudgetView(TenantAPIView):
    permissions: ClassVar = {"DELETE": Permission.LIMITS_MANAGE}

    @extend_schema(responses=BudgetSerializer)
    def get(self, request: Request, budget_id: uuid.UUID) -> Response:
        return Response(BudgetSerializer(services.budget_get(budget_id=budget_id)).data)

    @extend_schema(responses={204: None})
    def delete(self, request: Request, budget_id: uuid.UUID) -> Response:
        """Remove this budget."""
        services.limit_remove(services.budget_get(budget_id=budget_id), by=self.principal)
        return Response(status=204)


class QuotaView(TenantAPIView):
    @extend_schema("quota_retrieve", responses=QuotaSerializer)
    def get(self, request: Request) -> Response:
        """Return the tenant's quotas and their use. The operator sets quotas."""
        return Response(QuotaSerializer(quotas.quota_state()).data)


def _key_id(public_id: str | None) -> uuid.UUID | None:
    """Return the row id of a key; None for no key. Raises NotFound with the field."""
    try:
        return api_key_get(public_id=public_id).pk if public_id is not None else None
    except NotFound as error:
        error.param = "api_key"
        raise
