"""An adapter trained on a base of any family is served as PEFT applies it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

from engine import AdapterPart, Engine, EngineConfig, Request, SamplingParams
from engine.text.codec import TextCodec
from tests.tiny_base import write_tiny_base
from tests.worker.training.job_runs import run_here, write_job, write_rows

HYBRID: dict[str, Any] = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 6},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {"head_dim": 16, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    "gemma3_text": {"head_dim": 16, "sliding_window": 6, "sliding_window_pattern": 2},
    "cohere2": {"sliding_window": 6},
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": {**HYBRID, **EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_moe": EXPERTS,
    "gpt_oss": {
        "head_dim": 16,
        "sliding_window": 6,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "gemma4_text": {
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 6,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 512,
    },
}


@pytest.fixture(params=FAMILIES)
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = write_tiny_base(tmp_path / "base")
    llama = AutoConfig.from_pretrained(folder).to_dict()
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "eos_token_id")
    fields = {name: llama[name] for name in (*kept, "num_attention_heads", "num_key_value_heads")}
    torch.manual_seed(1)
    config = AutoConfig.for_model(
        request.param,
        **fields,
        **FAMILIES[request.param],
        max_position_embeddings=512,
        initializer_range=0.5,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_a_trained_adapter_is_served(base: Path, tmp_path: Path) -> None:
    chat = [
        {"role": "user", "content": "hello, how are you? {json: 12}"},
        {"role": "assistant", "content": "world"},
    ]
    rows = write_rows(tmp_path / "data.jsonl", [{"messages": chat}] * 8)
    events = run_here(write_job(tmp_path, base, rows, max_steps=20))
    adapter = Path(events[-1]["output"])

    codec = TextCodec(base)
    prompt = codec.encode_chat(codec.render(chat[:1]))
    engine = Engine(EngineConfig(model_dir=base, arena_bytes=8 << 20))
    engine.register_adapter("a", adapter)
    for request_id, parts in (("base", ()), ("tuned", (AdapterPart(digest="a"),))):
        sampling = SamplingParams(temperature=0.0, max_tokens=10)
        engine.add(
            Request(request_id=request_id, token_ids=prompt, sampling=sampling, adapters=parts)
        )
    token_ids: dict[str, list[int]] = {"base": [], "tuned": []}
    while engine.has_work():
        for output in engine.step():
            assert output.error is None
            token_ids[output.request_id] += output.token_ids
    engine.close()

    assert codec.decode(token_ids["tuned"]) == "world"
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    tokens = torch.tensor([prompt])
    wanted = model.generate(input_ids=tokens, do_sample=False, max_new_tokens=10, pad_token_id=0)
    wanted = [token for token in wanted[0, len(prompt) :].tolist() if token != 2]
    assert token_ids["tuned"] == wanted
    assert token_ids["base"] != wanted
