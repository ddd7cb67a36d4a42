"""Sampler: answers of runs' adapters, by a serving engine over the weights that the trainer has."""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

from contract.adapters import peft_config, safetensors_header
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import EngineError
from engine.model.config import ModelConfig
from engine.model.weights import Weights
from engine.request import AdapterPart, FinishReason, Request, RequestOutput, SamplingParams
from engine.training.run import RunSettings

#: Memory of keys, values and adapters: of a CPU's, taken as it is used, and of a GPU's free share.
_ARENA_BYTES = 1 << 30
_GPU_SHARE = 0.2
_HOST_BYTES = 64 << 20
#: Answers that are sampled at a time.
_RUNNING = {"cpu": 16, "cuda": 256}


@dataclass(slots=True)
class Sampled:
    """One answer: its tokens, with the one that ends it, and their log-probabilities."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    is_cut: bool = False
    has_end: bool = False

    @property
    def text_ids(self) -> list[int]:
        return self.token_ids[:-1] if self.has_end else self.token_ids


@dataclass(slots=True)
class _Asked:
    """A request under way, and the answers to it that are whole."""

    owner: str
    key: int
    answers: list[Sampled]
    num_left: int
    scores: list[float] | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that has ended: the answers of its prompt, or the scores of its tokens."""

    owner: str
    key: int
    answers: list[Sampled] = field(default_factory=list)
    scores: list[float] | None = None
    error: EngineError | None = None


class Sampler:
    """Samples under many runs' adapters at a time; one thread uses it.

    The base's weights are the trainer's own: no copy, but for what a CPU's products need. An
    adapter is loaded into pages of the engine after each of its run's steps.
    """

    def __init__(
        self, folder: Path, model: ModelConfig, weights: Weights, dtype: torch.dtype
    ) -> None:
        device, arena = weights.embedding.device.type, _ARENA_BYTES
        if device == "cuda":
            arena = int(torch.cuda.mem_get_info()[0] * _GPU_SHARE)
        config = EngineConfig(
            model_dir=folder,
            device=device,
            dtype="float32" if dtype == torch.float32 else "bfloat16",
            arena_bytes=arena,
            host_cache_bytes=_HOST_BYTES,
            max_running=_RUNNING[device],
            loader_threads=1,
            capture_graphs=False,
        )
        self._engine = Engine(config, model=model, weights=weights)
        self._folder = Path(tempfile.mkdtemp(prefix="sampled-"))
        self._numbers = itertools.count()
        self._asked: dict[str, _Asked] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._asked)

    def load(self, tensors: Mapping[str, torch.Tensor], settings: RunSettings) -> str:
        """Make an adapter known. -> the digest to sample it by, until `unload`"""
        digest = f"{next(self._numbers):064x}"
        path = self._folder / digest
        path.mkdir()
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": None,
            "r": settings.rank,
            "lora_alpha": settings.alpha,
            "use_rslora": settings.use_rslora,
            "target_modules": list(settings.target_modules),
        }
        (path / peft_config.FILE).write_text(json.dumps(config))
        own = {name: tensor.clone() for name, tensor in tensors.items()}
        save_file(own, path / safetensors_header.FILE, metadata={"format": "pt"})
        self._engine.register_adapter(digest, path)
        return digest

    def unload(self, digest: str) -> None:
        """Forget an adapter that nothing is sampled by."""
        self._engine.unregister_adapter(digest)
        shutil.rmtree(self._folder / digest, ignore_errors=True)

    def sample(
        self,
        owner: str,
        key: int,
        prompt: Sequence[int],
        *,
        digest: str | None,
        count: int,
        seed: int | None,
        max_tokens: int,
    ) -> None:
        """Have a prompt answered; without a seed by the likeliest tokens.

        Otherwise answers are drawn from the whole distribution, whose log-probabilities they have.
        """
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0 if seed is None else 1.0,
            seed=seed,
            logprobs=0,
        )
        self._add(owner, key, prompt, sampling, digest, count)

    def score(self, owner: str, key: int, token_ids: Sequence[int], digest: str | None) -> None:
        """Have all tokens but the first scored under an adapter, or the base."""
        sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        self._add(owner, key, token_ids, sampling, digest, 1)

    def _add(
        self,
        owner: str,
        key: int,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        digest: str | None,
        count: int,
    ) -> None:
        name = str(next(self._numbers))
        request = Request(
            request_id=name,
            token_ids=token_ids,
            sampling=sampling,
            n=count,
            adapters=() if digest is None else (AdapterPart(digest=digest),),
            tenant_id=owner,
        )
        self._engine.add(request)
        self._asked[name] = _Asked(owner, key, [Sampled() for _ in range(count)], count)

    def step(self) -> list[Ended]:
        """Make one step of the engine. -> the requests that ended"""
        ended = []
        for output in self._engine.step():
            asked = self._asked.get(output.request_id)
            if asked is None:
                continue  # its run was dropped
            _note(asked, output)
            if output.finish_reason is not None:
                asked.num_left -= 1
            if output.error is not None or not asked.num_left:
                del self._asked[output.request_id]
                ended.append(
                    Ended(asked.owner, asked.key, asked.answers, asked.scores, output.error)
                )
        return ended

    def drop(self, owner: str) -> None:
        """Forget what was asked for a run."""
        for name in [name for name, asked in self._asked.items() if asked.owner == owner]:
            del self._asked[name]
            self._engine.cancel(name)

    def close(self) -> None:
        self._engine.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _note(asked: _Asked, output: RequestOutput) -> None:
    if output.prompt_logprobs is not None:
        asked.scores = (asked.scores or []) + [each.logprob for each in output.prompt_logprobs]
    answer = asked.answers[output.index]
    answer.token_ids += output.token_ids
    answer.logprobs += [each.logprob for each in output.logprobs or ()]
    if output.end_logprob is not None:
        answer.token_ids.append(output.end_logprob.token_id)
        answer.logprobs.append(output.end_logprob.logprob)
        answer.has_end = True
    answer.is_cut = output.finish_reason is FinishReason.LENGTH
