"""Every kind of adapter that PEFT writes and the engine takes, and blends of them, over any family.

The oracles are PEFT for an adapter alone and `tests.engine.adapters.peft_reference` for a blend.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine import Engine, EngineConfig
from tests.engine.adapters.peft_reference import Reference
from tests.engine.conftest import LINEARS, SMALL, Result, prompt, request, run, save_adapter
from tests.engine.model.test_families import FamilyOracle

# New tokens, which the prompts have as well.
TOKENS = [3, 17, 91, 8]

# What changes nothing as wide as the vocabulary: on a GPU these take graphs.
NARROW: dict[str, dict[str, Any]] = {
    "plain": {"r": 8, "lora_alpha": 8, "target_modules": LINEARS},
    "rslora": {
        "r": 5,
        "lora_alpha": 6,
        "use_rslora": True,
        "target_modules": ["k_proj", "v_proj", "up_proj"],
    },
    "patterns": {
        "r": 4,
        "target_modules": LINEARS,
        "rank_pattern": {"q_proj": 9, "model.layers.1.mlp.down_proj": 2},
        "alpha_pattern": {"v_proj": 16},
    },
    "dora": {"r": 4, "lora_alpha": 6, "use_dora": True, "target_modules": LINEARS},
    "dora-kv": {
        "r": 3,
        "use_dora": True,
        "use_rslora": True,
        "target_modules": ["k_proj", "v_proj", "down_proj"],
    },
    # Not "bias": with this name PEFT mistakes the parts of a tensor's name.
    "biased": {"r": 2, "lora_bias": True, "target_modules": LINEARS},
    "tokens": {
        "r": 4,
        "target_modules": ["q_proj", "v_proj"],
        "trainable_token_indices": [200, *TOKENS],
    },
    "tokens-apart": {
        "r": 2,
        "use_dora": True,
        "target_modules": ["v_proj", "o_proj"],
        "trainable_token_indices": {"embed_tokens": TOKENS, "lm_head": [9, 40, TOKENS[0]]},
    },
    "tokens-head": {
        "r": 3,
        "target_modules": ["up_proj"],
        "trainable_token_indices": {"lm_head": list(range(0, 250, 5))},
    },
}
WIDE: dict[str, dict[str, Any]] = {
    "ends": {"r": 5, "target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    "dora-ends": {
        "r": 4,
        "use_dora": True,
        "target_modules": ["embed_tokens", "lm_head", "v_proj"],
    },
    "bias-head": {"r": 2, "lora_bias": True, "target_modules": ["v_proj", "lm_head"]},
    "tokens-lora-head": {
        "r": 2,
        "target_modules": ["q_proj", "lm_head"],
        "trainable_token_indices": TOKENS,
    },
    "saved": {
        "r": 4,
        "target_modules": ["q_proj", "lm_head"],
        "modules_to_save": ["embed_tokens", "lm_head"],
    },
    "saved-embedding": {
        "r": 3,
        "use_dora": True,
        "target_modules": ["k_proj", "lm_head"],
        "modules_to_save": ["embed_tokens"],
    },
    "saved-head": {
        "r": 2,
        "target_modules": ["v_proj", "embed_tokens"],
        "modules_to_save": ["lm_head"],
    },
    "saved-tied": {
        "r": 2,
        "target_modules": ["v_proj"],
        "modules_to_save": ["embed_tokens"],
        "ensure_weight_tying": True,
    },
}
FORMATS = {**NARROW, **WIDE}
NARROW_BLENDS: dict[str, dict[str, float]] = {
    "half a dora": {"dora": 0.5},
    "doras and plain": {"dora": 0.6, "dora-kv": -0.4, "plain": 0.7, "biased": 1.5},
    "blended tokens": {"tokens": 0.5, "tokens-apart": -0.3, "tokens-head": 1.2, "plain": 0.4},
}
WIDE_BLENDS: dict[str, dict[str, float]] = {
    "blended ends": {"ends": 0.7, "dora-ends": 0.5, "bias-head": 0.4, "dora": 0.3},
    "blended saved": {"saved": 0.6, "tokens": 0.7, "dora-ends": 0.5, "saved-head": -0.2},
}
BLENDS = {**NARROW_BLENDS, **WIDE_BLENDS}


class FormatOracle:
    """A base with an adapter of every format, by PEFT, and blends of them."""

    def __init__(self, base: Path, folder: Path) -> None:
        self.base = base
        self.adapters = {
            name: save_adapter(base, folder / name, seed, **config)
            for seed, (name, config) in enumerate(FORMATS.items())
        }
        # One model each: several that replace the same module do not go into one.
        self._peft = {
            name: FamilyOracle(base, {name: path}) for name, path in self.adapters.items()
        }
        self._reference = Reference(base)

    def logprobs(self, token_ids: list[int], name: str | None) -> torch.Tensor:
        """[tokens, V]: of the token after each."""
        if name not in BLENDS:
            return self._peft[name or "plain"].logprobs(token_ids, name)
        blend = {self.adapters[part]: weight for part, weight in BLENDS[name].items()}
        return self._reference.logits(token_ids, blend).log_softmax(-1)

    def check(self, result: Result, tokens: list[int], name: str | None) -> None:
        """Greedy, and as likely as the engine says."""
        assert result.error is None, (name, result.error)
        found = self.logprobs(tokens + result.token_ids, name)[len(tokens) - 1 : -1]
        assert result.token_ids == found.argmax(-1).tolist(), name
        for row, got in zip(found, result.logprobs, strict=True):
            for token_id, logprob in got.top:
                assert row[token_id].item() == pytest.approx(logprob, abs=2e-3), name


def make_engine(oracle: FormatOracle, **config: Any) -> Engine:
    given = {"model_dir": oracle.base, **SMALL, "arena_bytes": 16 << 20, **config}
    engine = Engine(EngineConfig(**given))
    for name, path in oracle.adapters.items():
        engine.register_adapter(name, path)
    return engine


def check(
    engine: Engine, oracle: FormatOracle, names: list[str], lengths: list[int], num_tokens: int
) -> None:
    """The base and all of `names`, blends too, in one batch; prompts of these lengths in turn."""
    chosen: dict[str, str | None] = {"base": None, **{name: name for name in names}}
    prompts = {
        request_id: [*prompt(i, lengths[i % len(lengths)]), *TOKENS[: i % 4 + 1]]
        for i, request_id in enumerate(chosen)
    }
    results = run(
        engine,
        *(
            request(
                request_id,
                prompts[request_id],
                adapter=BLENDS.get(name, name) if name else None,
                max_tokens=num_tokens,
                logprobs=20,
            )
            for request_id, name in chosen.items()
        ),
        check=True,
    )
    for request_id, name in chosen.items():
        oracle.check(results[request_id], prompts[request_id], name)
