"""The trainer's child without torch: the same orders, events, files and exit code, of numbers that
mean nothing.

For what happens around a trainer. What a trainer learns, refuses and dies of is the real one's.
"""

from __future__ import annotations

import json
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

STEP_S = 0.01
STATE = "checkpoint.safetensors"


class Ended(Exception):
    """Somebody wants no more of a job."""


def emit(run: str, event: str, **fields: Any) -> None:
    print(json.dumps({"run": run, "event": event, **fields}), flush=True)  # noqa: T201


def shapes(base: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Out and in of each linear layer of a Llama, by its name in a decoder layer."""
    hidden, inner = base["hidden_size"], base["intermediate_size"]
    kept = hidden * base["num_key_value_heads"] // base["num_attention_heads"]
    return {
        **{"self_attn.q_proj": (hidden, hidden), "self_attn.o_proj": (hidden, hidden)},
        **{"self_attn.k_proj": (kept, hidden), "self_attn.v_proj": (kept, hidden)},
        **{"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden)},
        **{"mlp.down_proj": (hidden, inner)},
    }


def write_tensors(path: Path, base: dict[str, Any], rank: int) -> None:
    header: dict[str, Any] = {}
    end = 0
    for layer in range(base["num_hidden_layers"]):
        for name, (rows, columns) in shapes(base).items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            for part, shape in (("lora_A", (rank, columns)), ("lora_B", (rows, rank))):
                begin, end = end, end + 4 * shape[0] * shape[1]
                header[f"{prefix}.{part}.weight"] = {
                    "dtype": "F32",
                    "shape": shape,
                    "data_offsets": (begin, end),
                }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    numbers = struct.pack("<f", 0.01) * (end // 4)
    path.write_bytes(struct.pack("<Q", len(text)) + text + numbers)


class Trainer:
    """Trains one job after the other, and obeys meanwhile: `stopped` has whose state is kept."""

    def __init__(self, every_s: float) -> None:
        self._every_s, self.is_over = every_s, False
        self.stopped: dict[str, bool] = {}

    def obey(self) -> None:
        for line in sys.stdin:
            for order, run in json.loads(line).items():
                if order in ("cancel", "pause"):
                    self.stopped[run] = order == "pause"
        self.is_over = True

    def train(self, path: str) -> None:
        job = json.loads(Path(path).read_text())
        chosen = job["hyperparameters"]
        steps = chosen["max_steps"]
        state, saved_at = Path(path).parent / "checkpoint" / STATE, time.monotonic()
        before = json.loads(state.read_text()) if state.exists() else 0
        told = {"resumed_step": before} if before else {}
        emit(path, "started", rows=8, truncated_rows=0, tokens=8, steps=steps, **told)
        for step in range(before + 1, steps + 1):
            time.sleep(STEP_S)
            is_ended = self.is_over or path in self.stopped
            if self.stopped.get(path, self.is_over) or time.monotonic() - saved_at >= self._every_s:
                saved_at = time.monotonic()
                state.parent.mkdir(exist_ok=True)
                state.with_suffix(".part").write_text(json.dumps(step - 1))
                state.with_suffix(".part").replace(state)
                emit(path, "saved", step=step - 1)
            if is_ended:
                raise Ended
            loss = {"loss": 1.0, "losses": [1.0], "learning_rate": 0.001}
            emit(path, "progress", step=step, steps=steps, **loss, tokens_per_s=1.0, eta_s=0)
        write_adapter(job)
        emit(path, "done", final_loss=1.0, trained_tokens=8, seconds=0.1)


def write_adapter(job: dict[str, Any]) -> None:
    base = json.loads((Path(job["base_model_dir"]) / "config.json").read_text())
    folder, rank = Path(job["output_dir"]), job["hyperparameters"]["rank"]
    folder.mkdir(parents=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": job["base_model"],
        "r": rank,
        "lora_alpha": job["hyperparameters"]["alpha"],
        "target_modules": sorted(name.rpartition(".")[2] for name in shapes(base)),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    write_tensors(folder / "adapter_model.safetensors", base, rank)


def main(argv: list[str]) -> int:
    trainer = Trainer(float(argv[argv.index("--checkpoint-s") + 1]))
    threading.Thread(target=trainer.obey, daemon=True).start()
    code = 0
    for path in (word for word in argv if word.endswith(".json")):
        try:
            trainer.train(path)
        except Ended:
            if trainer.is_over:
                return 143
            emit(path, "error", message="it was cancelled")
            code = 2
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv))  # after `-m worker.train`
