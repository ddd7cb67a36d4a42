"""`worker.train` without torch: the same job, events, files and exit code, of numbers that mean
nothing.

For what happens around a trainer. What a trainer learns, refuses and dies of is the real one's.
"""

from __future__ import annotations

import json
import struct
import sys
import time
from pathlib import Path
from typing import Any

STEP_S = 0.01


def emit(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)  # noqa: T201


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


def main(job: dict[str, Any]) -> None:
    chosen = job["hyperparameters"]
    steps = chosen["max_steps"]
    state, saved_at = Path(job["checkpoint"]), time.monotonic()
    before = json.loads(state.read_text()) if state.exists() else 0
    told = {"resumed_step": before} if before else {}
    emit("started", rows=8, truncated_rows=0, tokens=8, steps=steps, **told)
    for step in range(before + 1, steps + 1):
        time.sleep(STEP_S)
        if time.monotonic() - saved_at >= job["checkpoint_s"]:
            saved_at = time.monotonic()
            state.parent.mkdir(exist_ok=True)
            state.with_suffix(".part").write_text(json.dumps(step - 1))
            state.with_suffix(".part").replace(state)
            emit("saved", step=step - 1)
        loss = {"loss": 1.0, "losses": [1.0], "learning_rate": 0.001}
        emit("progress", step=step, steps=steps, **loss, tokens_per_s=1.0, eta_s=steps - step)
    base = json.loads((Path(job["base_model_dir"]) / "config.json").read_text())
    folder = Path(job["output_dir"])
    folder.mkdir(parents=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": job["base_model"],
        "r": chosen["rank"],
        "lora_alpha": chosen["alpha"],
        "target_modules": sorted(name.rpartition(".")[2] for name in shapes(base)),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    write_tensors(folder / "adapter_model.safetensors", base, chosen["rank"])
    emit("done", output=str(folder), final_loss=1.0, trained_tokens=8, seconds=0.1)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[-1]).read_text()))  # after `-m worker.train`
