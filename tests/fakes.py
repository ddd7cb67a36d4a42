"""Stand-ins for what a test must not wait for: an engine that echoes, and a base without weights.

Everything around them is real: worker processes, Redis, PostgreSQL, the web server.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from engine.errors import AdapterMismatch, EngineError, UnknownAdapter
from engine.request import (
    FinishReason,
    KeptPrefix,
    Request,
    RequestOutput,
    TokenLogprob,
)
from engine.stats import EngineStats
from worker.config import S3Config, WorkerConfig

FAKE_NAME = "fake-base"
FAKE_REVISION = "f" * 64
FAKE_CONTEXT = 512
END, TURN, ENDOFTEXT = 2, 1, 0
#: A request with this seed ends the engine's process.
DEADLY_SEED = 666
#: Leaves the last message as the last stretch of ordinary tokens: what FakeEngine echoes.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message['role'] }}<|turn|>{{ message['content'] }}"
    "<|end|>{% endfor %}"
)


def write_fake_base(folder: Path) -> Path:
    """A model folder with all that a worker's IO process reads: a byte-level tokenizer, no weights.

    Its tokens are the 256 bytes and a few merges, so that any character beyond ASCII takes several.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|turn|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 4], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    files = {
        "config.json": {"max_position_embeddings": FAKE_CONTEXT, "vocab_size": 300},
        "tokenizer_config.json": {"eos_token": "<|end|>", "chat_template": CHAT_TEMPLATE},
        "lorikeet.json": {"name": FAKE_NAME, "revision": FAKE_REVISION},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def fake_config(folder: Path, *, worker_id: str, pool: str, redis_url: str) -> WorkerConfig:
    """A worker of fake models that has no object store, in a folder of its own."""
    return WorkerConfig(
        worker_id=worker_id,
        pool=pool,
        redis_url=redis_url,
        s3=S3Config(endpoint_url="", access_key_id="", secret_access_key="", bucket=""),
        model_dir=write_fake_base(folder / "base"),
        base_model=FAKE_NAME,
        base_revision=FAKE_REVISION,
        adapter_dir=folder / "adapters",
        adapter_cache_bytes=1,
        device="cpu",
    )


@dataclasses.dataclass
class _Running:
    request: Request
    index: int
    echo: list[int]
    generated: int = 0


class FakeEngine:
    """The engine's API without a model: repeats the last stretch of ordinary tokens of the prompt.

    Ends with STOP after one repetition, goes on for ever under `ignore_eos`. An adapter whose
    config says {"unsupported": true} does not fit; one that says {"token": 70} repeats that token;
    with {"fails_percent": 25} every fourth request fails.

    step_s       how long a step takes
    max_running  requests that get a token in one step
    """

    def __init__(self, *, step_s: float = 0.0, max_running: int = 64) -> None:
        self._step_s = step_s
        self._max_running = max_running
        self._requests: dict[tuple[str, int], _Running] = {}  # by id and index
        self._ended: list[RequestOutput] = []
        self._adapters: set[str] = set()
        self._pinned: tuple[str, ...] = ()
        self._kept: tuple[str, ...] = ()
        self._failing: dict[str, int] = {}  # adapter -> percent of its requests
        self._tokens: dict[str, int] = {}  # that adapters repeat
        self._steps = 0

    def register_adapter(self, digest: str, path: Path) -> None:
        config = json.loads((path / "adapter_config.json").read_text())
        if config.get("unsupported"):
            raise AdapterMismatch("the adapter does not fit", param="target_modules")
        self._adapters.add(digest)
        self._failing[digest] = config.get("fails_percent", 0)
        if "token" in config:
            self._tokens[digest] = config["token"]

    def unregister_adapter(self, digest: str) -> None:
        self._adapters.discard(digest)

    def prefetch(self, digest: str, *, to_arena: bool = False) -> None:
        if digest not in self._adapters:
            raise UnknownAdapter(f"no adapter {digest}")

    def pin_adapters(self, wanted: Sequence[tuple[str, str]]) -> None:
        self._pinned = tuple(digest for _, digest in wanted if digest in self._adapters)

    def keep_prefixes(self, wanted: Sequence[KeptPrefix]) -> None:
        self._kept = tuple(prefix.name for prefix in wanted)

    def prepare_grammars(self) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def add(self, request: Request) -> None:
        request.check(vocab_size=300)
        if request.sampling.seed == DEADLY_SEED:
            os._exit(9)
        for part in request.adapters:
            if part.digest not in self._adapters:
                raise UnknownAdapter(f"no adapter {part.digest}")
            if zlib.crc32(request.request_id.encode()) % 100 < self._failing[part.digest]:
                raise EngineError("planted")
        stretches: list[list[int]] = [[]]
        for token_id in request.token_ids:
            if token_id in (END, TURN, ENDOFTEXT):
                stretches.append([])
            else:
                stretches[-1].append(token_id)
        echo = next((stretch for stretch in reversed(stretches) if stretch), [5])
        named = [part.digest for part in request.adapters if part.digest in self._tokens]
        echo = [self._tokens[digest] for digest in named] or echo
        for index in range(request.n):
            self._requests[request.request_id, index] = _Running(request, index, echo)

    def cancel(
        self,
        request_id: str,
        reason: FinishReason = FinishReason.CANCELLED,
        index: int | None = None,
    ) -> None:
        for key in [key for key in self._requests if key[0] == request_id]:
            if index in (None, key[1]):
                ended = self._output(self._requests.pop(key), finish_reason=reason)
                self._ended.append(ended)

    def has_work(self) -> bool:
        return bool(self._requests or self._ended)

    def step(self) -> list[RequestOutput]:
        time.sleep(self._step_s)
        self._steps += 1
        outputs, self._ended = self._ended, []
        for running in list(self._requests.values())[: self._max_running]:
            outputs.append(self._advance(running))
        return outputs

    def _advance(self, running: _Running) -> RequestOutput:
        sampling, wanted = running.request.sampling, running.request.vector
        if wanted is not None:
            del self._requests[running.request.request_id, running.index]
            output = self._output(running, finish_reason=FinishReason.STOP)
            output.vector = [1.0, *[0.0] * 31][: wanted.dimensions]
            return output
        at = running.generated
        running.generated += 1
        if at >= len(running.echo) and not sampling.ignore_eos:
            del self._requests[running.request.request_id, running.index]
            return self._output(running, finish_reason=FinishReason.STOP)
        token_id = running.echo[at % len(running.echo)]
        output = self._output(running, token_ids=[token_id])
        if sampling.logprobs is not None:
            top = tuple((token_id + rank, -0.5 - rank) for rank in range(sampling.logprobs))
            output.logprobs = [TokenLogprob(token_id, -0.5, top)]
        if sampling.max_tokens is not None and running.generated >= sampling.max_tokens:
            del self._requests[running.request.request_id, running.index]
            output.finish_reason = FinishReason.LENGTH
        return output

    def _output(
        self,
        running: _Running,
        *,
        token_ids: list[int] | None = None,
        finish_reason: FinishReason | None = None,
        error: EngineError | None = None,
    ) -> RequestOutput:
        return RequestOutput(
            request_id=running.request.request_id,
            index=running.index,
            token_ids=token_ids or [],
            finish_reason=finish_reason,
            error=error,
            num_prompt_tokens=len(running.request.token_ids),
            num_generated=running.generated,
        )

    def stats(self) -> EngineStats:
        return EngineStats(
            step=self._steps,
            running=min(len(self._requests), self._max_running),
            waiting=max(0, len(self._requests) - self._max_running),
            max_running=self._max_running,
            resident_digests=tuple(sorted(self._adapters)),
            pinned_digests=self._pinned,
            kept_prefixes=self._kept,
        )


def _create(config: WorkerConfig, *, step_s: float, load_s: float, max_running: int) -> FakeEngine:
    time.sleep(load_s)
    return FakeEngine(step_s=step_s, max_running=max_running)


def fake_engine(
    step_s: float, load_s: float = 0.0, max_running: float = 64
) -> functools.partial[FakeEngine]:
    """An engine factory for `worker.serving.service.run`; the engine takes `load_s` to load."""
    return functools.partial(_create, step_s=step_s, load_s=load_s, max_running=int(max_running))
