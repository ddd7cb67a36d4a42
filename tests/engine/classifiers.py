"""Adapters of PEFT's task SEQ_CLS, and what transformers makes of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForSequenceClassification

from tests.engine.conftest import LINEARS


def save_classifier(
    base: Path, folder: Path, num_labels: int, seed: int = 0, *, labels: Sequence[str] = ()
) -> Path:
    """A PEFT adapter of the task SEQ_CLS, as PEFT saves it; its config may name its labels."""
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=num_labels)
    config = LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=8, target_modules=LINEARS)
    adapted = get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    adapted.create_or_update_model_card = lambda _: None
    adapted.save_pretrained(folder)
    if labels:
        file = folder / "adapter_config.json"
        named = {"id2label": {str(i): label for i, label in enumerate(labels)}}
        file.write_text(json.dumps(json.loads(file.read_text()) | named))
    return folder


def probabilities(base: Path, adapter: Path, tokens: list[int], num_labels: int) -> list[float]:
    """What transformers and PEFT say, reading the saved folder."""
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=num_labels)
    adapted = PeftModel.from_pretrained(model, adapter).eval()
    with torch.inference_mode():
        logits = adapted(torch.tensor([tokens])).logits[0]
    shares = logits.sigmoid() if num_labels == 1 else logits.softmax(-1)
    found: list[float] = shares.tolist()
    return found
