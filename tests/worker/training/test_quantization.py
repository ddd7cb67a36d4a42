"""QLoRA: an adapter is trained over a base of four bits, and is an adapter like any other."""

from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from contract.training import JobError, TrainJob
from tests.tiny_base import TINY_NAME, write_tiny_base
from worker.train import EventLog, train
from worker.train_many import _not_in_the_batch
from worker.training.loop import load_base


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_base(tmp_path_factory.mktemp("base") / TINY_NAME)


def job_of(folder: Path, base: Path, **hyperparameters: Any) -> TrainJob:
    rows = folder / "rows.jsonl"
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]
    rows.write_text(f"{json.dumps({'messages': chat})}\n" * 8)
    fields = {"rank": 4, "max_steps": 12, "batch_size": 4, "learning_rate": 0.01, "warmup_steps": 0}
    job = {
        "base_model_dir": str(base),
        "dataset": str(rows),
        "output_dir": str(folder / f"adapter-{hyperparameters.get('quantization')}"),
        "hyperparameters": fields | hyperparameters,
        "num_threads": 1,
    }
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    return TrainJob.read(path)


def trained(job: TrainJob) -> list[dict[str, Any]]:
    stream = io.StringIO()
    train(job, EventLog(stream))
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_an_adapter_is_trained_over_four_bits(tmp_path: Path, base: Path) -> None:
    job = job_of(tmp_path, base, quantization="nf4", gradient_checkpointing=True)
    steps = [event["loss"] for event in trained(job) if event["event"] == "progress"]
    assert len(steps) == 12 and steps[-1] < 0.5 * steps[0]
    whole = job_of(tmp_path, base)
    other = [event["loss"] for event in trained(whole) if event["event"] == "progress"]
    # Four bits are another model, and nearly the same.
    assert steps[0] != other[0] and steps[0] == pytest.approx(other[0], rel=0.2)
    configs = [
        json.loads((each.output_dir / "adapter_config.json").read_text()) for each in (job, whole)
    ]
    assert configs[0] == configs[1]
    tensors = [load_file(each.output_dir / "adapter_model.safetensors") for each in (job, whole)]
    assert {n: (t.shape, t.dtype) for n, t in tensors[0].items()} == {
        n: (t.shape, t.dtype) for n, t in tensors[1].items()
    }
    # It helps the base that serves, whose bits are all there.
    assert loss(base, job.output_dir) < 0.5 * loss(base, None)


def loss(base: Path, adapter: Path | None) -> float:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    _, codec = load_base(job_of(base.parent, base))
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]
    ids = torch.tensor([codec.encode_chat(codec.render(chat, generation_prompt=False))])
    first = len(codec.encode_chat(codec.render(chat[:1])))
    labels = ids.clone()
    labels[:, :first] = labels[:, -1:] = -100  # the newline after the end is not learned
    with torch.inference_mode():
        return float(model(input_ids=ids, labels=labels).loss)


def test_the_linears_take_four_bits_and_the_head_keeps_its_own(tmp_path: Path, base: Path) -> None:
    model, _ = load_base(job_of(tmp_path, base, quantization="nf4"))
    layer = model.get_decoder().layers[0]
    for linear in (layer.self_attn.q_proj, layer.mlp.down_proj):
        weight = linear.weight
        assert weight.dtype == torch.uint8 and weight.quant_state.quant_type == "nf4"
        assert weight.numel() * 2 == linear.in_features * linear.out_features
    assert model.get_output_embeddings().weight.is_floating_point()


def test_a_trainer_without_bitsandbytes_refuses_it_by_name(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else found(name)
    )
    with pytest.raises(JobError, match=r"hyperparameters\.quantization: 'nf4' needs bitsandbytes"):
        load_base(job_of(tmp_path, base, quantization="nf4"))


def test_the_batch_leaves_it_to_a_process_of_its_own(tmp_path: Path, base: Path) -> None:
    why = _not_in_the_batch(job_of(tmp_path, base, quantization="nf4"))
    assert why == "quantization: the batch's base has all its bits"
    assert _not_in_the_batch(job_of(tmp_path, base)) is None
