"""/api/v1/aliases."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from django.db.models import Prefetch
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from contract.messages.sampling import MAX_ADAPTERS, WEIGHT
from controlplane.aliases import services
from controlplane.aliases.contents import Contents, Part, contents_of
from controlplane.aliases.models import Alias, AliasRevision, is_current
from controlplane.gateway.rest.fields import DescribedField
from controlplane.gateway.rest.paging import PAGE_PARAMETERS, page, page_of
from controlplane.management.base import StrictSerializer, TenantAPIView
from controlplane.management.canaries import GuardSerializer, GuardSetField
from controlplane.management.fields import ChoiceField
from controlplane.management.residency import PrefetchedSerializer
from controlplane.queue.placement.residency import (
    Prefetched,
    before_alias_rollback,
    before_alias_switch,
    before_canary,
)
from controlplane.tenants.auth import Permission

_PART = {
    "type": "object",
    "required": ["adapter"],
    "properties": {
        "adapter": {"type": "string"},
        "version": {
            "type": ["integer", "null"],
            "description": "Its number; null or left out: whichever version is live.",
        },
        "weight": {
            "type": "number",
            "minimum": WEIGHT.least,
            "maximum": WEIGHT.most,
            "default": 1,
        },
    },
}
_TARGET = {
    "type": "array",
    "items": _PART,
    "maxItems": MAX_ADAPTERS,
    "description": "The target: the exact weighted sum of these adapters. Requests may send a "
    "single adapter without the list.",
}


class TargetField(DescribedField):
    """A target, as an adapter or a list of them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(_TARGET, **options)

    def to_internal_value(self, data: Any) -> tuple[Part, ...]:
        parts = data if isinstance(data, list) else [data]
        if len(parts) > MAX_ADAPTERS:
            raise serializers.ValidationError(f"A blend can have at most {MAX_ADAPTERS} adapters.")
        return tuple(map(self._part, parts))

    def _part(self, data: Any) -> Part:
        if not isinstance(data, Mapping) or not isinstance(data.get("adapter"), str):
            raise serializers.ValidationError(
                'A target must be {"adapter": …, "version": …}, or a list of them.'
            )
        for name in data:
            if name not in ("adapter", "version", "weight"):
                raise serializers.ValidationError(
                    f"There is no field {str(name)[:100]}: remove it."
                )
        version, weight = data.get("version"), data.get("weight", 1.0)
        if version is not None and type(version) is not int:
            raise serializers.ValidationError("A version must be a whole number.")
        if type(weight) not in (int, float):
            raise serializers.ValidationError("A weight must be a number.")
        return Part(adapter=data["adapter"], version=version, weight=float(weight))

    def to_representation(self, value: Any) -> Any:
        return [
            {"adapter": part.adapter, "version": part.version, "weight": part.weight}
            for part in value
        ]


class _ContentsSerializer(serializers.Serializer[AliasRevision]):
    """The contents of a revision, without its long texts."""

    base_model = serializers.CharField(source="base_model.name")
    primary = TargetField(source="said.primary")
    canary = TargetField(source="said.canary")
    canary_percent = serializers.IntegerField(
        help_text="Percent of the callers whom the canary answers."
    )
    sampling = serializers.DictField(help_text="Defaults of requests that do not set them.")
    warmth = serializers.CharField(
        help_text="Where workers keep its adapters while nobody asks: `pinned` on the GPUs, `warm` "
        "in memory, `cold` nowhere."
    )
    guard = GuardSerializer(source="said.whole_guard")

    def to_representation(self, instance: AliasRevision) -> dict[str, Any]:
        instance.said = contents_of(instance)  # type: ignore[attr-defined]
        return super().to_representation(instance)


class _LongSerializer(serializers.Serializer[AliasRevision]):
    json_schema = serializers.DictField(
        source="said.json_schema",
        allow_null=True,
        help_text="Answers obey it if a request has no `response_format`.",
    )
    system_prompt = serializers.CharField(help_text="Added to chats without a system message.")


class AliasSerializer(_ContentsSerializer):
    id = serializers.UUIDField(source="alias_id")
    object = serializers.CharField(default="alias", read_only=True)
    name = serializers.CharField(source="alias.name")
    revision = serializers.IntegerField(source="number", help_text="The current revision.")
    created_at = serializers.DateTimeField(source="alias.created_at")
    updated_at = serializers.DateTimeField(source="alias.updated_at")


class AliasDetailSerializer(AliasSerializer, _LongSerializer):
    pass


class AliasSwitchedSerializer(AliasDetailSerializer):
    prefetched = PrefetchedSerializer(
        allow_null=True,
        help_text="The workers that had the revision's adapters on the GPU before the switch; null "
        "if there was nothing to load.",
    )


class _AliasRowSerializer(serializers.Serializer[Alias]):
    """An alias of a list: its current revision comes with the page's query."""

    def to_representation(self, alias: Alias) -> dict[str, Any]:
        return AliasSerializer(alias.current[0]).data  # type: ignore[attr-defined]


class AliasRevisionSerializer(_ContentsSerializer):
    id = serializers.UUIDField()
    object = serializers.CharField(default="alias_revision", read_only=True)
    alias = serializers.CharField(source="alias.name")
    revision = serializers.IntegerField(source="number")
    is_current = serializers.SerializerMethodField()
    cause = serializers.CharField()
    reason = serializers.CharField()
    copied_from = serializers.IntegerField(
        allow_null=True, help_text="The revision that a rollback copied."
    )
    actor_type = serializers.CharField()
    actor_name = serializers.CharField()
    created_at = serializers.DateTimeField()

    def get_is_current(self, revision: AliasRevision) -> bool:
        return revision.number == revision.alias.revision_number


class AliasRevisionDetailSerializer(AliasRevisionSerializer, _LongSerializer):
    pass


class _ReasonSerializer(StrictSerializer):
    reason = serializers.CharField(
        required=False,
        default="",
        allow_blank=True,
        max_length=services.MAX_REASON_CHARS,
        help_text="The reason, which the revision shows.",
    )


class AliasActionSerializer(_ReasonSerializer):
    if_revision = serializers.IntegerField(
        required=False, allow_null=True, default=None, help_text="409 if another one is current."
    )


class _AliasContentsSerializer(StrictSerializer):
    canary = TargetField(required=False, allow_null=True)
    canary_percent = serializers.IntegerField(required=False, min_value=0, max_value=100)
    json_schema = serializers.DictField(
        required=False,
        allow_null=True,
        help_text="Each keyword must be enforced while decoding, as in a strict `response_format`.",
    )
    system_prompt = serializers.CharField(required=False, allow_blank=True, trim_whitespace=False)
    sampling = serializers.DictField(
        required=False,
        help_text="Defaults of `temperature`, `top_p`, `max_tokens`, `stop` and the like.",
    )
    warmth = ChoiceField(AliasRevision.Warmth.choices, required=False)
    guard = GuardSetField(required=False)


class AliasCreateSerializer(_AliasContentsSerializer, _ReasonSerializer):
    name = serializers.CharField(max_length=63)
    primary = TargetField()


class AliasChangeSerializer(_AliasContentsSerializer, AliasActionSerializer):
    primary = TargetField(required=False)
    force = serializers.BooleanField(
        required=False, default=False, help_text="Allow a schema that breaks callers."
    )


class AliasRampSerializer(AliasActionSerializer):
    percent = serializers.IntegerField(min_value=0, max_value=100)


class AliasRollbackSerializer(AliasActionSerializer):
    revision = serializers.IntegerField(
        required=False,
        allow_null=True,
        default=None,
        min_value=1,
        help_text="The revision to copy; left out: the one before.",
    )


_FIELDS = (
    "primary",
    "canary",
    "canary_percent",
    "json_schema",
    "system_prompt",
    "sampling",
    "warmth",
    "guard",
)


def _contents(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents from a request's body."""
    said = {name: body[name] for name in _FIELDS if name in body}
    if said.get("canary", ()) is None:
        said["canary"] = ()
    return said


def _answer(alias: Alias) -> Response:
    return Response(AliasDetailSerializer(services.revision_get(alias=alias)).data)


def _switched(alias: Alias, prefetched: Prefetched | None, status: int = 200) -> Response:
    told = None if prefetched is None else dataclasses.asdict(prefetched)
    body = AliasDetailSerializer(services.revision_get(alias=alias)).data
    return Response({**body, "prefetched": told}, status=status)


class _AliasAPIView(TenantAPIView):
    permissions: ClassVar = dict.fromkeys(("POST", "PATCH", "DELETE"), Permission.ADAPTERS_WRITE)


class AliasesView(_AliasAPIView):
    @extend_schema("aliases_list", PAGE_PARAMETERS, responses=page_of(AliasSerializer))
    def get(self, request: Request) -> Response:
        """List the tenant's aliases, newest first."""
        current = AliasRevision.objects.allowed().filter(is_current())
        current = current.defer("json_schema", "system_prompt")
        current = current.select_related("alias", "base_model").prefetch_related("parts")
        rows = Alias.objects.allowed().prefetch_related(
            Prefetch("revisions", current, to_attr="current")
        )
        return page(request, rows, _AliasRowSerializer)

    @extend_schema(request=AliasCreateSerializer, responses={201: AliasSwitchedSerializer})
    def post(self, request: Request) -> Response:
        """Make an alias: a name for requests, and its targets.

        The name is free, or that of one of the tenant's adapters: then each target must have a
        version of this adapter.
        """
        body = AliasCreateSerializer.parsed(request)
        said = _contents(body)
        contents = Contents(**said).checked()
        prefetched = before_alias_switch(contents.parts)
        alias = services.alias_create(name=body["name"], contents=contents, reason=body["reason"])
        return _switched(alias, prefetched, 201)


class AliasView(_AliasAPIView):
    @extend_schema(responses=AliasDetailSerializer)
    def get(self, request: Request, name: str) -> Response:
        """Return an alias with its current revision."""
        return _answer(services.alias_get(name=name))

    @extend_schema(request=AliasChangeSerializer, responses=AliasSwitchedSerializer)
    def patch(self, request: Request, name: str) -> Response:
        """Make a revision with these fields changed, and switch to it.

        The workers load new targets first, as when a version is promoted. Every gateway uses it
        within a second; running requests finish on what they began with. Without a difference
        nothing changes. 409 `breaking_schema`: see `force`.
        """
        body = AliasChangeSerializer.parsed(request)
        said = _contents(body)
        found = services.alias_get(name=name)
        prefetched = before_alias_switch((*said.get("primary", ()), *said.get("canary", ())))
        alias = services.alias_change(
            alias=found,
            changes=said,
            reason=body["reason"],
            if_revision=body["if_revision"],
            is_forced=body["force"],
        )
        return _switched(alias, prefetched)

    @extend_schema(responses={204: None})
    def delete(self, request: Request, name: str) -> Response:
        """Delete the alias with its revisions. An adapter of its name answers again."""
        services.alias_delete(alias=services.alias_get(name=name))
        return Response(status=204)


class AliasRevisionsView(_AliasAPIView):
    @extend_schema("alias_revisions", PAGE_PARAMETERS, responses=page_of(AliasRevisionSerializer))
    def get(self, request: Request, name: str) -> Response:
        """List the alias's revisions with author, time and reason; newest first."""
        rows = AliasRevision.objects.allowed().filter(alias=services.alias_get(name=name))
        rows = rows.select_related("alias", "base_model").prefetch_related("parts")
        return page(request, rows, AliasRevisionSerializer)


class AliasRevisionView(_AliasAPIView):
    @extend_schema("alias_revision", responses=AliasRevisionDetailSerializer)
    def get(self, request: Request, name: str, number: int) -> Response:
        """Return one revision, whole."""
        alias = services.alias_get(name=name)
        revision = services.revision_get(alias=alias, number=number)
        return Response(AliasRevisionDetailSerializer(revision).data)


class AliasRollbackView(_AliasAPIView):
    @extend_schema(request=AliasRollbackSerializer, responses=AliasSwitchedSerializer)
    def post(self, request: Request, name: str) -> Response:
        """Make a revision that copies an earlier one; a second call goes back further.

        It may restore a schema that breaks callers. 409 `version_not_ready` or `target_deleted` if
        a version of it cannot answer any more.
        """
        body = AliasRollbackSerializer.parsed(request)
        found, number = services.alias_get(name=name), body["revision"]
        prefetched = before_alias_rollback(found, number)
        alias = services.alias_roll_back(
            alias=found, number=number, reason=body["reason"], if_revision=body["if_revision"]
        )
        return _switched(alias, prefetched)


class AliasRampView(_AliasAPIView):
    @extend_schema(request=AliasRampSerializer, responses=AliasSwitchedSerializer)
    def post(self, request: Request, name: str) -> Response:
        """Set the percent of the callers whom the canary answers.

        A higher percent moves callers from the primary to the canary, and none back.
        """
        body = AliasRampSerializer.parsed(request)
        found = services.alias_get(name=name)
        prefetched = before_canary(found) if body["percent"] else None
        alias = services.alias_ramp(
            alias=found,
            percent=body["percent"],
            reason=body["reason"],
            if_revision=body["if_revision"],
        )
        return _switched(alias, prefetched)


class AliasPromoteCanaryView(_AliasAPIView):
    @extend_schema(request=AliasActionSerializer, responses=AliasSwitchedSerializer)
    def post(self, request: Request, name: str) -> Response:
        """Make the canary the primary.

        If the primary is an adapter's live version, and the canary a version of the same adapter,
        this version becomes live.
        """
        body = AliasActionSerializer.parsed(request)
        found = services.alias_get(name=name)
        prefetched = before_canary(found)
        alias = services.canary_promote(
            alias=found, reason=body["reason"], if_revision=body["if_revision"]
        )
        return _switched(alias, prefetched)
