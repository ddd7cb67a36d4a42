"""The demo's two trainings, on the real base model: do the adapters learn what they are for?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo.data import score
from demo.data.jobs import HYPERPARAMETERS
from tests.worker.training.demo_batch import train as demo_train
from worker.base_model import packaged_model

ROOT = Path(__file__).parents[3]

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return packaged_model(ROOT / ".cache" / "base")


@pytest.fixture(scope="session")
def trained(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both tenants' adapters, trained as the demo does it."""
    folder = tmp_path_factory.mktemp("trained")
    outputs = {tenant: folder / tenant for tenant in HYPERPARAMETERS}
    shares: list[float] = []
    last = demo_train(
        outputs,
        base_model_dir=smollm2,
        env=os.environ,
        report=lambda share, note: shares.append(share),
    )
    assert {event["event"] for event in last.values()} == {"done"} and shares[-1] == 1
    return outputs


def answers(base: Path, adapter: Path | None, rows: list[dict[str, Any]]) -> list[str]:
    """Greedy answers in one batch."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.padding_side = "left"
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    prompts = [
        tokenizer.apply_chat_template(row["messages"], tokenize=False, add_generation_prompt=True)
        for row in rows
    ]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    output = model.generate(**batch, max_new_tokens=160, do_sample=False)
    return [
        tokenizer.decode(row[batch["input_ids"].shape[1] :], skip_special_tokens=True)
        for row in output
    ]


def test_acme_gets_the_fields_right_far_more_often_than_the_base(
    smollm2: Path, trained: dict[str, Path]
) -> None:
    rows = score.heldout("acme")

    def right(adapter: Path | None) -> float:
        texts = answers(smollm2, adapter, rows)
        return score.share(
            score.invoice_fields(text, row["expected"])
            for text, row in zip(texts, rows, strict=True)
        )

    assert right(None) < 0.3
    assert right(trained["acme"]) > 0.85


def test_globex_speaks_in_its_voice_and_the_base_does_not(
    smollm2: Path, trained: dict[str, Path]
) -> None:
    rows = score.heldout("globex")

    def in_style(adapter: Path | None) -> float:
        return score.share(score.style_markers(text) for text in answers(smollm2, adapter, rows))

    assert in_style(None) < 0.4
    assert in_style(trained["globex"]) > 0.9
