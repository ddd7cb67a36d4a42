"""Compute with PEFT the log-probabilities that workers must match on the probe's prompts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from contract.adapters.inspection import MAX_PROMPT_TOKENS, MAX_PROMPTS, TOP

#: Prose, code, JSON and a chat: the usual subjects of adapters.
PROMPTS = (
    "The invoice of 12 March 2024 amounts to 1,250.00 EUR and is due within thirty days.",
    "def add(a, b):\n    return a + b\n\nprint(add(2, 3))  # 5",
    '{"name": "Ada", "email": "ada@example.com", "items": [1, 2, 3]}',
)
CHAT = ({"role": "user", "content": "Which animal is a lorikeet?"},)
ANSWER = "A lorikeet is a small parrot."
#: Bytes of fp32 weights above which a base is computed in bf16.
MAX_FP32_BYTES = 16 << 30


def load_base(folder: Path) -> Any:
    """Return the base model, on the CPU: in fp32 unless it is too large."""
    num_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    # The files have at least two bytes per weight.
    dtype = torch.float32 if num_bytes * 2 <= MAX_FP32_BYTES else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return model.eval()


def base_norms(model: Any) -> dict[str, float]:
    """Return module -> Frobenius norm of its matrix, of an unadapted base."""
    norms = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if weight is not None and weight.dim() == 2:
            norms[name] = float(torch.linalg.vector_norm(weight.detach(), dtype=torch.float32))
    return norms


def probe_prompts(folder: Path, token_ids: Mapping[str, tuple[int, ...]]) -> list[list[int]]:
    """Return the prompts as token ids, each of 2 to MAX_PROMPT_TOKENS.

    folder     of the base model
    token_ids  tokens whose rows the adapter replaces: they make a prompt of their own
    """
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    if tokenizer.chat_template:
        chat = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
        answer = tokenizer(chat + ANSWER, add_special_tokens=False)["input_ids"]
        prompts.append(answer[-MAX_PROMPT_TOKENS:])  # the answer, whatever the system message
    trained = sorted({token for ids in token_ids.values() for token in ids})
    if trained:
        step = -(-len(trained) // (MAX_PROMPT_TOKENS - 8))
        prompts.append(prompts[0][:8] + trained[::step])
    return [ids[:MAX_PROMPT_TOKENS] for ids in prompts if len(ids) > 1][:MAX_PROMPTS]


def reference_of(model: Any, adapter_dir: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """Return the log-probabilities of the prompts' tokens, with the adapter and without.

    model  the base, which is changed in place
    """
    config = PeftConfig.from_pretrained(adapter_dir)
    if config.task_type == "SEQ_CLS":  # its LoRA is compared under the base's head
        config.modules_to_save = None
    config.task_type = "CAUSAL_LM"
    peft_model = PeftModel.from_pretrained(model, adapter_dir, config=config).eval()
    told = []
    with torch.inference_mode():
        for token_ids in prompts:
            adapter = _scored(peft_model, token_ids)
            with peft_model.disable_adapter():
                base = _scored(peft_model, token_ids)
            told.append({"token_ids": token_ids, "adapter": adapter, "base": base})
    return {"dtype": str(model.dtype).removeprefix("torch."), "prompts": told}


def _scored(model: Any, token_ids: list[int]) -> dict[str, Any]:
    """Return the log-probability of each token but the first, and the likeliest last tokens."""
    ids = torch.tensor([token_ids])
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()  # [T - 1, V]
    logprobs = logits.log_softmax(-1)
    own = logprobs.gather(1, ids[0, 1:, None])[:, 0]
    values, tokens = logprobs[-1].topk(TOP)
    return {
        "logprobs": [round(value, 5) for value in own.tolist()],
        "top": [
            [token, round(value, 5)]
            for token, value in zip(tokens.tolist(), values.tolist(), strict=True)
        ],
    }
