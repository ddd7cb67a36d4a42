"""The defaults of an alias for requests that do not set them: schema, system prompt, sampling.

A body's own fields always hold. So does a system or developer message of its own, in place of the
alias's, and a `response_format`, also one of type text.
"""

from __future__ import annotations

import dataclasses
import json
import uuid
from typing import Any

from controlplane.adapters.resolution import no_such_model
from controlplane.aliases.models import AliasRevision
from controlplane.aliases.resolution import AliasPlan
from controlplane.inference.messages import Message
from controlplane.inference.schemas import ChatBody, CompletionBody
from controlplane.schemas import plan as plan_schema
from controlplane.tenancy import epochs
from controlplane.tenancy.lookup import Lookup

_SYSTEM_ROLES = ("system", "developer")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AliasDefaults:
    """The defaults of one revision.

    grammar   the job's fields for its schema
    sampling  fields of a body
    """

    grammar: dict[str, Any]
    system_message: Message | None
    sampling: dict[str, Any]
    num_bytes: int

    @property
    def is_empty(self) -> bool:
        return not (self.grammar or self.system_message or self.sampling)

    def filled(self, body: ChatBody | CompletionBody) -> ChatBody | CompletionBody:
        """Return the body with what it does not say."""
        given: dict[str, Any] = {
            name: value for name, value in self.sampling.items() if getattr(body, name) is None
        }
        if isinstance(body, ChatBody):
            if body.max_completion_tokens is not None:
                given.pop("max_tokens", None)
            if self.system_message is not None and not _has_system_message(body):
                given["messages"] = [self.system_message, *body.messages]
        return body.model_copy(update=given) if given else body


def _has_system_message(body: ChatBody) -> bool:
    return any(message.role in _SYSTEM_ROLES for message in body.messages)


#: By revision, which never changes. All keys share them.
_known: Lookup[uuid.UUID, AliasDefaults] = Lookup(
    fresh_s=float("inf"),
    max_entries=10_000,
    max_bytes=96 * 1024**2,
    num_bytes=lambda defaults: defaults.num_bytes,
)


def known_defaults(plan: AliasPlan) -> AliasDefaults | None:
    """Return the defaults of an alias's current revision; None if they are not in memory."""
    found = _known.fresh(plan.revision_id)
    return None if found is None else found[0]


def defaults_of(plan: AliasPlan) -> AliasDefaults:
    """Return the defaults of an alias's current revision, from the database if need be.

    Raises NotFound if it was deleted.
    """
    asked = epochs.stamp()
    found = known_defaults(plan) or _read(plan)
    _known.put(plan.revision_id, found, asked)  # so that those in use make room last
    return found


def _read(plan: AliasPlan) -> AliasDefaults:
    revision = AliasRevision.objects.filter(pk=plan.revision_id).first()
    if revision is None:
        raise no_such_model(plan.primary.name)
    prompt, schema = revision.system_prompt, revision.json_schema
    grammar: dict[str, Any] = {}
    if schema:
        made = plan_schema(json.loads(schema))
        grammar = {
            "json_schema": made.schema,
            "decoding_schema": made.decoding,
            "is_strict": made.is_enforced,
        }
    return AliasDefaults(
        grammar=grammar,
        system_message=Message(role="system", content=prompt) if prompt else None,
        sampling=revision.sampling,
        num_bytes=len(prompt) + sum(len(str(value)) for value in grammar.values()),
    )
