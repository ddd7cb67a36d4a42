"""Answers: a bounded memory of the answers that a tenant's adapters gave, for later drafts.

Only requests with `Request.remember` write to it and read from it. What it has is one tenant's own,
of one blend of adapters, in memory alone. No torch here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as SequenceOf

from engine.drafts.lookup import LookupIndex
from engine.memory.prefix_cache import AdapterKey
from engine.sequence import Sequence

_MAX_MEMORIES = 256
#: Largest number of tokens in one memory; beyond it the older half is dropped.
_MAX_TOKENS = 16_384
#: Stands behind each answer.
END = -1


class AnswerMemory:
    """The last answers of one tenant's adapters, and where their tokens stand in them."""

    __slots__ = ("index", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = [END]
        self.index = LookupIndex()

    def clear(self) -> None:
        """Forget everything, also for requests that are reading now."""
        self.token_ids, self.index = [END], LookupIndex()

    def add(self, answer: SequenceOf[int]) -> None:
        """Remember an answer's tokens; forget old ones if there are too many."""
        self.token_ids += [*answer[:_MAX_TOKENS], END]
        if len(self.token_ids) > _MAX_TOKENS:
            begin = len(self.token_ids) - _MAX_TOKENS // 2
            ends = (i for i in range(begin, len(self.token_ids)) if self.token_ids[i] == END)
            self.token_ids, self.index = self.token_ids[next(ends) :], LookupIndex()
        self.index.update(self.token_ids)


#: Tenant, adapters, and their registrations.
_Key = tuple[str, AdapterKey, tuple[int, ...]]


class AnswerMemories:
    """The memories used last, one for each tenant and adapters."""

    def __init__(self) -> None:
        self._memories: OrderedDict[_Key, AnswerMemory] = OrderedDict()

    def __len__(self) -> int:
        return len(self._memories)

    def of(self, sequence: Sequence) -> AnswerMemory | None:
        """Return the sequence's memory; None if it did not ask for one, or has no adapter."""
        request = sequence.request
        if not request.remember or not sequence.adapter_key:
            return None
        key = (request.tenant_id, sequence.adapter_key, sequence.versions)
        memory = self._memories.get(key)
        if memory is None:
            memory = self._memories[key] = AnswerMemory()
            if len(self._memories) > _MAX_MEMORIES:
                self._memories.popitem(last=False)
        self._memories.move_to_end(key)
        return memory

    def forget_adapter(self, digest: str) -> None:
        """Drop the answers of an adapter."""
        for key in list(self._memories):
            if any(digest == part for part, _ in key[1]):
                self._memories.pop(key).clear()

    def forget_tenant(self, tenant_id: str) -> None:
        """Drop a tenant's answers."""
        for key in list(self._memories):
            if key[0] == tenant_id:
                self._memories.pop(key).clear()
