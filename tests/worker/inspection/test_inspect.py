"""`python -m worker.inspect_adapter`: PEFT's numbers, and figures of the weights."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from contract.adapters.inspection import MAX_PROMPT_TOKENS, InspectJob
from contract.process.child_environment import child_environment
from tests.e2e.adapters import lora_config, lora_tensors, write_adapter
from tests.tiny_base import TINY_NAME, write_tiny_base
from worker.inspection.factors import effective_rank, rank_for, singular_values
from worker.inspection.findings import findings_of, summary_of

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_base(tmp_path_factory.mktemp("base") / TINY_NAME)


def run(folder: Path, base: Path, adapter: Path, **job: Any) -> subprocess.CompletedProcess[str]:
    path = folder / "job.json"
    InspectJob(base_model_dir=base, adapter_dir=adapter, **job).write(path)
    return subprocess.run(
        [sys.executable, "-m", "worker.inspect_adapter", str(path)],
        cwd=ROOT,
        env=child_environment({"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("rank", [1, 3, 8, 80])
def test_singular_values_are_those_of_the_whole_matrix(rank: int) -> None:
    """Against numpy's SVD of [out, in], which `factors` never makes."""
    noise = np.random.default_rng(rank)
    a, b = noise.normal(size=(rank, 48)), noise.normal(size=(72, rank))
    found = singular_values(torch.from_numpy(a), torch.from_numpy(b), -0.5)
    whole = np.linalg.svd(-0.5 * b @ a, compute_uv=False)[: len(found)]
    assert len(found) == min(rank, 48)
    np.testing.assert_allclose(found.numpy(), whole, rtol=1e-4 if rank > 64 else 1e-10)


def test_singular_values_of_stacked_experts() -> None:
    """A has one expert's rows after another's, B every third column."""
    torch.manual_seed(0)
    a, b = torch.randn(3 * 2, 7, dtype=torch.float64), torch.randn(5, 3 * 2, dtype=torch.float64)
    each = [torch.linalg.svdvals(b[:, i::3] @ a[2 * i : 2 * i + 2])[:2] for i in range(3)]
    wanted = 0.5 * torch.stack(each).norm(dim=0)
    torch.testing.assert_close(singular_values(a, b, -0.5, num_stacked=3), wanted)


def test_effective_rank_counts_equal_directions() -> None:
    """Roy and Vetterli 2007: r for r equal singular values, 1 for one, 0 for none."""
    assert effective_rank(torch.tensor([2.0, 2.0, 2.0, 0.0])) == pytest.approx(3)
    assert effective_rank(torch.tensor([7.0, 0.0])) == pytest.approx(1)
    assert effective_rank(torch.zeros(4)) == 0.0
    values = np.array([5.0, 2.0, 0.5])
    shares = values / values.sum()
    slow = math.exp(-sum(p * math.log(p) for p in shares))
    assert effective_rank(torch.from_numpy(values)) == pytest.approx(slow)


def test_rank_for_keeps_the_share_of_the_energy() -> None:
    values = torch.tensor([3.0, 4.0, 0.1]).sort(descending=True).values
    assert rank_for(values, 0.60) == 1  # 16 of 25.01
    assert rank_for(values, 0.90) == 2
    assert rank_for(values, 1.0) == 3
    assert rank_for(torch.zeros(2), 0.9) == 0


def told(layer: int, values: list[float], **fields: Any) -> dict[str, Any]:
    spectrum = torch.tensor(values, dtype=torch.float64)
    return {
        "module": f"model.layers.{layer}.mlp.up_proj",
        "layer": layer,
        "rank": len(values),
        "scaling": 2.0,
        "frobenius": float(spectrum.square().sum().sqrt()),
        "effective_rank": effective_rank(spectrum),
        "relative": 0.02,
        "singular_values": values,
        **fields,
    }


EVEN = [1.0, 0.9, 0.8, 0.7]


@pytest.mark.parametrize(
    ("modules", "codes"),
    [
        ([told(i, EVEN) for i in range(4)], []),
        ([told(i, [0.0] * 4) for i in range(4)], ["no_effect"]),
        ([told(0, [0.0] * 4), *(told(i, EVEN) for i in range(1, 5))], ["dead_modules"]),
        ([told(0, [9.0] * 4), *(told(i, EVEN) for i in range(1, 5))], ["one_layer_dominates"]),
        ([told(i, EVEN, relative=0.7) for i in range(4)], ["large_change"]),
        ([told(i, EVEN, relative=1e-5) for i in range(4)], ["weak"]),
        ([told(i, EVEN, relative=1e-3) for i in range(4)], ["below_bf16_step"]),
        ([told(i, [1.0, 0.9, 1e-3, 1e-4]) for i in range(4)], ["rank_too_large"]),
        ([told(i, EVEN, scaling=64.0) for i in range(4)], ["unusual_scale"]),
    ],
    ids=lambda value: "".join(value) if value and isinstance(value[0], str) else "",
)
def test_findings(modules: list[dict[str, Any]], codes: list[str]) -> None:
    assert [finding["code"] for finding in findings_of(modules)] == codes


def test_rank_that_would_do_is_named() -> None:
    modules = [told(i, [1.0, 0.9, *[1e-4] * 14]) for i in range(4)]
    [finding] = findings_of(modules)
    assert finding["message"].startswith("Rank 2 would do")
    assert summary_of(modules)["enough_rank"] == 2


def test_peft_and_the_doctor_agree_with_slow_obvious_versions(base: Path, tmp_path: Path) -> None:
    """One child: PEFT's log-probabilities against merged weights, and norms against B @ A."""
    from safetensors.torch import load_file as load_torch
    from transformers import AutoModelForCausalLM

    config = json.loads((base / "config.json").read_text())
    adapter = write_adapter(tmp_path / "adapter", lora_tensors(config, seed=5))
    done = run(tmp_path, base, adapter, memory_bytes=3 << 30)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    doctor, reference = answer["doctor"], answer["reference"]

    tensors = load_file(adapter / "adapter_model.safetensors")
    weights = load_torch(base / "model.safetensors")
    assert len(doctor["modules"]) == 4  # q and v of two layers
    for module in doctor["modules"]:
        name = f"base_model.model.{module['module']}.lora_"
        delta = 2.0 * tensors[f"{name}B.weight"] @ tensors[f"{name}A.weight"]
        whole = np.linalg.svd(delta, compute_uv=False)[:4]
        np.testing.assert_allclose(module["singular_values"], whole, rtol=1e-3)
        assert module["frobenius"] == pytest.approx(float(np.linalg.norm(delta)), rel=1e-3)
        weight = weights[f"{module['module']}.weight"]
        assert module["relative"] == pytest.approx(
            float(np.linalg.norm(delta)) / float(weight.norm()), rel=1e-3
        )

    assert reference["dtype"] == "float32" and len(reference["prompts"]) == 4
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for merged in (False, True):
        if merged:
            for module in doctor["modules"]:
                name = f"base_model.model.{module['module']}.lora_"
                delta = 2.0 * tensors[f"{name}B.weight"] @ tensors[f"{name}A.weight"]
                model.get_submodule(module["module"]).weight.data += torch.from_numpy(delta)
        for prompt in reference["prompts"]:
            ids = prompt["token_ids"]
            assert 2 <= len(ids) <= MAX_PROMPT_TOKENS
            with torch.inference_mode():
                logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            slow = [float(logprobs[i, ids[i + 1]]) for i in range(len(ids) - 1)]
            said = prompt["adapter" if merged else "base"]
            np.testing.assert_allclose(said["logprobs"], slow, atol=1e-3)
            assert said["top"][0][0] == int(logprobs[-2].argmax())


def test_a_child_out_of_memory_ends_with_an_exit_code(base: Path, tmp_path: Path) -> None:
    config = json.loads((base / "config.json").read_text())
    adapter = write_adapter(tmp_path / "adapter", lora_tensors(config, seed=5))
    done = run(tmp_path, base, adapter, memory_bytes=48 << 20)
    assert done.returncode != 0 and not done.stdout


def test_an_adapter_of_another_base_is_refused(base: Path, tmp_path: Path) -> None:
    config = json.loads((base / "config.json").read_text()) | {"hidden_size": 16}
    adapter = write_adapter(tmp_path / "adapter", lora_tensors(config, seed=5), lora_config())
    done = run(tmp_path, base, adapter)
    assert done.returncode == 2 and not done.stdout
