"""The demo's second version: other bytes, almost the same adapter; and where its pages are."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
from rich.console import Console
from safetensors.numpy import load_file

from demo.release import STRENGTH, second_version
from demo.screen import Screen
from demo.state import DemoState
from demo.up import Demo
from tests.e2e.adapters import lora_tensors, write_adapter

BASE = {
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}


def test_the_second_version_is_a_little_weaker(tmp_path: Path) -> None:
    first = write_adapter(tmp_path / "first", lora_tensors(BASE, seed=1))
    second = second_version(first, tmp_path / "second")
    config = "adapter_config.json"
    assert json.loads((second / config).read_text()) == json.loads((first / config).read_text())
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (first, second))
    assert before.keys() == after.keys()
    for name, weight in before.items():
        expected = weight * np.float32(STRENGTH) if ".lora_B." in name else weight
        assert after[name].dtype == weight.dtype
        np.testing.assert_allclose(after[name], expected, rtol=1e-6)


def test_the_links_are_of_the_version_that_is_held(tmp_path: Path) -> None:
    state = DemoState.load(tmp_path / "state.json")
    state.held_version = 3
    printed = io.StringIO()
    Demo(tmp_path, Screen(Console(file=printed)))._greet(state, 1.0)
    page = f"{state.base_url}/console/adapters/invoices/versions/3"
    lines = [line.split() for line in printed.getvalue().splitlines()]
    assert ["Doctor", f"{page}/doctor"] in lines
    assert ["Version", "3", page] in lines
    assert ["Last", "night", f"{state.base_url}/console/morning"] in lines
    assert ["Canary", f"{state.base_url}/console/aliases/invoices-prod"] in lines
