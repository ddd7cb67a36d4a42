"""DashEngine over a loaded model: the answers of the folder's, adapters and all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine import DashConfig, DashEngine, UnsupportedModel
from tests.engine.conftest import Oracle, prompt

SMALL = {"adapter_vram_pool": "2MB", "kv_pool": "2MB"}
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
)


@pytest.fixture
def model(tiny_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


@pytest.mark.parametrize("pack_weights", [False, True])
def test_a_mixed_batch_over_a_loaded_model(
    model: Any, adapters: dict[str, Path], oracle: Oracle, pack_weights: bool
) -> None:
    prompts = [prompt(i, 8) for i in range(3)]
    names = ["all-4", None, "qv-16"]
    token_ids = torch.tensor([prompts[0]])
    before = model(token_ids).logits
    with DashEngine(model, DashConfig(**SMALL, pack_weights=pack_weights)) as engine:
        for name in ("all-4", "qv-16"):
            engine.register_adapter(name, adapters[name])
        got = engine.generate(prompts, names, max_new_tokens=12)
    for tokens, name, completion in zip(prompts, names, got, strict=True):
        wanted = oracle.generate(tokens, 12, name)
        assert completion.token_ids == wanted[: len(completion.token_ids)]
        assert len(completion.token_ids) == 12 or completion.finish_reason == "stop"
    assert torch.equal(model(token_ids).logits, before)


def test_its_tokenizer_is_found_where_it_was_loaded(model: Any, tiny_model: Path) -> None:
    with DashEngine(model, DashConfig(**SMALL)) as engine:
        (found,) = engine.generate("hello", max_new_tokens=5)
        (shaped,) = engine.generate("hello", max_new_tokens=40, json_schema=SCHEMA)
    with DashEngine(tiny_model, DashConfig(**SMALL)) as engine:
        (wanted,) = engine.generate("hello", max_new_tokens=5)
    assert found.text and found.text == wanted.text
    assert json.loads(shaped.text)["a"] in (1, 2)


def test_without_a_tokenizer_it_takes_token_ids(
    model: Any, tiny_model: Path, tmp_path: Path
) -> None:
    model.name_or_path = str(tmp_path / "nowhere")
    with DashEngine(model, DashConfig(**SMALL)) as engine:
        assert engine.tokenizer is None
        (completion,) = engine.generate([1, 2, 3], max_new_tokens=4)
        assert len(completion.token_ids) == 4 and completion.text == ""
        assert [p.text for p in engine.stream([1, 2, 3], max_new_tokens=2)] == [""]
        for wrong in ({"prompts": "text"}, {"prompts": [{"role": "user", "content": "x"}]}):
            with pytest.raises(ValueError, match=r"need a tokenizer.*use token ids"):
                engine.generate(**wrong)
        with pytest.raises(ValueError, match="stop strings"):
            engine.generate([1], stop="x")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    with DashEngine(model, DashConfig(**SMALL), tokenizer=tokenizer) as engine:
        (completion,) = engine.generate("ab", max_new_tokens=4)
        assert completion.text == tokenizer.decode(completion.token_ids)


def test_a_folder_without_a_tokenizer_takes_token_ids(tiny_model: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny_model / name, tmp_path / name)
    with DashEngine(tmp_path, DashConfig(**SMALL)) as engine:
        assert engine.generate([1, 2], max_new_tokens=2)[0].error is None
        with pytest.raises(ValueError, match="prompts of text need a tokenizer"):
            engine.generate("text")


def test_device_and_dtype_are_the_models(model: Any) -> None:
    with pytest.raises(ValueError, match="dtype is 'bfloat16', but the loaded model's is 'float3"):
        DashEngine(model, DashConfig(**SMALL, dtype="bfloat16"))
    with pytest.raises(ValueError, match="device is 'cuda', but the loaded model's is 'cpu'"):
        DashEngine(model, DashConfig(**SMALL, device="cuda"))
    with DashEngine(model.bfloat16(), DashConfig(**SMALL)) as engine:
        assert "cpu, bfloat16" in repr(engine)
        assert len(engine.generate([1, 2, 3], max_new_tokens=4)[0].token_ids) == 4


def test_a_float16_model_gives_the_tokens_of_its_float32_copy(model: Any) -> None:
    with DashEngine(model.half(), DashConfig(**SMALL)) as engine:
        assert "cpu, float32" in repr(engine)
        found = engine.generate([1, 2, 3], max_new_tokens=8)[0].token_ids
    with DashEngine(model.float(), DashConfig(**SMALL)) as engine:
        assert found == engine.generate([1, 2, 3], max_new_tokens=8)[0].token_ids


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="base is a int"):
        DashEngine(5)
    with pytest.raises(UnsupportedModel, match=r"config\.json"):
        DashEngine(tmp_path)
