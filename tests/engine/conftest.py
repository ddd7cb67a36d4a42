"""Tiny random models and adapters in temporary folders; engines that are checked at the end."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import copy
import functools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from engine import AdapterPart, Engine, EngineConfig, Request, RequestOutput, SamplingParams

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.interpreter import speed_up

    speed_up()

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EOS = "<|end|>"

# Every shape of adapter that PEFT writes and the engine takes.
ADAPTERS: dict[str, dict[str, Any]] = {
    "all-4": {"r": 4, "lora_alpha": 8, "target_modules": LINEARS},
    "qv-16": {"r": 16, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "mlp-rs": {
        "r": 8,
        "lora_alpha": 6,
        "use_rslora": True,
        "target_modules": ["gate_proj", "up_proj", "down_proj"],
    },
    "patterns": {
        "r": 8,
        "lora_alpha": 4,
        "target_modules": LINEARS,
        "rank_pattern": {"q_proj": 3, "model.layers.1.mlp.down_proj": 20},
        "alpha_pattern": {"v_proj": 32, r"layers\.0\.self_attn\.o_proj": 1},
    },
    "all-64": {"r": 64, "lora_alpha": 32, "target_modules": LINEARS},
    "ko-1": {"r": 1, "lora_alpha": 2, "target_modules": ["k_proj", "o_proj"]},
    "layer-1": {"r": 5, "target_modules": ["up_proj"], "layers_to_transform": [1]},
    "dora": {"r": 6, "lora_alpha": 9, "use_dora": True, "target_modules": LINEARS},
    "dora-some": {
        "r": 12,
        "use_dora": True,
        "use_rslora": True,
        "target_modules": ["k_proj", "up_proj", "lm_head"],
        "rank_pattern": {"up_proj": 3},
        "alpha_pattern": {"lm_head": 2},
    },
    "bias": {"r": 3, "lora_alpha": 5, "lora_bias": True, "target_modules": LINEARS},
    "bias-head": {"r": 2, "lora_bias": True, "target_modules": ["v_proj", "lm_head"]},
    "ends": {
        "r": 5,
        "lora_alpha": 10,
        "target_modules": ["embed_tokens", "lm_head", "q_proj", "v_proj"],
        "rank_pattern": {"embed_tokens": 9},
    },
    "embedding": {"r": 40, "lora_alpha": 20, "target_modules": ["embed_tokens"]},
    "dora-embedding": {"r": 4, "use_dora": True, "target_modules": ["embed_tokens", "o_proj"]},
}


def save_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of 256 bytes and an end token: the smallest that spells JSON."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS)
    fast.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    fast.save_pretrained(folder)


def save_model(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A random Llama with 2 layers, whose logits are far enough apart for greedy comparisons."""
    fields = {
        "vocab_size": 257,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": 256,
        "pad_token_id": 256,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**fields, **changes})).eval()
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@functools.cache
def _read_base(base: Path) -> Any:
    kind = AutoConfig.from_pretrained(base).architectures[0]
    return getattr(transformers, kind).from_pretrained(base, dtype=torch.float32).eval()


def load_base(base: Path) -> Any:
    """Hugging Face's model of the folder, the caller's own: it is read from disk once."""
    return copy.deepcopy(_read_base(base))


def save_adapter(
    base: Path, folder: Path, seed: int = 0, *, repeats_ends: bool | str = "auto", **config: Any
) -> Path:
    """A PEFT adapter with random A and B, and whatever else it has random.

    repeats_ends  whether the base's embedding and head are saved, too, as where they were resized
    """
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    adapted = get_peft_model(load_base(base), LoraConfig(task_type="CAUSAL_LM", **config))
    for name, parameter in adapted.named_parameters():
        if "magnitude" in name:
            parameter.data *= 1 + 0.3 * torch.randn_like(parameter)
        elif "trainable_tokens_delta" in name or "modules_to_save" in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
        elif "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    adapted.create_or_update_model_card = lambda _: None  # a text that takes most of the time
    adapted.save_pretrained(folder, save_embedding_layers=repeats_ends)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def adapters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """name in ADAPTERS -> PEFT folder."""
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: save_adapter(tiny_model, folder / name, seed, **config)
        for seed, (name, config) in enumerate(ADAPTERS.items())
    }


class Oracle:
    """Hugging Face and PEFT over the tiny model, greedy, remembered."""

    def __init__(self, base: Path, adapters: dict[str, Path]) -> None:
        from peft import PeftModel

        names = list(adapters)
        self._model = PeftModel.from_pretrained(
            load_base(base), adapters[names[0]], adapter_name=names[0]
        )
        for name in names[1:]:
            self._model.load_adapter(adapters[name], adapter_name=name)
        self._known: dict[Any, list[int]] = {}

    def blend(self, name: str, weights: dict[str, float]) -> None:
        """Define an adapter as PEFT's exact weighted sum."""
        self._model.add_weighted_adapter(
            list(weights), list(weights.values()), name, combination_type="cat"
        )

    def generate(self, prompt: list[int], num_tokens: int, adapter: str | None = None) -> list[int]:
        """`num_tokens` greedy tokens, EOS disregarded."""
        key = (tuple(prompt), num_tokens, adapter)
        if key not in self._known:
            if adapter is None:
                with self._model.disable_adapter():
                    self._known[key] = self._greedy(prompt, num_tokens)
            else:
                self._model.set_adapter(adapter)
                self._known[key] = self._greedy(prompt, num_tokens)
        return self._known[key]

    def logprobs(self, prompt: list[int], adapter: str | None = None) -> torch.Tensor:
        """The log-probabilities [T, V] of what follows each of the prompt's tokens."""
        token_ids = torch.tensor([prompt])
        with torch.inference_mode():
            if adapter is None:
                with self._model.disable_adapter():
                    logits = self._model(token_ids).logits
            else:
                self._model.set_adapter(adapter)
                logits = self._model(token_ids).logits
        found: torch.Tensor = logits[0].log_softmax(-1)
        return found

    def _greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        out = self._model.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
            do_sample=False,
        )
        return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="session")
def oracle(tiny_model: Path, adapters: dict[str, Path]) -> Oracle:
    return Oracle(tiny_model, adapters)


#: Room for all adapters; `check_integrity` looks at every page, also of host memory.
SMALL = {"arena_bytes": 4 << 20, "host_cache_bytes": 16 << 20}
MakeEngine = Callable[..., Engine]
_REQUEST_FIELDS = {
    "deadline",
    "lark",
    "n",
    "priority",
    "regex",
    "remember",
    "speculation",
    "tenant_id",
    "vector",
}


@pytest.fixture
def make_engine(tiny_model: Path, adapters: dict[str, Path]) -> Iterator[MakeEngine]:
    """Engines on the tiny model that know all ADAPTERS by name; idle and sound at the end."""
    made: list[Engine] = []

    def make(clock: Callable[[], float] | None = None, **config: Any) -> Engine:
        given = {"model_dir": tiny_model, **SMALL, **config}
        engine = Engine(EngineConfig(**given), *([clock] if clock else []))
        for name, path in adapters.items():
            engine.register_adapter(name, path)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        run(engine)
        engine.check_integrity()
        assert engine.stats().kv_pages == 0
        engine.close()


def request(
    request_id: str,
    prompt: list[int],
    *,
    adapter: str | dict[str, float] | None = None,
    json_schema: str | None = None,
    **sampling: Any,
) -> Request:
    """A greedy request that disregards EOS unless told otherwise.

    sampling  fields of SamplingParams, or of the Request itself
    """
    own = {name: sampling.pop(name) for name in _REQUEST_FIELDS & sampling.keys()}
    weights = {adapter: 1.0} if isinstance(adapter, str) else adapter or {}
    return Request(
        request_id=request_id,
        token_ids=prompt,
        sampling=SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **sampling}),
        adapters=tuple(AdapterPart(digest=d, weight=w) for d, w in weights.items()),
        json_schema=json_schema,
        **own,
    )


class Result:
    """Everything one request put out."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.last: RequestOutput | None = None
        self.logprobs: list[Any] = []
        self.prompt_logprobs: list[Any] | None = None

    def add(self, output: RequestOutput) -> None:
        assert self.last is None or self.last.finish_reason is None, "output after the last"
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        if output.prompt_logprobs is not None:
            assert self.prompt_logprobs is None, "told twice"
            self.prompt_logprobs = output.prompt_logprobs
        self.last = output

    @property
    def finish_reason(self) -> str | None:
        assert self.last is not None
        return self.last.finish_reason

    @property
    def error(self) -> Exception | None:
        assert self.last is not None
        return self.last.error


def name_of(output: RequestOutput) -> str:
    return f"{output.request_id}/{output.index}" if output.index else output.request_id


def run(
    engine: Engine, *requests: Request, max_steps: int = 5000, check: bool = False
) -> dict[str, Result]:
    """Step until nothing is left; the results by request id, "id/1" for a second continuation."""
    for each in requests:
        engine.add(each)
    results: dict[str, Result] = {each.request_id: Result() for each in requests}
    num_steps, until = 0, time.monotonic() + 150
    while num_steps < max_steps and time.monotonic() < until:
        if not engine.has_work():
            return results
        outputs = engine.step()
        for output in outputs:
            results.setdefault(name_of(output), Result()).add(output)
        if check:
            engine.check_integrity()
        if outputs:
            num_steps, until = num_steps + 1, time.monotonic() + 150
        else:  # adapters and grammars are made by threads
            time.sleep(0.0005)
    raise AssertionError(f"still at work after {max_steps} steps: {engine.stats()}")


def prompt(seed: int, length: int) -> list[int]:
    """Random token ids of the tiny model."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (length,), generator=generator).tolist()


def edit_config(source: Path, target: Path, **changes: Any) -> Path:
    """A copy of an adapter with other fields in its config."""
    target.mkdir()
    config = json.loads((source / "adapter_config.json").read_text())
    (target / "adapter_config.json").write_text(json.dumps({**config, **changes}))
    tensors = "adapter_model.safetensors"
    (target / tensors).write_bytes((source / tensors).read_bytes())
    return target
