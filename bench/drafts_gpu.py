"""Measure on a GPU what drafts give, and what grammars cost, at Llama-3.1-8B's shape.

    python -m bench.drafts_gpu --tokenizer tokenizer.json [--rounds 3] [--only TEXT] [--out FILE]

The weights and the adapters are random, so acceptance is planted, or forced by a grammar. Each case
says which. Needs llguidance, not Outlines; grammars cut text by the given tokenizer. Every case
runs the same requests with drafts off and on, in turns, on one engine. `ms_token` is the wall time
per emitted token and client while all of them write: from the first step after which each has a
token to the first end of an answer, divided by the tokens of one client in it. With drafts answers
do not end together, and a step for the last few costs what a full one does. `ms_token_whole` is of
everything, prompts and ends included.

    exact    a small model in fp32: the tokens with drafts, and beside other rows, are those of
             drafts off; greedy and drawn
    masks    rows with a schema each, and the same rows without: `share` is what the masks add
    forced   JSON, some of whose tokens its schema forces; no other drafts are right
    planted  free text; of each step's drafts the first two are taken to be right
    heads    the same, but drafts are the guesses of the adapter's two random heads
    zero     free text at a high temperature, of which no draft is right

Behind the rounds each case runs once more with drafts for its `profile`: ms per step of the host's
stages (`bench.stages`) and of the device's passes, and rows of a step. Writes each finished case at
once and exits with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shutil
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file

from bench.device import provenance, write_whole
from bench.engine import Bench
from bench.stages import Stages
from bench.workload import random_prompts
from contract.draft_heads import head_names
from engine import AdapterPart, Request, SamplingParams
from engine.drafts.heads import HEADS as HEAD_KINDS
from engine.drafts.profile import Kind, Source
from engine.drafts.proposer import Proposal
from engine.execution import runner
from engine.execution.verification import on_device
from engine.grammar_text import Grammar, GrammarKind, parser_limits
from engine.sampling import grammar
from engine.sampling.sampler import Sampled
from engine.sequence import Sequence

RESULTS = Path(__file__).parent / "results" / "drafts-h200.json"
PROMPT_TOKENS, NEW_TOKENS = 32, 160
NUM_HEADS, HEAD_RANK = 2, 64
TENSORS = "adapter_model.safetensors"
_LETTERS = 12  # of one value: about five tokens of the random model


class BareBackend:
    """llguidance alone, in place of Outlines' backend: GPU machines do not have that."""

    path = ""

    def __init__(self, tokenizer: Any) -> None:
        import llguidance

        self._llguidance, self._limits = llguidance, parser_limits(llguidance)
        self._tokenizer = llguidance.LLTokenizer(self.path)
        self.eos_token_id = int(self._tokenizer.eos_token)
        self.num_words = -(-self._tokenizer.vocab_size // 32)

    def compile(self, own: Grammar) -> Any:
        matcher = self._llguidance.LLMatcher
        if own.kind is GrammarKind.REGEX:
            text = matcher.grammar_from_regex(own.source())
        else:
            compact = {"whitespace_flexible": False}
            text = matcher.grammar_from_json_schema(own.source(), defaults=compact)
        return matcher(self._tokenizer, text, log_level=0, limits=self._limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """So many requests of so many adapters; `bar` is the largest ms_token or the least ratio."""

    kind: str
    batch: int
    adapters: int
    max_ms: float | None = None
    min_ratio: float | None = None
    max_share: float | None = None

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.batch} x {self.adapters}"


CASES = (
    Case(kind="masks", batch=64, adapters=64, max_share=0.03),
    Case(kind="masks", batch=64, adapters=0, max_share=0.03),
    Case(kind="forced", batch=1, adapters=1),
    Case(kind="forced", batch=4, adapters=4),
    Case(kind="forced", batch=16, adapters=16),
    Case(kind="forced", batch=24, adapters=24),
    Case(kind="forced", batch=64, adapters=64, max_ms=5.2),
    Case(kind="planted", batch=1, adapters=1, max_ms=2.2),
    Case(kind="planted", batch=16, adapters=16),
    Case(kind="planted", batch=64, adapters=64, max_ms=4.3),
    Case(kind="heads", batch=1, adapters=1, max_ms=2.2),
    Case(kind="heads", batch=8, adapters=8),
    Case(kind="zero", batch=1, adapters=1, min_ratio=0.98),
    Case(kind="zero", batch=16, adapters=16, min_ratio=0.98),
    Case(kind="zero", batch=64, adapters=64, min_ratio=0.98),
)


def schema(number: int) -> str:
    """Return a schema of its own for each number, whose answers do not end."""
    value = {"type": "string", "pattern": f"^[a-z]{{{_LETTERS}}}$"}
    names = [f"{name}_{number}" for name in ("customer", "reference", "delivered_to")]
    row = {
        "type": "object",
        "properties": dict.fromkeys(names, value),
        "required": names,
        "additionalProperties": False,
    }
    return json.dumps({"type": "array", "items": row, "minItems": 1000})


@dataclass(slots=True)
class Found:
    """What one run gave; `ms_token` as the module's docstring says, and of everything."""

    ms_token: float
    ms_token_whole: float
    tokens: dict[str, list[int]]
    accepted: Counter[str]
    rejected: int

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens.values()))


class _Window:
    """The time in which all of a case's requests write."""

    def __init__(self, batch: int) -> None:
        self._batch, self._started = batch, time.perf_counter()
        self._first: tuple[float, int] | None = None  # when each had a token, and tokens so far
        self._last: tuple[float, int] | None = None  # behind the last step before one ended
        self._has_end = False

    def end(self) -> None:
        """An answer has ended in this step."""
        self._has_end = True

    def note(self, tokens: dict[str, list[int]]) -> None:
        """A step was made; `tokens` so far."""
        if len(tokens) == self._batch and not self._has_end:
            self._last = time.perf_counter(), sum(map(len, tokens.values()))
            self._first = self._first or self._last

    def times(self, tokens: dict[str, list[int]]) -> tuple[float, float]:
        """Milliseconds per token and client in the window, and of everything until now.

        The former is not a number if there was no window: one had ended when another began.
        """
        whole = (time.perf_counter() - self._started) / sum(map(len, tokens.values()))
        inside = math.nan
        if self._first is not None and self._last is not None and self._last > self._first:
            inside = (self._last[0] - self._first[0]) / (self._last[1] - self._first[1])
        return 1000 * self._batch * inside, 1000 * self._batch * whole


class DraftsBench:
    """One engine, on which drafts are turned on and off."""

    def __init__(
        self, shape: str, device: str, arena_bytes: int, rows: int, *, in_fp32: bool = False
    ) -> None:
        self._bench = Bench(
            shape,
            device,
            arena_bytes=arena_bytes,
            max_running=rows,
            in_fp32=in_fp32,
            speculation=True,
            capture_graphs=False,
        )
        self.engine, self.device = self._bench.engine, device
        self.engine.prepare_grammars().result()
        self._headed: set[str] = set()

    def run(self, case: Case, on: bool, *, has_schema: bool, sampling: SamplingParams) -> Found:
        """Run a case's requests once; the same ones every time."""
        self.engine._speculation._is_on = on
        digests = self._bench.adapters((16,), case.adapters)
        if case.kind == "heads":
            digests = [self._with_heads(digest) for digest in digests]
        prompts = random_prompts(case.batch, PROMPT_TOKENS, self.engine.model.vocab_size)
        for i, prompt in enumerate(prompts):
            own = (AdapterPart(digest=digests[i * len(digests) // case.batch]),) if digests else ()
            self.engine.add(
                Request(
                    request_id=str(i),
                    token_ids=prompt,
                    sampling=sampling,
                    adapters=own,
                    json_schema=schema(i) if has_schema else None,
                )
            )
        while any(s.is_waiting_for_grammar for s in self.engine._scheduler.waiting):
            self.engine._grammars.poll()
        if self.device != "cpu":
            torch.cuda.synchronize()
        tokens: dict[str, list[int]] = {}
        accepted: Counter[str] = Counter()
        rejected = 0
        window = _Window(case.batch)
        while self.engine.has_work():
            for output in self.engine.step():
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
                if output.error is not None:
                    raise output.error
                if output.finish_reason is not None:
                    accepted.update(output.accepted_drafts)
                    rejected += output.num_rejected_drafts
                    window.end()
            window.note(tokens)
        if self.device != "cpu":
            torch.cuda.synchronize()
        return Found(*window.times(tokens), tokens, accepted, rejected)

    def _with_heads(self, digest: str) -> str:
        """Return the digest of the same adapter with random draft heads, registered once."""
        own = f"{digest}-heads"
        if own not in self._headed:
            seed = len(self._headed)
            source = self._bench._adapter_folder(16, seed)
            folder = self._bench._folder / own
            shutil.copytree(source, folder)
            tensors = load_file(folder / TENSORS)
            like, hidden = next(iter(tensors.values())), self.engine.model.hidden_size
            for names in map(head_names, range(NUM_HEADS)):
                for name, shape in zip(
                    names, ((HEAD_RANK, hidden), (hidden, HEAD_RANK)), strict=True
                ):
                    tensors[name] = torch.randn(shape).to(like.dtype) * 0.02
            save_file(tensors, folder / TENSORS)
            self.engine.register_adapter(own, folder)
            self._headed.add(own)
        return own

    def measure(self, case: Case, rounds: int) -> dict[str, Any]:
        """Return a case as the result file has it; the first of the rounds warms up."""
        is_masks = case.kind == "masks"
        sampling = SamplingParams(
            max_tokens=NEW_TOKENS,
            temperature=4.0 if case.kind == "zero" else 0.0,
            seed=1,
            ignore_eos=True,
        )
        ways = {True: (not is_masks, case.kind in ("masks", "forced")),
                False: (False, case.kind == "forced")}  # fmt: skip
        times: dict[bool, list[float]] = {True: [], False: []}
        whole: dict[bool, list[float]] = {True: [], False: []}
        found: dict[bool, Found] = {}
        plants = contextlib.nullcontext() if case.kind not in PLANTS else planted(case.kind)
        with plants:
            for repeat in range(rounds + 1):
                for way, (on, has_schema) in ways.items():
                    found[way] = self.run(case, on, has_schema=has_schema, sampling=sampling)
                    if repeat:
                        times[way].append(found[way].ms_token)
                        whole[way].append(found[way].ms_token_whole)
            on, has_schema = ways[True]
            with Stages() as stages:
                self.run(case, on, has_schema=has_schema, sampling=sampling)
                profile = stages.summary()
        own, off = statistics.median(times[True]), statistics.median(times[False])
        if math.isnan(sum(times[True] + times[False])):
            raise ValueError("in a measured run not all requests wrote at a time")
        count, accepted = found[True].num_tokens, found[True].accepted.total()
        result: dict[str, Any] = {
            "case": case.name,
            "ms_token": round(own, 3),
            "ms_token_off": round(off, 3),
            "ms_token_whole": round(statistics.median(whole[True]), 3),
            "ms_token_whole_off": round(statistics.median(whole[False]), 3),
            "tokens_per_step": round(count / max(count - accepted, 1), 2),
            "accepted_share": {k: round(n / count, 3) for k, n in found[True].accepted.items()},
            "rejected": found[True].rejected,
            "ratio": round(off / own, 3),
            "acceptance": {
                "masks": "no drafts; off is the same without schemas",
                "forced": "forced by the schema: real",
                **PLANTS,
                "zero": "none",
            }[case.kind],
            "profile": profile,
        }
        if is_masks:
            result["share"] = round(own / off - 1, 4)
        result["passed"] = (
            (case.max_ms is None or own <= case.max_ms)
            and (case.min_ratio is None or off / own >= case.min_ratio)
            and (case.max_share is None or own / off - 1 <= case.max_share)
        )
        return result


PLANTS = {
    "planted": "two drafts of each step are taken to be right",
    "heads": "the two guesses of random heads are taken to be right",
}


@contextlib.contextmanager
def planted(kind: str) -> Iterator[None]:
    """Draft two tokens in each step, and take them for right whatever was chosen.

    The passes, their rows and the choice of their tokens are as with real drafts; with the kind
    "heads" the guesses are computed, too.
    """

    drafted: dict[Sequence, dict[int, int]] = {}  # by place in the sequence

    def propose(sequence: Sequence, _: Any, most: int, *__: Any) -> Proposal:
        proposal = Proposal(sequence.drafting.profile, sequence.num_tokens)
        if kind == "heads":
            proposal.tokens += sequence.drafting.heads.guesses[:most]
            proposal.kinds += HEAD_KINDS[: len(proposal.tokens)]
        else:
            proposal.tokens += [100 + sequence.num_tokens % 1000, 7][:most]
            proposal.kinds += [Kind(Source.LOOKUP, 3)] * len(proposal.tokens)
        drafted[sequence] = dict(enumerate(proposal.tokens, sequence.num_tokens))
        return proposal

    def agree(read: Any) -> Any:
        choose = on_device(read)

        def choose_drafted(rows: list[int], sequences: list[Sequence]) -> list[Sampled]:
            return [
                Sampled(drafted.get(sequence, {}).get(sequence.num_tokens, token.token_id), None)
                for sequence, token in zip(sequences, choose(rows, sequences), strict=True)
            ]

        return choose_drafted

    with (
        patch("engine.drafts.speculation.propose", propose),
        patch.object(runner, "on_device", agree),
    ):
        yield


def exact(shape: str, device: str) -> dict[str, Any]:
    """Compare the tokens of a small model in fp32, with drafts and without, in two batches."""
    bench = DraftsBench(shape, device, 1 << 28, 24, in_fp32=True)
    same = total = accepted = 0
    try:
        for batch in (1, 3, 8, 24):
            case = Case(kind="exact", batch=batch, adapters=min(batch, 2))
            for has_schema in (True, False):
                for temperature in (0.0, 1.0):
                    sampling = SamplingParams(
                        max_tokens=60, temperature=temperature, seed=3, ignore_eos=True
                    )
                    off, on = (
                        bench.run(case, way, has_schema=has_schema, sampling=sampling)
                        for way in (False, True)
                    )
                    same += sum(on.tokens[key] == answer for key, answer in off.tokens.items())
                    total += len(off.tokens)
                    accepted += on.accepted.total()
    finally:
        bench._bench.close()
    return {
        "case": "exact, fp32",
        "answers": total,
        "same": same,
        "accepted": accepted,
        "passed": same == total and accepted > 0,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what drafts give on a GPU.")
    parser.add_argument("--tokenizer", required=True, help="a tokenizer.json of 49,152 tokens")
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="cases whose name has this")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    BareBackend.path = str(Path(args.tokenizer).resolve())
    patch.object(grammar, "_Backend", BareBackend).start()
    report: dict[str, Any] = {"host": provenance(args.device), "cases": []}

    def note(result: dict[str, Any]) -> None:
        report["cases"].append(result)
        print(json.dumps(result), flush=True)
        write_whole(args.out, report)

    if args.only in "exact":
        note(exact("tiny-wide", args.device))
    cases = [case for case in CASES if args.only in case.name]
    bench = DraftsBench(args.shape, args.device, 1 << (28 if args.device == "cpu" else 34), 64)
    for case in cases:
        try:
            note(bench.measure(case, args.rounds))
        except Exception as error:  # one broken case must not cost the results of the others
            print(f"{case.name}: {type(error).__name__}: {error}", flush=True)
            report["cases"].append({"case": case.name, "passed": False, "error": str(error)})
    bench._bench.close()
    return 0 if all(result["passed"] for result in report["cases"]) else 1


if __name__ == "__main__":
    sys.exit(main())
