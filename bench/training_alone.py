"""A run of `worker.train` on a CPU: how soon it begins, and its steps beside a plain Trainer's.

    python -m bench.training_alone [--threads 2] [--steps 6] [--pairs 3] [--tenant acme]

The job is one of the demo's: SmolLM2-135M and a tenant's rows. `ours` is the program that the
platform starts. `plain` is what users of transformers write: PEFT's LoRA and the Trainer as it
comes, with its own loss, over the same rows, batches, order and floating-point type. Both ways are
measured `--pairs` times by turns, each in a process of its own; `speed_ratio` is the median of the
pairs' plain / ours, in seconds of the steps after the first.

start_s       from the process's start to its event `started`: interpreter, imports, base and rows
first_step_s  from the process's start to the end of the first step
step_s        the median of the steps after the first
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.machine import environment
from bench.training_cpu import ROOT, events, write_jobs
from demo.data.jobs import HYPERPARAMETERS
from worker.base_model import packaged_model

WAYS = ("plain", "ours")


def plain(job_path: str) -> None:
    """Train a job with the Trainer as it comes; print the events that `measure` reads."""
    import torch
    from peft import LoraConfig, get_peft_model
    from torch.nn.utils.rnn import pad_sequence
    from transformers import (
        AutoModelForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        set_seed,
    )

    from contract.training.job import TrainJob
    from engine.text.codec import TextCodec
    from worker.training.chat_data import load_data
    from worker.training.device import training_dtype

    class Told(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if "loss" in kwargs["logs"]:
                told = {"step": state.global_step, "loss": round(float(kwargs["logs"]["loss"]), 4)}
                print(json.dumps({"event": "progress", **told}), flush=True)

    job = TrainJob.read(Path(job_path))
    hyper = job.hyperparameters
    if job.num_threads:
        torch.set_num_threads(job.num_threads)
    codec = TextCodec(job.base_model_dir)
    dtype = training_dtype()
    base = AutoModelForCausalLM.from_pretrained(job.base_model_dir, dtype=dtype)
    rows = load_data(codec, job).examples.rows()
    dataset = []
    for start, end in itertools.pairwise(rows.starts):
        tokens = rows.token_ids[start:end].long()
        labels = tokens.where(rows.is_answer[start:end], -100)
        dataset.append({"input_ids": tokens, "labels": labels})

    def collate(some: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        fills = {"input_ids": codec.end_id or 0, "labels": -100}
        batch = {
            name: pad_sequence([row[name] for row in some], True, fill)
            for name, fill in fills.items()
        }
        lengths = torch.tensor([len(row["labels"]) for row in some])
        places = torch.arange(int(lengths.max()))
        return {**batch, "attention_mask": (places < lengths[:, None]).long()}

    set_seed(hyper.seed)
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=hyper.rank,
        lora_alpha=hyper.alpha,
        target_modules=list(hyper.target_modules),
    )
    trainer = Trainer(
        model=get_peft_model(base, lora),
        args=TrainingArguments(
            output_dir=tempfile.gettempdir(),
            per_device_train_batch_size=hyper.batch_size,
            max_steps=hyper.max_steps or 1,
            learning_rate=hyper.learning_rate,
            lr_scheduler_type="cosine",
            remove_unused_columns=False,
            warmup_steps=min(hyper.warmup_steps, (hyper.max_steps or 1) // 2),
            weight_decay=0.0,
            bf16=dtype == torch.bfloat16,
            train_sampling_strategy="group_by_length",
            logging_steps=1,
            disable_tqdm=True,
            report_to=[],
            save_strategy="no",
            seed=hyper.seed,
        ),
        train_dataset=dataset,
        data_collator=collate,
        callbacks=[Told()],
    )
    print(json.dumps({"event": "started"}), flush=True)
    trainer.train()


def measure(way: str, base: Path, tenant: str, threads: int, steps: int) -> dict[str, Any]:
    """Train a tenant's job one way."""
    marks: list[float] = []
    losses: list[float] = []
    start_s = 0.0
    with tempfile.TemporaryDirectory() as name:
        job = write_jobs(Path(name), base, threads, steps)[tenant]
        program = ["worker.train"] if way == "ours" else ["bench.training_alone", "--plain"]
        for now, event in events(*program, job):
            if event["event"] == "started":
                start_s = now
            if event["event"] == "progress":
                marks.append(now)
                losses.append(event["loss"])
    assert len(marks) == steps, (way, len(marks))
    gaps = [later - earlier for earlier, later in itertools.pairwise(marks)]
    return {
        "start_s": round(start_s, 2),
        "first_step_s": round(marks[0], 2),
        "step_s": round(statistics.median(gaps), 3),
        "steps_s": round(sum(gaps), 2),
        "losses": losses,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--tenant", choices=HYPERPARAMETERS, default="acme")
    parser.add_argument("--plain", metavar="JOB", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plain:
        plain(options.plain)
        return
    report = environment("bench.training_alone")
    base = packaged_model(ROOT / ".cache" / "base")
    pairs = []
    for number in range(options.pairs):
        pair: dict[str, Any] = {"load_average": round(os.getloadavg()[0], 2)}
        for way in WAYS if number % 2 == 0 else WAYS[::-1]:  # so that no way always goes first
            pair[way] = measure(way, base, options.tenant, options.threads, options.steps)
            print(f"pair {number + 1}: {way}: {pair[way]}", file=sys.stderr)
        pairs.append(pair)
    report["pairs"] = pairs
    report["start_s"] = max(pair["ours"]["start_s"] for pair in pairs)
    # Ratios within a pair, because a machine's speed changes from minute to minute.
    ratios = [pair["plain"]["steps_s"] / pair["ours"]["steps_s"] for pair in pairs]
    report["speed_ratio"] = round(statistics.median(ratios), 2)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
