"""RequestValidator: refuses requests that can never run. No torch here."""

from __future__ import annotations

from collections.abc import Callable

from contract.ranges import Range
from engine.adapters.store import AdapterStore
from engine.config import EngineConfig
from engine.errors import ContextTooLong, OutOfPages, RequestError
from engine.grammar_text import parse_schema
from engine.memory.page_pool import PagePool, PageUse
from engine.memory.pinned_prefixes import PinnedPrefixes
from engine.model.config import ModelConfig
from engine.request import Pooling, Request


class RequestValidator:
    """Checks requests against the model, the adapters and the arena; changes nothing.

    end_ids    the tokens with which the model ends a text
    most_held  number of tokens -> the most pages that a sequence of them holds at a time
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        end_ids: frozenset[int],
        pool: PagePool,
        store: AdapterStore,
        pins: PinnedPrefixes,
        most_held: Callable[[int], int],
    ) -> None:
        self._config, self._model, self._end_ids = config, model, end_ids
        self._context_limit = config.context_limit(model)
        self._pool, self._store, self._pins = pool, store, pins
        self._most_held = most_held

    def check(self, request: Request) -> None:
        """Raise an error if the request can never run.

        The errors are InvalidPrompt, ContextTooLong, BadGrammar, UnknownAdapter, OutOfPages and
        RequestError.
        """
        request.check(self._model.vocab_size)
        if len(request.token_ids) >= self._context_limit:
            raise ContextTooLong(
                f"the prompt has {len(request.token_ids)} tokens; the context is "
                f"{self._context_limit} tokens, answer included",
                param="token_ids",
            )
        if request.json_schema is not None:
            parse_schema(request.json_schema)
        self._store.check_known(part.digest for part in request.adapters)
        max_adapters = self._config.max_adapters
        if max_adapters is not None and len(request.adapters) > max_adapters:
            raise RequestError(
                f"the request names {len(request.adapters)} adapters; {max_adapters} may run at a "
                "time",
                param="adapters",
            )
        self._check_heads(request)
        self._check_room(request)

    def _check_heads(self, request: Request) -> None:
        """Raise RequestError if there is no head for the vector that is wanted.

        A classifier may generate: its probe compares what the base's head makes of its LoRA.
        """
        wanted = request.vector
        if wanted is None:
            return
        heads = [self._store.num_labels(p.digest) for p in request.adapters if p.weight == 1.0]
        if wanted.classifies and not (len(request.adapters) == 1 and any(heads)):
            message = "only a single adapter with a classifier's head can classify"
            raise RequestError(message, param="adapters")
        size = Range(1, self._model.hidden_size, is_whole=True)
        if wanted.dimensions is not None and not size.has(wanted.dimensions):
            raise RequestError(f"dimensions must be {size}", param="dimensions")

    def pooling_of(self, request: Request) -> Pooling:
        """Return how it asks, or else its first adapter that says it, or else the model."""
        wanted = request.vector
        if wanted is not None and wanted.classifies:
            return Pooling.LAST  # as transformers' heads do
        said = (self._store.pooling(part.digest) for part in request.adapters)
        asked = wanted and wanted.pooling
        return asked or next(filter(None, said), self._model.pooling)

    def stop_ids(self, request: Request) -> frozenset[int]:
        """Return the tokens that end the request."""
        sampling = request.sampling
        end_ids = () if sampling.ignore_eos else self._end_ids
        return frozenset((*end_ids, *sampling.stop_token_ids))

    def _check_room(self, request: Request) -> None:
        """Raise OutOfPages unless the arena can hold a sequence of the request and its adapters."""
        num_tokens = len(request.token_ids) + 1
        num_kv = self._most_held(num_tokens)
        num_adapter = self._store.most_pages(part.digest for part in request.adapters)
        num_pinned = self._pins.num_lasting_pages
        if num_pinned:
            num_all = -(-num_tokens // self._config.page_size)
            # A request that asks for prompt_logprobs computes all of its prompt and shares no page;
            # one for a vector may have to.
            is_scored = request.sampling.prompt_logprobs is not None or request.vector is not None
            num_shared = 0 if is_scored else self._pins.num_shared(request)
            num_states = max(num_kv - num_all, 0)
            num_kv = min(num_kv, num_all + num_states - num_shared) + num_pinned
        pins = f", with the {num_pinned} that are pinned," if num_pinned else ""
        for name, param, wanted, limit in (
            (f"prompt{pins}", "token_ids", num_kv, self._pool.max_used(PageUse.KV)),
            ("adapters", "adapters", num_adapter, self._pool.max_used(PageUse.ADAPTER)),
            (f"prompt and adapters{pins}", "token_ids", num_kv + num_adapter, self._pool.num_pages),
        ):
            if wanted > limit:
                raise OutOfPages(
                    f"the request's {name} need {wanted} pages; there are {limit}", param=param
                )
