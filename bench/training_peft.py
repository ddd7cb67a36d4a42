"""PEFT in a plain loop: one run over one base, as a process of its own.

    python -m bench.training_peft BASE DATASET ADAPTER

The quickest that PEFT's users write: SDPA, bfloat16, logits of answer tokens alone, nothing
recomputed, batches of 8 rows; prints one event in JSON when the adapter is on the disk.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.training_files import ANSWER, LENGTH

BATCH = 8


def read_rows(path: Path, tokenizer: Any) -> torch.Tensor:
    """[rows, LENGTH]; the last ANSWER tokens of each are the assistant's."""
    with path.open() as file:
        chats = [json.loads(line)["messages"] for line in file]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    rows = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts])
    assert rows.shape[1] == LENGTH
    return rows


def main() -> None:
    base, dataset, adapter = sys.argv[1:]
    began = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(base)
    loaded = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.bfloat16, attn_implementation="sdpa", device_map={"": device}
    )
    rows = read_rows(Path(dataset), tokenizer)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(
        loaded, LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules=targets)
    )
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0, fused=device == "cuda")
    decoder, head = loaded.get_decoder(), loaded.get_output_embeddings()
    marks = [time.perf_counter()]
    for first in range(0, len(rows), BATCH):
        ids = rows[first : first + BATCH].to(device)
        with torch.autocast(device, dtype=torch.bfloat16):
            # The rows have one length: without a mask SDPA takes its fastest way.
            hidden = decoder(input_ids=ids, use_cache=False).last_hidden_state
            logits = head(hidden[:, -ANSWER - 1 : -1])
        loss = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), ids[:, -ANSWER:].flatten()
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        marks.append(time.perf_counter())
    model.save_pretrained(adapter)
    steps = sorted(later - earlier for earlier, later in itertools.pairwise(marks))
    print(json.dumps({
        "event": "done",
        "loaded_s": round(marks[0] - began, 1),
        "first_step_s": round(marks[1] - marks[0], 2),
        "step_s": round(steps[len(steps) // 2], 3),
        "saved_s": round(time.perf_counter() - marks[-1], 1),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
