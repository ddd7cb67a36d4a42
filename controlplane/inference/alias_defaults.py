"""What an alias gives to requests that do not say it themselves: schema, system prompt, sampling.

A body's own fields always hold. So does a system or developer message of its own, in place of the
alias's, and a `response_format`, also one of type text.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import threading
import uuid
from typing import Any

from controlplane.adapters.resolution import no_such_model
from controlplane.aliases.models import AliasRevision
from controlplane.aliases.resolution import AliasPlan
from controlplane.inference.messages import Message
from controlplane.inference.schemas import ChatBody, CompletionBody
from controlplane.schemas import plan as plan_schema

_MAX_KEPT = 1000
_MAX_KEPT_BYTES = 32 * 1024**2
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


#: By revision, which never changes; those that were not asked for longest come first.
_kept: collections.OrderedDict[uuid.UUID, AliasDefaults] = collections.OrderedDict()
_keeping = threading.Lock()


def defaults_of(plan: AliasPlan) -> AliasDefaults | None:
    """Return the defaults of an alias's current revision, None if it has none.

    Queries when they are not in memory: all keys share them. Raises NotFound if it was deleted.
    """
    with _keeping:
        found = _kept.pop(plan.revision_id, None)
        if found is not None:
            _kept[plan.revision_id] = found
    if found is None:
        found = _read(plan)
        with _keeping:
            _kept[plan.revision_id] = found
            while len(_kept) > _MAX_KEPT or _sum_of_bytes() > _MAX_KEPT_BYTES:
                _kept.popitem(last=False)
    is_empty = not (found.grammar or found.system_message or found.sampling)
    return None if is_empty else found


def _sum_of_bytes() -> int:
    return sum(kept.num_bytes for kept in _kept.values())


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
