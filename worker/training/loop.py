"""The training loop behind `worker.train`: PEFT's LoRA on transformers' Trainer."""

from __future__ import annotations

import functools
import math
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.trainer import TRAINER_STATE_NAME

from contract.draft_heads import is_head_tensor
from contract.training import Hyperparameters, JobError, TrainJob
from engine.text.codec import TextCodec
from worker.training.batches import collate, collate_packed
from worker.training.chat_data import Examples
from worker.training.checkpoints import Checkpoints, TrainingStopped
from worker.training.draft_heads import train_heads
from worker.training.example_store import IGNORED, TrainingInputs
from worker.training.kept_adapters import KeptAdapters
from worker.training.quantization import loading_options
from worker.training.validation import Validation

Emit = Callable[..., None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A finished training, with its best state if it was validated, else with its last.

    final_loss  the mean over the last tenth of the steps
    best_step   of the state with the least loss in validation, `best_loss`
    heads       the tensors of its draft heads
    """

    model: Any
    final_loss: float
    trained_tokens: int
    best_step: int | None = None
    best_loss: float | None = None
    heads: dict[str, torch.Tensor] = field(default_factory=dict)


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


def device_name() -> str:
    """Return "cpu", or the name of the GPU that trains."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def peak_memory_bytes() -> int:
    """Return the most memory that this process has taken: of the GPU, else of the machine."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def load_codec(folder: Path) -> TextCodec:
    """Return the base's tokenizer and chat template. Raises JobError without a tokenizer."""
    if not (folder / "tokenizer.json").is_file():
        raise JobError("base_model_dir", "there is no tokenizer.json")
    return TextCodec(folder)


def planned(data: Examples, job: TrainJob) -> dict[str, int]:
    """Return the length of the training, as its event `started` has it.

    Raises JobError if it is longer than the job may be.
    """
    hyper = job.hyperparameters
    tokens_per_epoch = data.examples.num_tokens
    batches_per_epoch = -(-len(data.examples) // hyper.batch_size)
    steps_per_epoch = -(-batches_per_epoch // hyper.gradient_accumulation)
    steps = hyper.max_steps or max(1, round(steps_per_epoch * hyper.epochs))
    tokens = round(tokens_per_epoch * steps / steps_per_epoch)
    for name, number, most in (
        ("steps", steps, job.most_steps),
        ("tokens", tokens, job.most_tokens),
    ):
        if most is not None and number > most:
            field = "hyperparameters.max_steps" if hyper.max_steps else "hyperparameters.epochs"
            raise JobError(field, f"the run would have {number} {name}; {most} is the limit")
    return {
        "rows": data.num_rows,
        "examples": len(data.examples),
        "truncated_rows": data.num_cut,
        "dropped_rows": data.num_dropped,
        "validation_rows": data.num_validation,
        "leaked_rows": data.num_leaked,
        "tokens": tokens,
        "steps": steps,
    }


def final_loss(losses: list[float]) -> float:
    """Return the mean loss of the last tenth of the steps."""
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)


def load_base(job: TrainJob) -> tuple[Any, TextCodec]:
    """Load the job's base model, its tokenizer and its chat template.

    Raises JobError if there is no tokenizer, if a target module is not a linear layer of the
    model's decoder layers, or if the base is to be quantised and cannot be.
    """
    if job.num_threads is not None:
        torch.set_num_threads(job.num_threads)
    limit_gpu_memory(job.gpu_share)
    codec = load_codec(job.base_model_dir)
    dtype = training_dtype()
    model = AutoModelForCausalLM.from_pretrained(
        job.base_model_dir,
        dtype=dtype,
        local_files_only=True,
        **loading_options(job.hyperparameters, dtype),
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
    return model, codec


class AnswerTrainer(Trainer):
    """A Trainer that computes logits for the assistant's tokens alone.

    The LM head and its softmax are a quarter of a small model's work, and more than half of a
    chat's tokens belong to the prompt.

    checkpoints  with what it goes on from, instead of the Trainer's own files
    """

    checkpoints: Checkpoints

    def go_on(self) -> None:
        """Train, from the first step or from the state that was found."""
        found = self.checkpoints.found
        if found is None:
            self.train()
            return
        if found.is_final:
            self.state = TrainerState(**found.state["trainer"])
            return
        with tempfile.TemporaryDirectory() as folder:
            state = TrainerState(**found.state["trainer"])
            state.save_to_json(str(Path(folder) / TRAINER_STATE_NAME))
            self.train(resume_from_checkpoint=folder)

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the model has its adapter."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.checkpoints.restore_optimizer(self.optimizer, self.lr_scheduler)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.checkpoints.restore_random()

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the mean loss over the batch's labelled tokens.

        Of a step of several batches, the batch's part of the mean over all of them.
        """
        base = self.accelerator.unwrap_model(model).get_base_model()
        labels = inputs["labels"][:, 1:]
        kept = labels != IGNORED  # [S, T - 1]
        with torch.autocast(
            labels.device.type, dtype=base.dtype, enabled=base.dtype != torch.float32
        ):
            hidden = base.get_decoder()(
                input_ids=inputs["input_ids"],
                attention_mask=inputs.get("attention_mask"),
                position_ids=inputs.get("position_ids"),  # of packed rows, which it keeps apart
                use_cache=False,
            ).last_hidden_state
            logits = base.get_output_embeddings()(hidden[:, :-1][kept])  # [answer tokens, V]
        if num_items_in_batch is None or self.args.gradient_accumulation_steps == 1:
            return F.cross_entropy(logits.float(), labels[kept])
        total = F.cross_entropy(logits.float(), labels[kept], reduction="sum")
        return total / num_items_in_batch


class Progress(TrainerCallback):
    """Turns the Trainer's log lines into progress events.

    Raises JobError if training diverges before there is a good state to keep.
    """

    def __init__(self, emit: Emit, tokens_per_epoch: int, validation: Validation) -> None:
        self.losses: list[float] = []
        self._emit = emit
        self._tokens_per_epoch = tokens_per_epoch
        self._validation = validation
        self._started = 0.0
        self._first_step = self._first_tokens = 0  # what was trained before this process
        self.told: dict[str, Any] = {}  # of the last step

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._started = time.monotonic()
        self._first_step = state.global_step
        self._first_tokens = self.trained_tokens(state.epoch or 0)

    def trained_tokens(self, epoch: float) -> int:
        return round(epoch * self._tokens_per_epoch)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        if "loss" not in logs:
            return  # the Trainer's summary at the end
        loss = float(logs["loss"])
        if not math.isfinite(loss):
            if self._validation.best_loss is not None:
                self._validation.end(control)
                return
            raise JobError(
                "hyperparameters.learning_rate",
                f"the loss became infinite or NaN at step {state.global_step}: lower it",
            )
        self.losses.append(loss)
        elapsed = time.monotonic() - self._started
        per_step_s = elapsed / (state.global_step - self._first_step)
        trained_tokens = self.trained_tokens(state.epoch)
        self.told = {
            "step": state.global_step,
            "steps": state.max_steps,
            "loss": round(loss, 4),
            "learning_rate": logs["learning_rate"],
            "tokens_per_s": round((trained_tokens - self._first_tokens) / elapsed, 1),
            "eta_s": round(per_step_s * (state.max_steps - state.global_step), 1),
            "trained_tokens": trained_tokens,
            "memory_bytes": peak_memory_bytes(),
            **self._validated(state.global_step),
        }
        self._emit("progress", **self.told)

    def _validated(self, step: int) -> dict[str, float | int]:
        """Return what is said of the last validation and the best one."""
        told: dict[str, float | int] = {}
        loss, best = self._validation.loss, self._validation.best_loss
        if loss is not None and self._validation.loss_step == step and math.isfinite(loss):
            told["validation_loss"] = round(loss, 4)
        if best is not None:
            told |= {"best_step": self._validation.best_step, "best_loss": round(best, 4)}
        return told


def _arguments(hyper: Hyperparameters, steps: int) -> TrainingArguments:
    return TrainingArguments(
        output_dir=tempfile.gettempdir(),  # the Trainer makes this folder, but saves nothing
        per_device_train_batch_size=hyper.batch_size,
        gradient_accumulation_steps=hyper.gradient_accumulation,
        gradient_checkpointing=hyper.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
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


def _collator(hyper: Hyperparameters, pad_id: int) -> Callable[..., dict[str, torch.Tensor]]:
    if hyper.packing:
        return functools.partial(collate_packed, pad_id=pad_id, most=hyper.max_length)
    return functools.partial(collate, pad_id=pad_id)


def _begin_from(model: Any, tensors: Path) -> None:
    """Load an adapter's tensors into the model's new one. Raises JobError unless they are its."""
    try:
        lora = {name: own for name, own in load_file(tensors).items() if not is_head_tensor(name)}
        outcome = set_peft_model_state_dict(model, lora)
    except (RuntimeError, ValueError) as error:  # of other shapes
        raise JobError("warm_start", f"the adapter does not fit: {str(error)[:300]}") from error
    missing = [name for name in outcome.missing_keys if "lora_" in name]
    strange = [*missing, *outcome.unexpected_keys]
    if strange:
        raise JobError("warm_start", f"the adapter has other tensors than this: {strange[0]}")


def run_trainer(
    model: Any,
    data: Examples,
    job: TrainJob,
    emit: Emit,
    *,
    pad_id: int,
    on_stoppable: Callable[[Callable[[], None]], None] = lambda stop: None,
) -> Outcome:
    """Train a LoRA on `model`, which is changed in place; return it with the training's figures.

    on_stoppable  gets what ends the training after a step, once there is something to save
    Raises JobError if the loss becomes infinite or NaN, or the warm start is another adapter's;
    TrainingStopped.
    """
    hyper = job.hyperparameters
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
    if job.warm_start is not None:
        _begin_from(model, job.warm_start)
    plan = planned(data, job)
    trainer, validation, progress = _prepared(model, data, job, emit, plan, pad_id)
    checkpoints = trainer.checkpoints
    resumed: dict[str, Any] = {}
    if checkpoints.step:
        resumed = {"resumed_step": checkpoints.step, "validation_losses": validation.losses[-256:]}
    trainable = model.get_nb_trainable_parameters()[0]
    emit("started", **plan, **resumed, trainable_parameters=trainable, device=device_name())
    if job.checkpoint is not None:
        on_stoppable(checkpoints.stop)
    try:
        trainer.go_on()
    except BrokenPipeError:  # whoever reads the events was killed
        checkpoints.save_now()
        raise
    finally:
        checkpoints.close()
    if checkpoints.has_stopped:
        raise TrainingStopped
    validation.restore(model)
    heads: dict[str, torch.Tensor] = {}
    if hyper.draft_heads:
        heads = train_heads(trainer, checkpoints, data, hyper, emit, progress.told, pad_id=pad_id)
    return Outcome(
        model=model,
        final_loss=final_loss(progress.losses),
        trained_tokens=progress.trained_tokens(trainer.state.epoch),
        best_step=validation.best_step or None,
        best_loss=validation.best_loss,
        heads=heads,
    )


def _prepared(
    model: Any, data: Examples, job: TrainJob, emit: Emit, plan: dict[str, int], pad_id: int
) -> tuple[AnswerTrainer, Validation, Progress]:
    """Return the Trainer and what watches it, as the job's checkpoint has them if there is one."""
    hyper = job.hyperparameters
    validation = Validation(
        data.validation,
        steps=plan["steps"],
        eval_steps=hyper.eval_steps,
        patience=hyper.patience,
        batch_size=hyper.batch_size,
        pad_id=pad_id,
    )
    progress = Progress(emit, data.examples.num_tokens, validation)
    checkpoints = Checkpoints(job, plan, emit, validation, progress.losses)
    checkpoints.restore(model)
    kept = KeptAdapters(job, plan["steps"], emit, validation)
    trainer = AnswerTrainer(
        model=model,
        args=_arguments(hyper, plan["steps"]),
        train_dataset=TrainingInputs(data.examples),
        data_collator=_collator(hyper, pad_id),
        callbacks=[validation, progress, kept, checkpoints],
    )
    trainer.checkpoints = checkpoints
    validation.trainer = trainer
    return trainer, validation, progress
