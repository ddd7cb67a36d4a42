"""The training loop behind `worker.train`: PEFT's LoRA on transformers' Trainer."""

from __future__ import annotations

import functools
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from contract.training import Hyperparameters, JobError, TrainJob
from worker.training.chat_data import IGNORED, Example, collate

Emit = Callable[..., None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A finished training. `final_loss` is the mean over the last tenth of the steps."""

    model: Any
    final_loss: float
    trained_tokens: int


def training_dtype() -> torch.dtype:
    """Return bfloat16 if the device multiplies it natively, else float32.

    On a 2-core CPU with AVX512-BF16: 302 instead of 172 tokens/s (135M parameters, rank 16).
    """
    if torch.cuda.is_available():
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native else torch.float32


def limit_gpu_memory(share: float | None) -> None:
    """Let this process allocate at most a share of the GPU's memory; a worker has the rest."""
    if share is not None and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(share)


def load_tokenizer(folder: Path) -> Any:
    """Return the base's tokenizer. Raises JobError unless it can be trained with."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if not tokenizer.chat_template or not tokenizer.is_fast:
        raise JobError("base_model_dir", "the tokenizer needs a chat template and a fast tokenizer")
    return tokenizer


def planned(examples: list[Example], hyper: Hyperparameters) -> dict[str, int]:
    """Return the length of the training, as its event `started` has it."""
    tokens_per_epoch = sum(len(example.input_ids) for example in examples)
    steps_per_epoch = -(-len(examples) // hyper.batch_size)
    steps = hyper.max_steps or max(1, round(steps_per_epoch * hyper.epochs))
    return {
        "rows": len(examples),
        "truncated_rows": sum(example.is_truncated for example in examples),
        "tokens": round(tokens_per_epoch * steps / steps_per_epoch),
        "steps": steps,
    }


def final_loss(losses: list[float]) -> float:
    """Return the mean loss of the last tenth of the steps."""
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)


def load_base(job: TrainJob) -> tuple[Any, Any]:
    """Load the job's base model and its tokenizer.

    Raises JobError if the tokenizer has no chat template or cannot map tokens to characters, or if
    a target module is not a linear layer of the model's decoder layers.
    """
    if job.num_threads is not None:
        torch.set_num_threads(job.num_threads)
    limit_gpu_memory(job.gpu_share)
    tokenizer = load_tokenizer(job.base_model_dir)
    model = AutoModelForCausalLM.from_pretrained(
        job.base_model_dir, dtype=training_dtype(), local_files_only=True
    )
    linears = {
        name.rpartition(".")[2]
        for name, module in model.get_decoder().layers.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    for target in job.hyperparameters.target_modules:
        if target not in linears:
            raise JobError(
                "hyperparameters.target_modules",
                f"{target!r} is not one of {', '.join(sorted(linears))}",
            )
    return model, tokenizer


class AnswerTrainer(Trainer):
    """A Trainer that computes logits for the assistant's tokens alone.

    The LM head and its softmax are a quarter of a small model's work, and more than half of a
    chat's tokens belong to the prompt.
    """

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the mean loss over the batch's labelled tokens."""
        base = self.accelerator.unwrap_model(model).get_base_model()
        labels = inputs["labels"][:, 1:]
        kept = labels != IGNORED  # [S, T - 1]
        with torch.autocast(
            labels.device.type, dtype=base.dtype, enabled=base.dtype != torch.float32
        ):
            hidden = base.get_decoder()(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                use_cache=False,
            ).last_hidden_state
            logits = base.get_output_embeddings()(hidden[:, :-1][kept])  # [answer tokens, V]
        return F.cross_entropy(logits.float(), labels[kept])


class Progress(TrainerCallback):
    """Turns the Trainer's log lines into progress events; raises JobError if training diverges."""

    def __init__(self, emit: Emit, tokens_per_epoch: int) -> None:
        self.losses: list[float] = []
        self._emit = emit
        self._tokens_per_epoch = tokens_per_epoch
        self._started = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._started = time.monotonic()

    def trained_tokens(self, epoch: float) -> int:
        return round(epoch * self._tokens_per_epoch)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        if "loss" not in logs:
            return  # the Trainer's summary at the end
        loss = float(logs["loss"])
        if not math.isfinite(loss):
            raise JobError(
                "hyperparameters.learning_rate",
                f"the loss became infinite or NaN at step {state.global_step}: lower it",
            )
        self.losses.append(loss)
        elapsed = time.monotonic() - self._started
        self._emit(
            "progress",
            step=state.global_step,
            steps=state.max_steps,
            loss=round(loss, 4),
            learning_rate=logs["learning_rate"],
            tokens_per_s=round(self.trained_tokens(state.epoch) / elapsed, 1),
            eta_s=round(elapsed / state.global_step * (state.max_steps - state.global_step), 1),
        )


def _arguments(hyper: Hyperparameters, steps: int) -> TrainingArguments:
    return TrainingArguments(
        output_dir=tempfile.gettempdir(),  # the Trainer makes this folder, but saves nothing
        per_device_train_batch_size=hyper.batch_size,
        max_steps=steps,
        learning_rate=hyper.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=min(hyper.warmup_steps, steps // 2),
        weight_decay=0.0,
        train_sampling_strategy="group_by_length",
        dataloader_pin_memory=torch.cuda.is_available(),
        remove_unused_columns=False,
        logging_steps=1,
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        report_to=[],
        save_strategy="no",
        seed=hyper.seed,
    )


def run_trainer(
    model: Any, tokenizer: Any, examples: list[Example], hyper: Hyperparameters, emit: Emit
) -> Outcome:
    """Train a LoRA on `model`, which is changed in place; return it with the training's figures.

    Raises JobError if the loss becomes infinite or NaN.
    """
    set_seed(hyper.seed)
    model = get_peft_model(
        model,
        LoraConfig(
            task_type="CAUSAL_LM",
            r=hyper.rank,
            lora_alpha=int(hyper.alpha) if hyper.alpha == int(hyper.alpha) else hyper.alpha,
            target_modules=list(hyper.target_modules),
        ),
    )
    tokens_per_epoch = sum(len(example.input_ids) for example in examples)
    plan = planned(examples, hyper)
    emit("started", **plan, trainable_parameters=model.get_nb_trainable_parameters()[0])
    progress = Progress(emit, tokens_per_epoch)
    trainer = AnswerTrainer(
        model=model,
        args=_arguments(hyper, plan["steps"]),
        train_dataset=[
            {
                "input_ids": example.input_ids,
                "labels": example.labels,
                "attention_mask": [1] * len(example.input_ids),
            }
            for example in examples
        ],
        data_collator=functools.partial(collate, pad_id=tokenizer.pad_token_id or 0),
        callbacks=[progress],
    )
    trainer.train()
    return Outcome(
        model=model,
        final_loss=final_loss(progress.losses),
        trained_tokens=progress.trained_tokens(trainer.state.epoch),
    )
