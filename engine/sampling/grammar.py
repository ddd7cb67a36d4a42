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
import re
import threading
from collections.abc import Collection, Iterable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from contract.tenant_cache import TenantCache
from engine.errors import BadGrammar, GrammarFailed
from engine.grammar_text import Grammar, GrammarKind, parser_limits
from engine.sampling.masks import Mask, Masked, MaskThreads, MaskTree
from engine.sampling.walk import Behind, Track, Walk
from engine.sequence import Sequence
from kernels import apply_bitmask

_MAX_CACHED = 256
_SMALLEST = Grammar(GrammarKind.REGEX, "a")


class Matcher:
    """One request's place in its grammar.

    inner  llguidance's
    tree, place  the masks of its grammar's places, and which of them this is
    track  moves llguidance's on
    error  set if the grammar cannot be followed any further; the request must end then
    """

    def __init__(
        self,
        inner: Any,
        eos_token_id: int,
        tree: MaskTree | None = None,
    ) -> None:
        self.track = Track(inner)
        self.tree, self.place = tree or MaskTree(), 0
        self.eos_token_id = eos_token_id
        self.error: GrammarFailed | None = None
        self._mask: Mask | None = None  # at this place, once it was computed

    @property
    def inner(self) -> Any:
        """llguidance's, at this place; not to be moved."""
        track = self.track
        return track.here() if track.ahead else track.end

    @property
    def mask(self) -> Mask:
        """The allowed next tokens; of no use if the matcher has failed."""
        if not self.knows_mask:
            self.note_mask(Mask.of(self.inner.compute_bitmask()))
        assert self._mask is not None
        return self._mask

    @property
    def key(self) -> tuple[int, int]:
        """The same for all that are at this place."""
        return id(self.tree), self.place

    @property
    def knows_mask(self) -> bool:
        """Return whether `mask` need not be computed."""
        if self._mask is None:
            self._mask = self.tree.get(self.place)
        return self._mask is not None

    def note_mask(self, mask: Mask) -> None:
        """Note what `mask` is at this place."""
        self._mask = mask
        if not self._has_failed():
            self.tree.put(self.place, mask)

    def walk(self) -> Walk | None:
        """Return the place on which drafts move on from this one; None if the matcher has failed.

        This place stays where it is.
        """
        return None if self._has_failed() else Walk(self)

    def fill_mask(self, words: npt.NDArray[np.int32]) -> None:
        """Write the allowed next tokens into `words` [ceil(V / 32)]."""
        mask = self._mask or self.mask
        if self._has_failed():
            words.fill(-1)  # the token will be discarded
        else:
            mask.write(words)

    @property
    def few(self) -> tuple[int, ...] | None:
        """The allowed next tokens; None if they are many, or the matcher has failed."""
        few = (self._mask or self.mask).few
        return None if few is None or self._has_failed() else few

    def behind(self, drafts: SequenceOf[int]) -> Behind | None:
        """Return the place behind drafts; None if the grammar cannot be followed there."""
        if self._has_failed():
            return None
        track, count = self.track, len(drafts)
        if track.ahead[:count] == list(drafts):
            mask = track.masks[count - 1]
            if mask is not None:
                return Behind(track.end, self.tree, self.place, mask)
            inner = track.here(count)
        else:
            inner = self.inner.deep_copy()
            if inner.try_consume_tokens(list(drafts)) != count:
                return None
        place = self.place
        for token_id in drafts:
            place = self.tree.behind(place, token_id)
        return Behind(inner, self.tree, place)

    def masks_ahead(self, drafts: SequenceOf[int]) -> SequenceOf[Mask | None] | None:
        """Return the masks behind drafts, as far as a walk has left them; None if none went there.

        None stands for those that are not known.
        """
        track, count = self.track, len(drafts)
        if track.ahead[:count] != list(drafts) or self._has_failed():
            return None
        return track.masks[:count]

    def masks_behind(self, drafts: SequenceOf[int], wanted: SequenceOf[bool]) -> list[Mask | None]:
        """Return the masks behind the first draft, the second one and so on.

        Shorter if a draft is not legal or the grammar cannot be followed there. This place stays
        where it is.

        wanted  whether the mask behind a draft is needed; None stands for the others
        """
        if self._has_failed():
            return []
        known = self.masks_ahead(drafts) or [None] * len(drafts)
        masks: list[Mask | None] = []
        copy = self.inner.deep_copy()
        for token_id, mask, is_wanted in zip(drafts, known, wanted, strict=True):
            if copy.try_consume_tokens([token_id]) != 1:
                break
            if mask is None and is_wanted:
                mask = Mask.of(copy.compute_bitmask())
                if copy.is_error():
                    break
            masks.append(mask)
        return masks

    def accept(self, token_id: int) -> bool:
        """Advance by a token that the mask allowed; return whether the text is complete.

        Raises GrammarFailed if the grammar cannot be followed any further.
        """
        self.place = self.tree.behind(self.place, token_id)
        track = self.track
        self._mask = track.take(token_id) if self.error is None else None
        if track.ahead:  # drafts have followed from here
            return False
        if self.error is None and not track.end.is_error():
            return bool(track.end.is_stopped())
        self._has_failed()
        assert self.error is not None
        raise self.error

    def _has_failed(self) -> bool:
        if self.error is not None:
            return True
        if not self.track.end.is_error():  # as nearly always
            return False
        if self.track.has_failed():
            reason = re.match(r"\w*", self.track.end.get_error())  # what follows quotes the answer
            self.error = GrammarFailed(reason[0] if reason else "")
        return self.error is not None


class _Backend:
    """Outlines' llguidance backend over a tokenizer, or that of a model folder."""

    def __init__(self, tokenizer: Any) -> None:
        import llguidance
        from outlines.backends.llguidance import LLGuidanceBackend
        from outlines.models.transformers import Transformers

        self._llguidance = llguidance
        self._limits = parser_limits(llguidance)
        if isinstance(tokenizer, Path):
            tokenizer = _read_tokenizer(tokenizer)
        # The backend takes an Outlines model but reads only its tokenizer.
        self._outlines = LLGuidanceBackend(Transformers(None, tokenizer))
        self.eos_token_id = int(tokenizer.eos_token_id)
        self.num_words = -(-self._outlines.llg_tokenizer.vocab_size // 32)  # length of a mask

    def compile(self, grammar: Grammar) -> Any:
        """Make a matcher, which may be in error; raise what the libraries raise."""
        source = grammar.source()
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                # Not through Outlines' JsonSchema: it compiles each pattern by `re`, whose cache of
                # the whole process tells by time what another tenant compiled.
                processor = self._outlines.get_json_schema_logits_processor(source)
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


#: llguidance's matcher at a grammar's beginning, and the masks of its places.
_Compiled = tuple[Any, MaskTree]


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
        self._cache: TenantCache[Grammar, _Compiled] = TenantCache(_MAX_CACHED)

    def submit(self, grammar: Grammar, tenant_id: str = "") -> Future[Matcher]:
        """Compile a grammar; return the future of a matcher at its beginning.

        The future raises BadGrammar if it cannot be compiled or nothing satisfies it.
        """
        compiled = self._cache.get(tenant_id, grammar)
        if compiled is not None:
            ready: Future[Matcher] = Future()
            ready.set_result(self._matcher(compiled))
            return ready
        return self._threads.submit(self._compile, grammar, tenant_id)

    def prepare(self) -> Future[None]:
        """Import the libraries and read the tokenizer now, on the compiler's thread.

        A grammar that is submitted before that is done waits for it. The future raises what
        importing the libraries or reading the tokenizer raises.
        """
        return self._threads.submit(self._prepare)

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _prepare(self) -> None:
        if self._backend is None:
            backend = _Backend(self._tokenizer)
            backend.compile(_SMALLEST)  # Outlines imports more modules for its first grammar
            self._backend = backend

    def _matcher(self, compiled: _Compiled) -> Matcher:
        assert self._backend is not None
        inner, tree = compiled
        return Matcher(inner.deep_copy(), self._backend.eos_token_id, tree)

    def _compile(self, grammar: Grammar, tenant_id: str) -> Matcher:
        self._prepare()
        assert self._backend is not None
        compiled = self._cache.get(tenant_id, grammar)
        if compiled is not None:  # it was compiled while this call waited
            return self._matcher(compiled)
        try:
            matcher = self._backend.compile(grammar)
        except BadGrammar:
            raise
        except Exception as error:  # llguidance raises errors of its own
            raise BadGrammar(f"the grammar is not valid: {error}", param=grammar.param) from error
        first = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():  # from compiling or from computing the first mask
            raise BadGrammar(
                f"the grammar cannot be enforced: {matcher.get_error()}", param=grammar.param
            )
        if not any(first):
            raise BadGrammar("nothing satisfies the grammar", param=grammar.param)
        compiled = matcher, MaskTree(Mask.of(first), self._backend.num_words)
        self._cache.put(tenant_id, grammar, compiled)
        return self._matcher(compiled)


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
        self._threads = MaskThreads()
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
        if not any(sequence in self._matchers for sequence in sequences):
            return
        bitmask = torch.zeros(len(sequences), self._num_words, dtype=torch.int32)
        rows = self.fill_masks(bitmask.numpy(), sequences)
        apply_bitmask(logits, bitmask.to(logits.device), torch.tensor(rows, device=logits.device))

    def fill_masks(
        self, words: npt.NDArray[np.int32], sequences: SequenceOf[Sequence]
    ) -> list[int]:
        """Write the masks of those that have a grammar into their rows; return these rows.

        words  [N or more, ceil(V / 32)]; the other rows are left as they are
        """
        rows = [i for i, sequence in enumerate(sequences) if sequence in self._matchers]
        self.compute_masks(sequences)
        for i in rows:
            self._matchers[sequences[i]].fill_mask(words[i])
        return rows

    def compute_masks(self, sequences: Iterable[Sequence], behind: Iterable[Masked] = ()) -> None:
        """Compute the next masks of those that have a grammar, and others, unless they are known.

        Together, on threads.
        """
        own = map(self._matchers.get, sequences)
        self._threads.compute([*(matcher for matcher in own if matcher is not None), *behind])

    def consume(self, tokens: Iterable[tuple[Sequence, int]]) -> None:
        """Let llguidance's matchers take the tokens that `Matcher.accept` will be given next.

        Together, on threads, where no drafts have taken them before.
        """
        own = []
        for sequence, token_id in tokens:
            matcher = self._matchers.get(sequence)
            if matcher is not None and matcher.error is None and not matcher.track.ahead:
                own.append((matcher.track, token_id))
        if self._threads.consume([(track.end, token_id) for track, token_id in own]):
            for track, token_id in own:
                track.note_taken(token_id)

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
