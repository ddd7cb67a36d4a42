"""Which tokens end an answer, where the files of a model disagree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from engine import DashConfig, DashEngine, Engine, EngineConfig, SamplingParams
from engine.text.tokenizer_files import read_end_id
from tests.engine.conftest import request, run, save_model

END = 256  # the tokenizer's
SIZES: dict[str, Any] = {"adapter_vram_pool": "1MB", "kv_pool": "2MB"}
SPOKEN = {"max_tokens": 5, "logit_bias": {END: 100.0}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model that names another token as its end than its tokenizer."""
    return save_model(tmp_path, eos_token_id=7, pad_token_id=7)


def test_the_tokenizers_end_counts_beside_the_models(folder: Path) -> None:
    engine = Engine(EngineConfig(model_dir=folder, device="cpu", arena_bytes=2 << 20))
    asked = {name: {**SPOKEN, "ignore_eos": name == "on"} for name in ("end", "on")}
    asked["own"] = {**SPOKEN, "logit_bias": {7: 100.0}, "ignore_eos": False}
    results = run(engine, *(request(name, [1, 2], **fields) for name, fields in asked.items()))
    engine.close()
    found = {name: (results[name].token_ids, results[name].finish_reason) for name in asked}
    assert found == {"end": ([], "stop"), "own": ([], "stop"), "on": ([END] * 5, "length")}


@pytest.mark.parametrize("is_loaded", [False, True])
def test_the_library_ends_there_too(folder: Path, is_loaded: bool) -> None:
    base: Any = AutoModelForCausalLM.from_pretrained(folder) if is_loaded else folder
    sampling = SamplingParams(temperature=0.0, logit_bias=SPOKEN["logit_bias"])  # type: ignore[arg-type]
    with DashEngine(base, DashConfig(**SIZES)) as dash:
        (got,) = dash.generate([[1, 2]], sampling=sampling, max_new_tokens=5)
    assert (got.token_ids, got.finish_reason) == ([], "stop")


def test_where_the_end_is_written(folder: Path) -> None:
    """In the settings or beside them, as text or as an object; its id beside it or in the
    tokenizer."""
    assert read_end_id(folder) == END
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    named = {"content": settings.pop("eos_token"), "lstrip": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": None}))
    assert read_end_id(folder) is None
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": named}))
    assert read_end_id(folder) == END
    (folder / "tokenizer.json").rename(folder / "elsewhere.json")
    assert read_end_id(folder) is None
    listed = {"added_tokens_decoder": {"256": named}}
    (folder / "tokenizer_config.json").write_text(json.dumps(listed))
    assert read_end_id(folder) == END


def test_a_tokenizer_with_more_tokens_than_the_model(folder: Path) -> None:
    larger = PreTrainedTokenizerFast.from_pretrained(folder)
    larger.add_special_tokens({"eos_token": "<|later|>"})
    sampling = SamplingParams(temperature=0.0, min_tokens=2)
    with DashEngine(folder, DashConfig(**SIZES), tokenizer=larger) as dash:
        (got,) = dash.generate([[1, 2]], sampling=sampling, max_new_tokens=3)
    assert got.error is None
