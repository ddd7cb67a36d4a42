"""Tiny bases, random runs, and what PEFT with transformers' Trainer makes of the same runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import (
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from engine.model.config import ModelConfig
from engine.model.weights import load_weights
from engine.training.events import Event, RunEnded, RunProgress, RunStarted
from engine.training.model import TrainingModel
from engine.training.run import RunRequest, RunRows, RunSettings
from engine.training.trainer import BatchTrainer, TrainerConfig

VOCABULARY = 257
IGNORED = -100
#: Eight runs with little in common.
SETTINGS = (
    RunSettings(rank=4, alpha=8, steps=5, batch_size=2, learning_rate=3e-3, seed=1),
    RunSettings(rank=1, alpha=2, steps=3, batch_size=1, target_modules=("k_proj", "o_proj")),
    RunSettings(rank=16, alpha=16, use_rslora=True, steps=4, batch_size=3, warmup_steps=2),
    RunSettings(rank=3, steps=6, batch_size=2, gradient_accumulation=2, learning_rate=1e-2),
    RunSettings(rank=8, steps=2, batch_size=7, target_modules=("down_proj",), seed=9),
    RunSettings(rank=5, steps=4, batch_size=4, schedule="linear", weight_decay=0.1, alpha=5),
    RunSettings(rank=32, steps=3, batch_size=5, schedule="constant", max_grad_norm=0.1),
    RunSettings(rank=2, steps=7, batch_size=1, target_modules=("q_proj", "up_proj"), beta2=0.95),
)


def make_rows(seed: int, count: int, longest: int = 24) -> RunRows:
    """Random rows of 2 to `longest` tokens; about half of each is the answer."""
    generator = torch.Generator().manual_seed(seed)

    def number(least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (), generator=generator))

    rows = []
    for _ in range(count):
        length = number(2, longest)
        tokens = torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()
        first = number(1, length - 1)
        last = number(first, length - 1)
        rows.append((tokens, [first <= i <= last or i == length - 1 for i in range(length)]))
    return RunRows.of(rows)


def request(name: str, settings: RunSettings, seed: int = 0, count: int = 9) -> RunRequest:
    return RunRequest(run_id=name, rows=make_rows(seed, count), settings=settings)


def eight_runs() -> list[RunRequest]:
    return [
        request(f"run-{i}", settings, seed=i, count=6 + i) for i, settings in enumerate(SETTINGS)
    ]


def load(
    folder: Path, dtype: torch.dtype = torch.float32, recomputed: int = 0, device: str = "cpu"
) -> TrainingModel:
    config = ModelConfig.from_folder(folder)
    return TrainingModel(config, load_weights(folder, config, device, dtype), recomputed)


def make_trainer(model: TrainingModel, **config: Any) -> BatchTrainer:
    return BatchTrainer(
        model, TrainerConfig(**{"token_budget": 96, "pool_elements": 1 << 20, **config})
    )


@dataclass
class Result:
    """What a trainer said of one run."""

    starts: list[RunStarted] = field(default_factory=list)
    progress: list[RunProgress] = field(default_factory=list)
    end: RunEnded | None = None

    @property
    def losses(self) -> list[float]:
        return [each.loss for each in self.progress]

    @property
    def adapter(self) -> dict[str, torch.Tensor]:
        assert self.end is not None and self.end.adapter is not None, self.end
        return self.end.adapter


def note(results: dict[str, Result], events: Sequence[Event]) -> None:
    for event in events:
        result = results.setdefault(event.run_id, Result())
        assert result.end is None, f"after the end: {event}"
        if isinstance(event, RunStarted):
            result.starts.append(event)
        elif isinstance(event, RunProgress):
            result.progress.append(event)
        elif isinstance(event, RunEnded):
            result.end = event


def train(trainer: BatchTrainer, requests: Sequence[RunRequest]) -> dict[str, Result]:
    """Train these runs to their ends."""
    results: dict[str, Result] = {}
    for each in requests:
        trainer.add(each)
    while trainer.has_work:
        note(results, trainer.step())
        trainer.check_integrity()
    assert trainer.used_elements == 0
    return results


def difference(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """The largest difference of any two values."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@dataclass
class PeftRun(TrainerCallback):
    """What the Trainer logged, step by step, and the adapter it ended with."""

    losses: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    adapter: dict[str, torch.Tensor] = field(default_factory=dict)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        if "loss" in logs:
            self.losses.append(logs["loss"])
            self.rates.append(logs["learning_rate"])
            self.norms.append(logs["grad_norm"])


def peft_model(folder: Path, settings: RunSettings, dtype: torch.dtype = torch.float32) -> Any:
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    set_seed(settings.seed)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.rank,
        lora_alpha=settings.alpha,
        use_rslora=settings.use_rslora,
        lora_dropout=settings.dropout,
        target_modules=list(settings.target_modules),
    )
    return get_peft_model(base, config)


def peft_train(folder: Path, asked: RunRequest, output: Path) -> PeftRun:
    """The run by PEFT and the Trainer, whose own order of the rows and initial adapter it has."""
    settings, rows = asked.settings, asked.rows
    model = peft_model(folder, settings)
    if asked.adapter is not None:
        model.load_state_dict(
            {name.replace(".weight", ".default.weight"): t for name, t in asked.adapter.items()},
            strict=False,
        )
    dataset = []
    for start, end in zip(rows.starts, rows.starts[1:], strict=False):
        tokens, marks = rows.token_ids[start:end].tolist(), rows.is_answer[start:end].tolist()
        labels = [t if mark else IGNORED for t, mark in zip(tokens, marks, strict=True)]
        dataset.append({"input_ids": tokens, "labels": labels})
    strategy = {"group_by_length": "group_by_length", "shuffled": "random", "given": "sequential"}
    told = PeftRun()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(output),
            per_device_train_batch_size=settings.batch_size,
            gradient_accumulation_steps=settings.gradient_accumulation,
            max_steps=settings.steps,
            learning_rate=settings.learning_rate,
            lr_scheduler_type={"constant": "constant_with_warmup"}.get(
                settings.schedule, settings.schedule
            ),
            warmup_steps=settings.warmup_steps,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_epsilon=settings.epsilon,
            max_grad_norm=settings.max_grad_norm,
            train_sampling_strategy=strategy[settings.order],
            remove_unused_columns=False,
            logging_steps=1,
            logging_nan_inf_filter=False,
            disable_tqdm=True,
            report_to=[],
            save_strategy="no",
            seed=settings.seed,
            use_cpu=True,
        ),
        train_dataset=dataset,
        data_collator=_collate,
        callbacks=[told],
    )
    trainer.train()
    told.adapter = {n: t.detach().clone() for n, t in get_peft_model_state_dict(model).items()}
    return told


def _collate(examples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    width = max(len(example["input_ids"]) for example in examples)

    def padded(values: list[list[int]], fill: int) -> torch.Tensor:
        return torch.tensor([each + [fill] * (width - len(each)) for each in values])

    return {
        "input_ids": padded([example["input_ids"] for example in examples], 0),
        "labels": padded([example["labels"] for example in examples], IGNORED),
        "attention_mask": padded([[1] * len(example["input_ids"]) for example in examples], 0),
    }
