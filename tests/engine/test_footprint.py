"""What an engine takes of the machine's memory, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine import Engine, EngineConfig
from engine.model.config import ModelConfig
from engine.model.rope import RopeTables, Rotation
from tests.engine.conftest import prompt, request, run
from tests.engine.model.families import save_family

# Prints by how many MiB the process has grown: at most so far, from before the engine on.
PROGRAM = """
import json, re, sys
from pathlib import Path
from engine import DashConfig, DashEngine

def resident(name):
    return int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) >> 10

folder, config, prompt = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
before = resident("VmRSS")
with DashEngine(folder, DashConfig(**config)) as engine:
    (completion,) = engine.generate([prompt], max_new_tokens=4)
    assert len(completion.token_ids) == 4 or completion.finish_reason.value == "stop", completion
    arena = engine.stats().arena_bytes
print(json.dumps({"grown": resident("VmHWM") - before, "arena": arena}))
"""


def grown(folder: Path, config: dict[str, object], token_ids: list[int]) -> dict[str, int]:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), json.dumps(config), json.dumps(token_ids)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    found: dict[str, int] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_memory_is_taken_as_it_is_used(tmp_path: Path, name: str) -> None:
    """A pool is a bound, and so is the context that a model knows."""
    folder = save_family(tmp_path, name, head_dim=128, max_position_embeddings=1_000_000)
    found = grown(folder, {"adapter_vram_pool": "2GB"}, prompt(0, 500))
    assert 3.9e9 < found["arena"] <= 4e9  # KV has as much
    assert found["grown"] < 300, found


def test_rows_of_rotation_tables_are_there_when_they_are_asked_for() -> None:
    device = torch.device("cpu")
    tables = RopeTables(128, Rotation(theta=1e4), 20_000, device)
    for num_positions in (1, 5000, 4096, 20_000):
        tables.extend_to(num_positions)
        other = RopeTables(128, Rotation(theta=1e4), num_positions, device)
        other.extend_to(num_positions)
        assert torch.equal(tables.cos[:num_positions], other.cos)
        assert torch.equal(tables.sin[:num_positions], other.sin)


def test_tables_reach_as_far_as_pages_do(tmp_path: Path) -> None:
    """On a GPU, where all rows are there at once."""
    folder = save_family(tmp_path, "llama")
    model = ModelConfig.from_folder(folder)
    config = EngineConfig(model_dir=folder, arena_bytes=1)
    assert config.position_limit(model, 2) == 2 * config.page_size
    assert config.position_limit(model, 10_000) == model.max_positions
    windowed = ModelConfig.from_folder(save_family(tmp_path / "windowed", "mistral"))
    assert config.position_limit(windowed, 2) == windowed.max_positions


def test_a_request_may_fill_the_arena_to_its_last_position(tmp_path: Path) -> None:
    """The last token that pages can hold is the last with a row in the tables."""
    folder = save_family(tmp_path, "llama")
    model = ModelConfig.from_folder(folder)
    small = EngineConfig(model_dir=folder, arena_bytes=1)
    for use_triton in (None, True):
        engine = Engine(
            EngineConfig(
                model_dir=folder, arena_bytes=3 * small.page_bytes(model), use_triton=use_triton
            )
        )
        ended = run(engine, request("r", prompt(0, 40), max_tokens=60, ignore_eos=True))["r"]
        engine.close()
        assert len(ended.token_ids) == 3 * small.page_size - 40 + 1
