"""Grammars as masks over the vocabulary: Outlines in front, llguidance behind it.

Outlines' own index takes seconds for an ordinary nested schema and silently ignores several
keywords; its llguidance backend takes milliseconds and refuses what it does not enforce. Both are
imported, and the tokenizer is read, by `Grammars.prepare` or else for the first grammar. Grammars
compile on a thread of their own, outside the interpreter's lock; the step loop only advances
matchers.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.errors import BadGrammar
from engine.grammar_text import Grammar, GrammarKind, parser_limits
from engine.sequence import Sequence
from kernels import apply_bitmask

_MAX_CACHED = 256
_SMALLEST = Grammar(GrammarKind.REGEX, "a")


class Matcher:
    """One request's place in its grammar.

    error  set if the grammar turns out too costly to follow; the request must end then
    """

    def __init__(self, matcher: Any, eos_token_id: int, param: str = "json_schema") -> None:
        self._matcher = matcher
        self._param = param
        self.eos_token_id = eos_token_id
        self.error: BadGrammar | None = None

    def fill_mask(self, words: torch.Tensor) -> None:
        """Write the allowed next tokens into `words` [ceil(V / 32)] int32 on the CPU."""
        mask = self._matcher.compute_bitmask()
        if self._has_failed():
            words.fill_(-1)  # the token will be discarded
            return
        own, target = np.frombuffer(mask, dtype=np.int32), words.numpy()
        count = min(len(own), len(target))
        target[:count] = own[:count]
        target[count:] = 0

    def accept(self, token_id: int) -> bool:
        """Advance by a token that the mask allowed; return whether the text is complete.

        Raises BadGrammar if the grammar cannot be followed any further.
        """
        if self.error is None:
            self._matcher.consume_token(token_id)
        if self._has_failed():
            assert self.error is not None
            raise self.error
        return bool(self._matcher.is_stopped())

    def _has_failed(self) -> bool:
        if self.error is None and self._matcher.is_error():
            self.error = BadGrammar(
                f"the grammar cannot be followed: {self._matcher.get_error()}", param=self._param
            )
        return self.error is not None


class _Backend:
    """Outlines' llguidance backend over a tokenizer, or that of a model folder."""

    def __init__(self, tokenizer: Any) -> None:
        import llguidance
        from outlines.backends.llguidance import LLGuidanceBackend
        from outlines.models.transformers import Transformers
        from outlines.types import JsonSchema

        self._llguidance, self._json_schema = llguidance, JsonSchema
        self._limits = parser_limits(llguidance)
        if isinstance(tokenizer, Path):
            tokenizer = _read_tokenizer(tokenizer)
        # The backend takes an Outlines model but reads only its tokenizer.
        self._outlines = LLGuidanceBackend(Transformers(None, tokenizer))
        self.eos_token_id = int(tokenizer.eos_token_id)

    def compile(self, grammar: Grammar) -> Any:
        """Make a matcher, which may be in error; raise what the libraries raise."""
        source = grammar.source()
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                schema = self._json_schema(source).schema
                processor = self._outlines.get_json_schema_logits_processor(schema)
            case GrammarKind.REGEX:
                processor = self._outlines.get_regex_logits_processor(source)
            case GrammarKind.LARK:
                processor = self._outlines.get_cfg_logits_processor(source)
        return self._llguidance.LLMatcher(
            self._outlines.llg_tokenizer, processor.grammar, log_level=0, limits=self._limits
        )


def _read_tokenizer(folder: Path) -> Any:
    """Read the model folder's fast tokenizer.

    Avoids AutoTokenizer where it can: to choose a class, that imports a thousand modules.
    """
    if (folder / "tokenizer.json").exists():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(folder)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


class GrammarCompiler:
    """Compiles grammars on a thread and remembers the latest ones.

    Remembers them per tenant: the time that compiling takes reveals nothing of other tenants.

    tokenizer  a Hugging Face tokenizer, or the model folder that has one
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(
            1, thread_name_prefix="grammar", initializer=_let_others_go_first
        )
        self._backend: _Backend | None = None
        self._lock = threading.Lock()  # guards the cache, which both threads use
        self._cache: OrderedDict[tuple[str, Grammar], Any] = OrderedDict()

    def submit(self, grammar: Grammar, tenant_id: str = "") -> Future[Matcher]:
        """Compile a grammar; return the future of a matcher at its beginning.

        The future raises BadGrammar if it cannot be compiled or nothing satisfies it.
        """
        key = tenant_id, grammar
        with self._lock:
            compiled = self._cache.get(key)
            if compiled is not None:
                self._cache.move_to_end(key)
        if compiled is not None:
            ready: Future[Matcher] = Future()
            ready.set_result(self._matcher(compiled, grammar))
            return ready
        return self._threads.submit(self._compile, grammar, key)

    def prepare(self) -> Future[None]:
        """Import the libraries and read the tokenizer now, on the compiler's thread.

        A grammar that is submitted meanwhile waits for it. The future raises what importing the
        libraries or reading the tokenizer raises.
        """
        return self._threads.submit(self._prepare)

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _prepare(self) -> None:
        if self._backend is None:
            backend = _Backend(self._tokenizer)
            backend.compile(_SMALLEST)  # Outlines imports more modules for its first grammar
            self._backend = backend

    def _matcher(self, compiled: Any, grammar: Grammar) -> Matcher:
        assert self._backend is not None
        return Matcher(compiled.deep_copy(), self._backend.eos_token_id, grammar.param)

    def _compile(self, grammar: Grammar, key: tuple[str, Grammar]) -> Matcher:
        self._prepare()
        assert self._backend is not None
        with self._lock:
            compiled = self._cache.get(key)
        if compiled is not None:  # it was compiled while this call waited
            return self._matcher(compiled, grammar)
        try:
            compiled = self._backend.compile(grammar)
        except BadGrammar:
            raise
        except Exception as error:  # jsonschema and llguidance raise errors of their own
            raise BadGrammar(f"the grammar is not valid: {error}", param=grammar.param) from error
        is_possible = not compiled.is_error() and any(compiled.compute_bitmask())
        if compiled.is_error():  # from compiling or from computing the first mask
            raise BadGrammar(
                f"the grammar cannot be enforced: {compiled.get_error()}", param=grammar.param
            )
        if not is_possible:
            raise BadGrammar("nothing satisfies the grammar", param=grammar.param)
        with self._lock:
            self._cache[key] = compiled
            if len(self._cache) > _MAX_CACHED:
                self._cache.popitem(last=False)
        return self._matcher(compiled, grammar)


def _let_others_go_first() -> None:
    """Give this thread a third of the step loop's share of the processor.

    On Linux each thread has its own niceness.
    """
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)


class Grammars:
    """Owns the sequences' matchers, and knows which sequences wait for their grammar.

    tokenizer  a Hugging Face tokenizer, or the model folder that has one
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._compiler = GrammarCompiler(tokenizer)
        self._num_words = -(-vocab_size // 32)
        self._compiling: dict[Sequence, Future[Matcher]] = {}
        self._matchers: dict[Sequence, Matcher] = {}

    def prepare(self) -> Future[None]:
        """See GrammarCompiler.prepare."""
        return self._compiler.prepare()

    def add(self, sequence: Sequence) -> None:
        """Compile the sequence's grammar, if it has one; until then it waits."""
        grammar = sequence.request.grammar
        if grammar is not None:
            sequence.is_waiting_for_grammar = True
            self._compiling[sequence] = self._compiler.submit(grammar, sequence.request.tenant_id)

    def poll(self) -> list[tuple[Sequence, BaseException]]:
        """Take in compiled grammars; return the sequences whose grammar failed, with the error."""
        failed = []
        for sequence in [s for s, future in self._compiling.items() if future.done()]:
            future = self._compiling.pop(sequence)
            error = future.exception()
            if error is None:
                self._matchers[sequence] = future.result()
                sequence.is_waiting_for_grammar = False
            else:
                failed.append((sequence, error))
        return failed

    def matcher(self, sequence: Sequence) -> Matcher | None:
        return self._matchers.get(sequence)

    def mask(self, logits: torch.Tensor, sequences: SequenceOf[Sequence]) -> None:
        """Mask in `logits` [N, V], in place, the tokens that a row's grammar does not allow."""
        rows = [i for i, sequence in enumerate(sequences) if sequence in self._matchers]
        if not rows:
            return
        bitmask = torch.zeros(len(sequences), self._num_words, dtype=torch.int32)
        for i in rows:
            self._matchers[sequences[i]].fill_mask(bitmask[i])
        apply_bitmask(logits, bitmask.to(logits.device), torch.tensor(rows, device=logits.device))

    def remove(self, sequence: Sequence) -> None:
        self._matchers.pop(sequence, None)
        future = self._compiling.pop(sequence, None)
        if future is not None:
            future.cancel()

    def close(self) -> None:
        self._compiler.close()

    def check_integrity(self, known: Collection[Sequence]) -> None:
        """Raise AssertionError if it remembers a sequence that is not `known`."""
        assert self._matchers.keys() | self._compiling.keys() <= set(known)
