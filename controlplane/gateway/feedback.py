"""POST /v1/feedback: what a client's user thinks of an answer, or what it should have been."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from drf_spectacular.utils import extend_schema
from pydantic import AfterValidator, Field, model_validator
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.gateway.rest.fields import Constant
from controlplane.gateway.row_views import GatewayAPIView
from controlplane.inference import access
from controlplane.inference.bodies import Body, without_nul
from controlplane.requestlog import captured
from controlplane.requestlog.captured import MAX_ANSWER_CHARS
from controlplane.tenants.permissions import Permission

_ANSWER_FIELDS = {"role", "content", "tool_calls"}


def _is_answer(value: dict[str, Any]) -> dict[str, Any]:
    if value.keys() - _ANSWER_FIELDS or value.get("role", "assistant") != "assistant":
        raise ValueError("must be a message of the assistant: content, tool_calls")
    text = json.dumps(value)
    if len(text) > MAX_ANSWER_CHARS:
        raise ValueError(f"must have at most {MAX_ANSWER_CHARS} characters")
    without_nul(text.replace("\\u0000", "\0"))
    return value


Text = Annotated[str, Field(min_length=1, max_length=MAX_ANSWER_CHARS), AfterValidator(without_nul)]
Message = Annotated[dict[str, Any], Field(min_length=1), AfterValidator(_is_answer)]


class FeedbackBody(Body):
    """POST /v1/feedback."""

    request_id: Annotated[str, Field(min_length=1, max_length=64)]
    rating: Literal["good", "bad"] | None = None
    corrected_answer: Text | Message | None = None

    @model_validator(mode="after")
    def _says_something(self) -> FeedbackBody:
        if self.rating is None and self.corrected_answer is None:
            raise ValueError("rating: give it, or a corrected_answer")
        return self


class FeedbackSerializer(serializers.Serializer[captured.Given]):
    object = Constant("feedback")
    request_id = serializers.CharField()
    rating = serializers.ChoiceField(["good", "bad"], allow_null=True)
    is_captured = serializers.BooleanField(
        help_text="Whether the request is kept to train on. A corrected answer is stored only then."
    )
    has_corrected_answer = serializers.BooleanField()


class FeedbackView(GatewayAPIView):
    permissions: ClassVar = {"POST": Permission.INFER}

    @extend_schema("gateway_feedback", request=FeedbackBody, responses=FeedbackSerializer)
    def post(self, request: Request) -> Response:
        """Rate the answer to a request, or correct it; what is left out stays as it was.

        `request_id` is the response header x-request-id, or the answer's `id`. `corrected_answer`
        is a text, or an assistant's message with `content` or `tool_calls`.
        """
        body = self.body_of_write(FeedbackBody)
        given = captured.feedback_give(
            request_id=captured.request_id_of(body.request_id),
            rating=body.rating,
            answer=body.corrected_answer,
            may_name=lambda model: access.may_name(self.principal, model),
        )
        return Response(FeedbackSerializer(given).data)
