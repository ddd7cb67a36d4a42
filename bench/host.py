"""Time the host's part of a step, with a replayed device: schemas, with and without drafts.

    python -m bench.host [--requests 64] [--repeats 5] [--only TEXT] [--out FILE]

Every request has a schema of its own and an adapter of its own. The device is played: it chooses a
token that the mask allows by the token before and its place, and its work counts for nothing. So
drafts change no token, and all else is what the engine runs on a GPU: steps launched before the
tokens of the step before are read, masks made behind the launch. Times are of the thread that
steps, in CPU time, and `wall` in time of the clock, without the played device; each is the median
of the quietest repeat. `tokens_per_step` is of one request. Prints a line for each case and writes
bench/results/host.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from bench.cpu import BASE_MODELS
from bench.machine import environment, write_result
from bench.workload import SHAPES, random_prompts, random_weights, save_random_adapter
from engine import AdapterPart, Engine, EngineConfig, Request, SamplingParams
from engine.drafts.costs import GPU
from engine.drafts.speculation import Speculation
from engine.execution.batch import Batch, BatchBuilder
from engine.execution.gpu_runner import Tokens
from engine.execution.mask_uploads import Masks
from engine.model.config import ModelConfig
from engine.sampling.sampler import Draw
from kernels.sampling import fill_unread_ref
from worker.base_model import packaged_model

RESULTS = Path(__file__).parent / "results" / "host.json"
PROMPT_TOKENS, NEW_TOKENS, WARM_STEPS = 32, 96, 6
_LETTERS = 12  # in one value

#: Stage -> functions. `look ahead` is a part of `schedule`, which is given without it.
STAGES: dict[str, tuple[tuple[type, str], ...]] = {
    "schedule": ((Engine, "_schedule"),),
    "look_ahead": ((Speculation, "look_ahead"),),
    "propose": ((Speculation, "propose"),),
    "build": ((BatchBuilder, "build"),),
    "take": ((Engine, "_take"),),
    "learn": ((Speculation, "learn"), (Speculation, "settle")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Requests of one kind."""

    name: str
    has_schema: bool
    drafts: bool


CASES = (
    Case(name="free", has_schema=False, drafts=False),
    Case(name="schemas", has_schema=True, drafts=False),
    Case(name="schemas, drafts", has_schema=True, drafts=True),
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


class Times:
    """Seconds of one step, by stage: CPU time of this thread, and time of the clock."""

    def __init__(self) -> None:
        self.cpu = dict.fromkeys((*STAGES, "masks", "device"), 0.0)
        self.wall = 0.0  # the device's

    @contextmanager
    def add(self, stage: str) -> Iterator[None]:
        began, wall = time.thread_time(), time.perf_counter()
        try:
            yield
        finally:
            self.cpu[stage] += time.thread_time() - began
            if stage == "device":
                self.wall += time.perf_counter() - wall


class PlayedDevice:
    """Stands for a `GpuRunner` whose passes take no time.

    It notes in `times` what it takes itself, and what making the masks takes.
    """

    def __init__(self, vocab_size: int, max_rows: int) -> None:
        self.times = Times()
        self._vocab_size = vocab_size
        self._words = np.zeros((max_rows, -(-vocab_size // 32)), np.int32)
        self._chosen = torch.empty(0, dtype=torch.int64)
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None  # token ids and positions

    def start(self, batch: Batch, draw: Draw | None, masks: Masks | None = None) -> Tokens:
        with self.times.add("device"):
            if batch.has_unread:
                fill_unread_ref(batch.token_ids, self._chosen)
            rows = batch.sample_rows
            self._last = batch.token_ids[rows], batch.positions[rows]
            is_decode = batch.max_new == 1 and len(rows) == len(batch.token_ids)
        return self._launched(masks, can_replay=is_decode)

    def replay(
        self, new_pages: Sequence[tuple[int, int, int]], masks: Masks | None = None
    ) -> Tokens:
        assert self._last is not None
        with self.times.add("device"):
            self._last = self._chosen, self._last[1] + 1
        return self._launched(masks, can_replay=True)

    def _launched(self, masks: Masks | None, *, can_replay: bool) -> Tokens:
        tokens = Tokens(can_replay=can_replay)
        tokens.later = partial(self._choose, tokens, masks)
        if masks is None:
            tokens.choose()
        return tokens

    def _choose(self, tokens: Tokens, masks: Masks | None) -> None:
        filled: list[int] = []
        if masks is not None:
            with self.times.add("masks"):
                filled = masks.fill(self._words)
        with self.times.add("device"):
            assert self._last is not None
            token_ids, positions = (each.numpy() for each in self._last)
            wished = (token_ids * 7919 + positions * 104729) % (self._vocab_size - 3) + 3
            for row in filled:
                bits = np.unpackbits(self._words[row].view(np.uint8), bitorder="little")
                allowed = np.flatnonzero(bits)
                wished[row] = allowed[wished[row] % len(allowed)]
            self._chosen = torch.from_numpy(wished)
            tokens.host = self._chosen


class HostBench:
    """One engine over a played device."""

    def __init__(self, folder: Path, num_requests: int) -> None:
        self._num_requests = num_requests
        tokenizer_dir = packaged_model(BASE_MODELS)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_dir)
        fields = SHAPES["tiny-wide"] | {"vocab_size": 49152, "num_hidden_layers": 8}
        config_file = folder / "config.json"
        config_file.write_text(json.dumps(fields))
        model = ModelConfig.from_folder(folder)
        config = EngineConfig(
            model_dir=folder,
            arena_bytes=256 << 20,
            max_running=num_requests,
            max_step_tokens=2048,
            prefix_cache=False,
            speculation=True,
        )
        weights = random_weights(model, "cpu", torch.float32)
        self.engine = Engine(config, model=model, weights=weights, tokenizer=tokenizer)
        self.engine._speculation.costs = replace(GPU, max_requests=0)  # nothing waits for tokens
        self.device = PlayedDevice(model.vocab_size, 8 * num_requests + 2048)
        runner: Any = self.engine._runner
        runner._gpu = self.device
        adapter = save_random_adapter(folder / "adapter", model, rank=16, seed=0)
        for i in range(num_requests):
            self.engine.register_adapter(f"{i:064x}", adapter)
            self.engine.prefetch(f"{i:064x}", to_arena=True)
        while self.engine.has_work():
            self.engine.step()
        self.engine.prepare_grammars().result()
        gc.collect()
        gc.freeze()  # as a worker does

    def run(self, case: Case) -> tuple[list[dict[str, float]], float, str]:
        """Return the milliseconds of each step, tokens a step and request, and a digest."""
        engine, count = self.engine, self._num_requests
        engine._speculation._is_on = case.drafts
        sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
        prompts = random_prompts(count, PROMPT_TOKENS, engine.model.vocab_size)
        for i, prompt in enumerate(prompts):
            engine.add(
                Request(
                    request_id=str(i),
                    token_ids=prompt,
                    sampling=sampling,
                    adapters=(AdapterPart(digest=f"{i:064x}"),),
                    json_schema=schema(i) if case.has_schema else None,
                )
            )
        while any(s.is_waiting_for_grammar for s in engine._scheduler.waiting):
            engine._grammars.poll()
        answers: dict[str, list[int]] = {}
        steps: list[dict[str, float]] = []
        num_writing, num_tokens, has_end = 0, 0, False
        while engine.has_work():
            times = self.device.times = Times()
            began, wall = time.thread_time(), time.perf_counter()
            outputs = engine.step()
            cpu, wall = time.thread_time() - began, time.perf_counter() - wall
            for output in outputs:
                assert output.error is None, output.error
                answers.setdefault(output.request_id, []).extend(output.token_ids)
                has_end |= output.finish_reason is not None
            num_writing += len(answers) == count and not has_end
            if num_writing > WARM_STEPS and not has_end:
                found = dict(times.cpu)
                found["schedule"] -= found["look_ahead"]
                found["step"], found["wall"] = cpu - found["device"], wall - times.wall
                del found["device"]
                steps.append({name: 1000 * seconds for name, seconds in found.items()})
                num_tokens += sum(len(output.token_ids) for output in outputs)
        digest = str(hash(tuple(tuple(answers[str(i)]) for i in range(count))))
        return steps, num_tokens / count / max(len(steps), 1), digest


@contextmanager
def timed(device: PlayedDevice) -> Iterator[None]:
    """Note in the device's times what each of the engine's stages takes."""

    def noted(stage: str, real: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(real)
        def call(*args: Any, **options: Any) -> Any:
            with device.times.add(stage):
                return real(*args, **options)

        return call

    with ExitStack() as patches:
        for stage, functions in STAGES.items():
            for owner, name in functions:
                real = getattr(owner, name)
                patches.enter_context(patch.object(owner, name, noted(stage, real)))
        yield


def measure(bench: HostBench, case: Case, repeats: int) -> dict[str, Any]:
    """Return a case as the result file has it."""
    best: dict[str, float] = {}
    per_step, digests = 0.0, set()
    for _ in range(repeats + 1):  # the first one teaches what choices there are
        with timed(bench.device):
            steps, per_step, digest = bench.run(case)
        digests.add(digest)
        medians = {name: statistics.median(s[name] for s in steps) for name in steps[0]}
        means = {name: statistics.fmean(s[name] for s in steps) for name in steps[0]}
        medians["mean_step"] = means["step"]
        if not best or medians["mean_step"] < best["mean_step"]:
            best = medians
    assert len(digests) == 1, "the played device chose other tokens"
    return {
        "case": case.name,
        **{f"{name}_ms": round(value, 3) for name, value in best.items()},
        "tokens_per_step": round(per_step, 3),
        "answers": digests.pop(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the host's part of steps with schemas.")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    result = environment("bench.host")
    with tempfile.TemporaryDirectory() as folder:
        bench = HostBench(Path(folder), args.requests)
        result["cases"] = []
        for case in CASES:
            if args.only in case.name:
                result["cases"].append(measure(bench, case, args.repeats))
                print(json.dumps(result["cases"][-1]), flush=True)
        bench.engine.close()
    write_result(args.out, result)


if __name__ == "__main__":
    main()
