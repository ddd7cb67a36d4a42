"""Teach a real model to read invoices by reinforcement: how many fields it then gets right.

    python -m bench.rewards --base .cache/base/smollm2-135m-instruct [--seeds 3]

`python -m worker.base_model --out=.cache/base` makes the base. A prompt is a line of an invoice.
The answer ought to be a JSON object with three fields and nothing else. The reward is a quarter for
an object with exactly these fields, half for the share of right values, and the rest for the
likeness to the right text, so that answers without any JSON differ. Held-out prompts have other
items. Each seed draws the prompts, trains a run of `worker.train`, and is in
bench/results/rewards-cpu.json, whatever came of it.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from bench.machine import environment, write_result
from contract.grading.text_metrics import similarity
from contract.training.job import Hyperparameters
from contract.training.rewards import Rewards, read_answers, write_rewards
from engine.model.config import ModelConfig
from engine.model.weights import load_weights
from engine.text.chat_rendering import render_chat
from engine.text.codec import TextCodec
from worker.training.jobs import settings_of
from worker.training.rewards.sampler import Sampler

RESULT = Path(__file__).parent / "results" / "rewards-cpu.json"
ITEMS = (
    *("lamps", "kettles", "chairs", "jackets", "radios", "carpets", "clocks", "mirrors"),
    *("toasters", "backpacks", "blenders", "desks"),
)
#: Items from this place on are held out.
ITEM = 8
SENTENCES = (
    "We have sent you {quantity} {item} at {price} EUR each.",
    "Please pay for {quantity} {item}; the price of each is {price} EUR.",
    "Order: {quantity} {item}, {price} EUR a piece.",
    "{quantity} {item} left our store today. Each costs {price} EUR.",
)
ASK = """Reply with JSON alone, as in this example.
3 tables for 20 EUR each
{"item": "tables", "quantity": 3, "price": 20}"""
FIELDS = ("item", "quantity", "price")
HYPERPARAMETERS: dict[str, Any] = {
    **{"method": "reinforcement", "samples": 8, "max_tokens": 28, "beta": 0.01, "rank": 8},
    **{"alpha": 16, "batch_size": 2, "learning_rate": 1e-3, "max_steps": 32, "warmup_steps": 2},
    "grader": {"type": "python", "source": "def grade(sample, item): ..."},  # here: `reward`
}
NUM_TRAINED, NUM_HELD_OUT = 64, 32


def make_rows(seed: int, *, is_held_out: bool) -> list[dict[str, Any]]:
    """Return prompts, with the fields that a right answer has."""
    drawn = random.Random(f"{seed} {is_held_out}")
    items = ITEMS[ITEM:] if is_held_out else ITEMS[:ITEM]
    rows = []
    for _ in range(NUM_HELD_OUT if is_held_out else NUM_TRAINED):
        fields = {
            "item": drawn.choice(items),
            "quantity": drawn.randint(2, 90),
            "price": drawn.randint(3, 400),
        }
        text = drawn.choice(SENTENCES).format(**fields)
        rows.append({"messages": [{"role": "user", "content": f"{ASK}\n{text}"}], "fields": fields})
    return rows


def grade(text: str, fields: dict[str, Any]) -> tuple[float, float]:
    """Return whether an answer has the form, and the share of its values that are right."""
    try:
        found = json.loads(text)
    except ValueError:
        return 0.0, 0.0
    if not isinstance(found, dict):
        return 0.0, 0.0
    right = sum(found.get(name) == value for name, value in fields.items())
    kinds = {name: type(value) for name, value in found.items()}
    is_valid = kinds == {"item": str, "quantity": int, "price": int}
    return float(is_valid), right / len(FIELDS)


def reward(text: str, fields: dict[str, Any]) -> float:
    is_valid, right = grade(text, fields)
    return (is_valid + 2 * right + similarity("fuzzy_match", text, json.dumps(fields))) / 4


def train(base: Path, folder: Path, seed: int) -> tuple[Path, list[dict[str, Any]]]:
    """Train an adapter. -> its folder, and the progress of its run"""
    rows, rewards = make_rows(seed, is_held_out=False), folder / "rewards"
    rewards.mkdir()
    (folder / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    job = {
        "base_model_dir": str(base),
        "dataset": str(folder / "prompts.jsonl"),
        "output_dir": str(folder / "adapter"),
        "rewards_dir": str(rewards),
        "hyperparameters": {**HYPERPARAMETERS, "seed": seed},
    }
    path = folder / "job.json"
    path.write_text(json.dumps(job), encoding="utf-8")
    argv = [sys.executable, "-m", "worker.train", str(path)]
    progress = []
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            event = json.loads(line)
            if event["event"] == "answers":
                asked = read_answers(rewards / event["file"])
                found = [reward(each.text, rows[each.line - 1]["fields"]) for each in asked.answers]
                write_rewards(rewards, asked, Rewards(found))
            elif event["event"] == "progress":
                progress.append(event)
                if event["step"] % 4 == 1:
                    told = ("step", "reward", "kl", "entropy", "answer_tokens", "mismatch")
                    print(*(f"{name} {event[name]:g}" for name in told), flush=True)
            elif event["event"] == "error":
                raise RuntimeError(event["message"])
    return folder / "adapter", progress


def measure_answers(
    base: Path, rows: list[dict[str, Any]], adapter: Path | None
) -> tuple[float, float]:
    """Return the share of greedy answers that have the form, and that of right fields."""
    config, codec = ModelConfig.from_folder(base), TextCodec(base)
    weights = load_weights(base, config, "cpu", torch.float32)
    sampler = Sampler(base, config, weights, torch.float32)
    hyper = Hyperparameters.from_dict(HYPERPARAMETERS)
    settings = settings_of(hyper)
    digest = None
    if adapter is not None:
        digest = sampler.load(load_file(adapter / "adapter_model.safetensors"), settings)
    for place, row in enumerate(rows):
        prompt = codec.encode_chat(render_chat(codec, row["messages"]))
        sampler.sample(
            "held-out", place, prompt,
            digest=digest, count=1, seed=None, max_tokens=hyper.max_tokens or 0,
        )  # fmt: skip
    found = []
    while sampler.has_work:
        for ended in sampler.step():
            text = codec.decode_whole(ended.answers[0].text_ids).strip()
            found.append(grade(text, rows[ended.key]["fields"]))
    sampler.close()
    valid, right = zip(*found, strict=True)
    return sum(valid) / len(rows), sum(right) / len(rows)


def measure(base: Path, seed: int) -> dict[str, Any]:
    """Return the figures of one seed."""
    with tempfile.TemporaryDirectory(prefix="bench-rewards-") as made:
        rows = make_rows(seed, is_held_out=True)
        valid, right = measure_answers(base, rows, None)
        print(f"seed {seed}: valid {valid:.3f}, fields {right:.3f}", flush=True)
        began = time.monotonic()
        adapter, progress = train(base, Path(made), seed)
        seconds = time.monotonic() - began
        valid_after, right_after = measure_answers(base, rows, adapter)
        print(f"seed {seed}: valid {valid_after:.3f}, fields {right_after:.3f}", flush=True)
    last = progress[-1]
    return {
        "seed": seed,
        "valid_before": round(valid, 3),
        "valid_after": round(valid_after, 3),
        "fields_before": round(right, 3),
        "fields_after": round(right_after, 3),
        "seconds": round(seconds, 1),
        "reward_first": progress[0]["reward"],
        "reward_last": last["reward"],
        "mismatch_largest_mean": max(each["mismatch"] for each in progress),
        "mismatch_share_largest": max(each["mismatch_share"] for each in progress),
        **{name: last[name] for name in ("kl", "entropy", "answer_tokens")},
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    report = environment("bench.rewards") | {
        "base": options.base.name,
        "hyperparameters": {**HYPERPARAMETERS, "grader": "bench.rewards.reward"},
        "trained_prompts": NUM_TRAINED,
        "held_out_prompts": NUM_HELD_OUT,
        "runs": [],
    }
    for seed in range(options.seeds):
        report["runs"].append(measure(options.base, seed))
        write_result(RESULT, report)


if __name__ == "__main__":
    main()
