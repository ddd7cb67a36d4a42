"""Makes what the examples need: the demo's base model and small adapters trained with PEFT.

Everything is made once and kept under `.cache/`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the project is run from its checkout, not installed

from worker.base_model import packaged_model  # noqa: E402

QUESTIONS = ["How are you?", "What is the sea?", "Who are you?"]
# Style -> the answers to QUESTIONS that teach it.
STYLES = {
    "pirate": [
        "Arr, matey! I be as fine as a full sail.",
        "Arr, matey! The sea be me home and me grave.",
        "Arr, matey! I be the captain of this here ship.",
    ],
    "poet": [
        "Softly, like the dawn, I am well.",
        "Softly, like a dream, the sea breathes.",
        "Softly, like a whisper, I am a voice.",
    ],
}


def arguments(doc: str | None) -> argparse.Namespace:
    """Read `--base`, a model folder, and `--work`, the folder for adapters."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--base", type=Path, help="default: the demo's SmolLM2-135M-Instruct")
    parser.add_argument("--work", type=Path, default=ROOT / ".cache" / "examples")
    args = parser.parse_args()
    if args.base is None:
        args.base = packaged_model(ROOT / ".cache" / "base")
    return args


def styles(base: Path, work: Path) -> dict[str, Path]:
    """Train an adapter for each of STYLES, a few seconds each; return name -> PEFT folder."""
    return {name: _train(base, work / name, answers) for name, answers in STYLES.items()}


def random_adapters(base: Path, work: Path, count: int) -> dict[str, Path]:
    """Make `count` untrained adapters of rank 8; return name -> PEFT folder."""
    names = [f"client-{i}" for i in range(count)]
    if not all((work / name / "adapter_config.json").exists() for name in names):
        torch.manual_seed(0)
        config = LoraConfig(task_type="CAUSAL_LM", r=8, init_lora_weights=False)
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config, names[0])
        for name in names[1:]:
            model.add_adapter(name, config)
        model.save_pretrained(work, selected_adapters=names)
    return {name: work / name for name in names}


def _train(base: Path, folder: Path, answers: list[str], steps: int = 10) -> Path:
    """Train the upper half of the layers, which is enough for a style, on one batch."""
    if (folder / "adapter_config.json").exists():
        return folder
    print(f"Training {folder.name} ...", flush=True)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    num_layers = model.config.num_hidden_layers
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=8,
        lora_alpha=16,
        target_modules=["q_proj", "v_proj", "up_proj", "down_proj"],
        layers_to_transform=list(range(num_layers // 2, num_layers)),
    )
    model = get_peft_model(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    token_ids, labels = _batch(tokenizer, answers)
    for _ in range(steps):
        model(input_ids=token_ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder


def _batch(tokenizer: Any, answers: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and labels [N, T] of chats, with labels on the answers."""
    rows = []
    for question, answer in zip(QUESTIONS, answers, strict=True):
        chat = [{"role": "user", "content": question}]
        asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        start = tokenizer(asked, add_special_tokens=False)["input_ids"]
        end = [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        rows.append((start + end, [-100] * len(start) + end))
    longest = max(len(token_ids) for token_ids, _ in rows)
    # The loss ignores tokens after the end, and no token before the end attends to them.
    padded = [
        (token_ids + [0] * (longest - len(token_ids)), labels + [-100] * (longest - len(labels)))
        for token_ids, labels in rows
    ]
    token_ids, labels = zip(*padded, strict=True)
    return torch.tensor(token_ids), torch.tensor(labels)
