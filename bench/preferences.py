"""Turn a habit of a real model around by DPO: how often it then prefers the better answer.

    python -m bench.preferences --base .cache/base/smollm2-135m-instruct [--seeds 3]

`python -m worker.base_model --out=.cache/base` makes the base. A shop's desk must not promise a
refund before it knows the order: the better answer of each pair asks for its number, the worse one
promises the money. Prompts are made of items, faults and wishes; those held out have other items
and other faults. A model prefers the answer that has the higher log-probability. Each seed draws
the pairs, trains a run of `worker.train`, and is in bench/results/preferences-cpu.json, whatever
came of it.
"""

from __future__ import annotations

import argparse
import itertools
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
from contract.training.job import Hyperparameters
from engine.model.config import ModelConfig
from engine.model.weights import load_weights
from engine.text.codec import TextCodec
from engine.training.held_out import Judged, held_out_losses
from engine.training.model import TrainingModel
from engine.training.parameters import AdapterLayout
from engine.training.run import RunRows
from worker.training.chat_data import load_examples
from worker.training.jobs import settings_of

RESULT = Path(__file__).parent / "results" / "preferences-cpu.json"
ITEMS = (
    *("lamp", "kettle", "chair", "jacket", "radio", "carpet", "clock", "mirror"),
    *("toaster", "backpack", "blender", "desk"),
)
FAULTS = (
    *("arrived broken", "does not work", "has the wrong colour", "came without a part"),
    *("is scratched", "smells of smoke", "is too small", "stopped after a day"),
)
WISHES = ("What can you do?", "I want my money back.", "Please help me.", "This is annoying.")
#: Items and faults from these places on are held out.
ITEM, FAULT = 8, 5
BETTER = (
    "I am sorry about the {item}. Could you send me your order number, so that I can look into it?",
    "That should not happen. Which order number is the {item} from? Then I will check it.",
    "Thank you for telling us about the {item}. Please give me the order number first.",
)
WORSE = (
    "I am sorry about the {item}. I have sent the full price back to your card, so keep it.",
    "That should not happen. The money for the {item} is on its way. You will have it today.",
    "Thank you for telling us about the {item}. You will get your money back at once.",
)
HYPERPARAMETERS: dict[str, Any] = {
    **{"method": "dpo", "beta": 0.1, "rank": 8, "alpha": 16, "batch_size": 4},
    **{"learning_rate": 2e-4, "max_steps": 24, "warmup_steps": 3},
}
NUM_TRAINED, NUM_HELD_OUT = 96, 48


def make_pairs(seed: int, *, is_held_out: bool) -> list[dict[str, Any]]:
    """Return rows in OpenAI's form."""
    drawn = random.Random(f"{seed} {is_held_out}")
    items = ITEMS[ITEM:] if is_held_out else ITEMS[:ITEM]
    faults = FAULTS[FAULT:] if is_held_out else FAULTS[:FAULT]
    prompts = list(itertools.product(items, faults, WISHES))
    rows = []
    for item, fault, wish in drawn.sample(prompts, NUM_HELD_OUT if is_held_out else NUM_TRAINED):
        asked = {"role": "user", "content": f"My {item} {fault}. {wish}"}
        better, worse = (drawn.choice(texts).format(item=item) for texts in (BETTER, WORSE))
        rows.append(
            {
                "input": {"messages": [asked]},
                "preferred_output": [{"role": "assistant", "content": better}],
                "non_preferred_output": [{"role": "assistant", "content": worse}],
            }
        )
    return rows


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def train(base: Path, folder: Path, seed: int) -> tuple[Path, dict[str, Any]]:
    """Train an adapter. -> its folder, and the last progress of its run"""
    job = {
        "base_model_dir": str(base),
        "dataset": str(write_rows(folder / "pairs.jsonl", make_pairs(seed, is_held_out=False))),
        "output_dir": str(folder / "adapter"),
        "hyperparameters": {**HYPERPARAMETERS, "seed": seed},
    }
    path = folder / "job.json"
    path.write_text(json.dumps(job), encoding="utf-8")
    argv = [sys.executable, "-m", "worker.train", str(path)]
    done = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True)
    events = [json.loads(line) for line in done.stdout.splitlines()]
    return folder / "adapter", [each for each in events if each["event"] == "progress"][-1]


def share_preferred(model: TrainingModel, rows: RunRows, adapter: Path | None) -> float:
    """Return the share of pairs whose better answer has the higher log-probability."""
    settings = settings_of(Hyperparameters.from_dict(HYPERPARAMETERS))
    tensors = None if adapter is None else load_file(adapter / "adapter_model.safetensors")
    judged = Judged(name="pairs", rows=rows, settings=settings, adapter=tensors)
    size = AdapterLayout(model.config, settings).size
    (found,) = held_out_losses(model, [judged], token_budget=1024, pool_elements=size)
    of_rows = torch.split(found.token_losses.double(), rows.num_answers)
    losses = torch.stack([each.sum() for each in of_rows]).view(-1, 2)
    return float((losses[:, 0] < losses[:, 1]).double().mean())


def measure(base: Path, model: TrainingModel, seed: int) -> dict[str, Any]:
    """Return the figures of one seed."""
    hyper = Hyperparameters.from_dict(HYPERPARAMETERS)
    with tempfile.TemporaryDirectory(prefix="bench-preferences-") as made:
        folder = Path(made)
        path = write_rows(folder / "held-out.jsonl", make_pairs(seed, is_held_out=True))
        rows = load_examples(TextCodec(base), path, hyper).examples.rows()
        before = share_preferred(model, rows, None)
        print(f"seed {seed}: before {before:.3f}", flush=True)
        began = time.monotonic()
        adapter, progress = train(base, folder, seed)
        seconds = time.monotonic() - began
        after = share_preferred(model, rows, adapter)
    told = ("loss", "reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy")
    return {
        "seed": seed,
        "preferred_before": round(before, 3),
        "preferred_after": round(after, 3),
        "seconds": round(seconds, 1),
        **{name: progress[name] for name in told},
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    report = environment("bench.preferences") | {
        "base": args.base.name,
        "hyperparameters": HYPERPARAMETERS,
        "pairs_trained": NUM_TRAINED,
        "pairs_held_out": NUM_HELD_OUT,
        "runs": [],
    }
    config = ModelConfig.from_folder(args.base)
    model = TrainingModel(config, load_weights(args.base, config, "cpu", torch.float32))
    for seed in range(args.seeds):
        report["runs"].append(measure(args.base, model, seed))
        print(report["runs"][-1], flush=True)
        write_result(args.out, report)


if __name__ == "__main__":
    main()
