"""DashEngine: the engine as a Python library, for scripts and notebooks.

    engine = DashEngine("path/to/base", DashConfig(adapter_vram_pool="2GB"))
    engine.register_adapter("finance", "path/to/peft-adapter")
    engine.generate(["…", "…"], active_adapters=["finance", {"tone": 0.3, "domain": 0.7}])

Requests of one call run as one continuous batch, each with its own adapters.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from transformers import AutoTokenizer

from engine.adapter_files import CONFIG_FILE, TENSORS_FILE
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import AdapterUnavailable, EngineError, UnknownAdapter
from engine.request import AdapterPart, FinishReason, Request, RequestOutput, SamplingParams
from engine.stats import EngineStats

# One prompt's adapters: none, one by name, or several by name with weights.
Adapters = str | Mapping[str, float] | None
Prompt = str | Sequence[int]

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_bytes(size: str | int) -> int:
    """2_000_000_000 for "2GB", 2_147_483_648 for "2GiB"; raises ValueError for anything else."""
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{size!r} is not a size such as 512MB or 2GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


@dataclass(frozen=True, slots=True, kw_only=True)
class DashConfig:
    """How a DashEngine runs.

    max_concurrent_adapters  distinct adapters that requests may be running with at a time
    adapter_vram_pool        memory for adapters; with `kv_pool` it makes one arena that both share
    kv_pool                  memory for the requests' KV; None for both: what the device has left
                             (`EngineConfig.arena_bytes`); None for one: as much as the other
    offload_dir              a folder that gets a copy of every registered adapter, so that its
                             source may change or go away; None: sources are read when needed
    """

    max_concurrent_adapters: int = 128
    adapter_vram_pool: str | int | None = None
    kv_pool: str | int | None = None
    offload_dir: str | Path | None = None
    device: str = "cpu"
    dtype: str | None = None
    max_running: int = 64
    num_threads: int | None = None

    def engine_config(self, model_dir: Path) -> EngineConfig:
        return EngineConfig(
            model_dir=model_dir,
            device=self.device,
            dtype=self.dtype,
            arena_bytes=self._arena_bytes(),
            max_running=self.max_running,
            max_adapters=self.max_concurrent_adapters,
            num_threads=self.num_threads,
        )

    def _arena_bytes(self) -> int | None:
        pools = [p for p in (self.adapter_vram_pool, self.kv_pool) if p is not None]
        return sum(map(parse_bytes, pools)) * 2 // len(pools) if pools else None


@dataclass(slots=True)
class Completion:
    """One prompt's continuation; prints as its text."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: EngineError | None = None

    def __str__(self) -> str:
        return self.text


class DashEngine:
    """A base model in memory and any number of named adapters beside it.

    base  a Hugging Face model folder; raises UnsupportedModel when the decoder does not know it
    """

    def __init__(self, base: str | Path, config: DashConfig | None = None) -> None:
        self._config = config or DashConfig()
        self._engine = Engine(self._config.engine_config(Path(base)))
        self.tokenizer: Any = AutoTokenizer.from_pretrained(base)
        # name -> digest and folder
        self._named: dict[str, Future[tuple[str, Path]]] = {}
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="adapter-digest")
        self._num_requests = 0

    def register_adapter(self, name: str, path: str | Path) -> None:
        """Call the PEFT folder `path` by `name`, in place of what had the name; returns at once.

        What is wrong with the adapter ends the requests that name it, with its own error.
        """
        self._named[name] = self._threads.submit(self._adopt, Path(path))

    def unregister_adapter(self, name: str) -> None:
        """Forget the name, and the adapter when no other name means it too."""
        if name not in self._named:
            raise UnknownAdapter(f"no adapter is named {name!r}", param="name")
        future = self._named.pop(name)
        others = [other.result()[0] for other in self._named.values() if not other.exception()]
        if future.exception() is None and future.result()[0] not in others:
            self._engine.unregister_adapter(future.result()[0])

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        active_adapters: Adapters | Sequence[Adapters] = None,
        *,
        max_new_tokens: int = 256,
        sampling: SamplingParams | None = None,
        stop: Sequence[str] = (),
        json_schema: str | None = None,
    ) -> list[Completion]:
        """Continue every prompt; the completions are in the prompts' order.

        prompts          strings, or lists of token ids
        active_adapters  for all prompts alike, or one for each: a name, a blend, or None
        sampling         greedy unless given; `max_new_tokens` takes precedence over its max_tokens
        stop             the text ends before the first of these
        """
        prompts = _as_list(prompts)
        adapters = _spread(active_adapters, len(prompts))
        sampling = replace(sampling or SamplingParams(temperature=0.0), max_tokens=max_new_tokens)
        run = _Run(self.tokenizer, tuple(stop))
        for prompt, own in zip(prompts, adapters, strict=True):
            self._num_requests += 1
            request_id = str(self._num_requests)
            run.completions[request_id] = Completion()
            try:
                self._engine.add(
                    Request(
                        request_id=request_id,
                        token_ids=self._token_ids(prompt),
                        sampling=sampling,
                        adapters=self._parts(own),
                        json_schema=json_schema,
                    )
                )
            except EngineError as error:
                run.completions[request_id].finish_reason = FinishReason.ERROR
                run.completions[request_id].error = error
        while self._engine.has_work():
            for output in self._engine.step():
                if run.take(output):
                    self._engine.cancel(output.request_id, FinishReason.STOP)
        return list(run.completions.values())

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def close(self) -> None:
        """End the engine's threads."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _adopt(self, path: Path) -> tuple[str, Path]:
        """The adapter's digest and folder. Runs on a thread: reading the files takes a moment."""
        digest = hashlib.sha256()
        try:
            for name in (CONFIG_FILE, TENSORS_FILE):
                with (path / name).open("rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
            known = digest.hexdigest()
            if self._config.offload_dir is not None:
                path = _copy(path, Path(self._config.offload_dir) / known)
        except OSError as error:
            raise AdapterUnavailable(f"{path} cannot be read: {error.strerror}") from error
        return known, path

    def _parts(self, adapters: Adapters) -> tuple[AdapterPart, ...]:
        """Names and weights as the engine wants them; waits until the names have digests."""
        weights = {adapters: 1.0} if isinstance(adapters, str) else adapters or {}
        parts = []
        for name, weight in weights.items():
            if name not in self._named:
                raise UnknownAdapter(f"no adapter is named {name!r}", param="active_adapters")
            digest, path = self._named[name].result()
            self._engine.register_adapter(digest, path)
            parts.append(AdapterPart(digest=digest, weight=weight))
        return tuple(parts)

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        return list(prompt)


class _Run:
    """The completions of one `generate` call as they grow."""

    def __init__(self, tokenizer: Any, stop: tuple[str, ...]) -> None:
        self.completions: dict[str, Completion] = {}
        self._tokenizer, self._stop = tokenizer, stop
        # A stop string of n characters spans n tokens at most; some more for split characters.
        self._tail = max(map(len, stop), default=0) + 8

    def take(self, output: RequestOutput) -> bool:
        """Add an output; whether a stop string has appeared in the text."""
        completion = self.completions[output.request_id]
        if completion.finish_reason is FinishReason.STOP:
            return False  # a stop string ended it; this is the engine's confirmation
        completion.token_ids += output.token_ids
        completion.finish_reason, completion.error = output.finish_reason, output.error
        if self._stop and output.token_ids:
            tail = self._tokenizer.decode(completion.token_ids[-self._tail :])
            if any(stop in tail for stop in self._stop):
                completion.finish_reason = FinishReason.STOP
                completion.text = self._cut(completion.token_ids)
                return output.finish_reason is None
        if output.finish_reason is not None:
            completion.text = self._cut(completion.token_ids)
        return False

    def _cut(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        ends = [text.find(stop) for stop in self._stop]
        return text[: min((end for end in ends if end >= 0), default=len(text))]


def _copy(source: Path, target: Path) -> Path:
    """Copy an adapter's two files to the folder `target`, unless they are there."""
    if not target.exists():
        staging = target.with_suffix(".partial")
        staging.mkdir(parents=True, exist_ok=True)
        for name in (CONFIG_FILE, TENSORS_FILE):
            shutil.copyfile(source / name, staging / name)
        staging.rename(target)
    return target


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _spread(adapters: Adapters | Sequence[Adapters], count: int) -> list[Adapters]:
    if adapters is None or isinstance(adapters, str | Mapping):
        return [adapters] * count
    if len(adapters) != count:
        raise ValueError(f"{len(adapters)} active_adapters for {count} prompts")
    return list(adapters)
