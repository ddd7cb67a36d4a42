"""Draft heads are trained beside an adapter, guess better than untrained ones, and are served."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from contract.adapters.base_shape import BaseShape
from contract.adapters.draft_heads import head_names, is_head_tensor
from contract.adapters.upload_check import check_adapter
from contract.training.job import Hyperparameters
from engine import AdapterPart, Engine, EngineConfig, Request, SamplingParams
from engine.text.codec import TextCodec
from tests.tiny_base import TINY_NAME, write_tiny_base
from tests.worker.training.job_runs import (
    Heard,
    make_training,
    request_of,
    token_rows,
    write_job,
    write_rows,
)
from worker.child import Stopped
from worker.training.chat_data import load_examples
from worker.training.draft_heads import IGNORED, Heads, targets_of

NUM_HEADS = 3
ANSWER = "how are you? {json: 12} hello world, how are you? {json: 21} world world"
FILE = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_base(tmp_path_factory.mktemp("base") / TINY_NAME)


def chat(number: int) -> dict[str, Any]:
    asked = {"role": "user", "content": f"hello {number}"}
    return {"messages": [asked, {"role": "assistant", "content": ANSWER}]}


def job_in(folder: Path, base: Path, **hyper: Any) -> Path:
    folder.mkdir()
    rows = write_rows(folder / "data.jsonl", [chat(number) for number in range(12)])
    return write_job(folder, base, rows, **{"max_steps": 40, "draft_heads": NUM_HEADS} | hyper)


def run(path: Path, log: Heard) -> Heard:
    assert make_training([path], log, path.parent / "state", checkpoint_s=0.0).run() == 0
    return log


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> tuple[Path, Heard]:
    """A job with heads that has run, and its events."""
    path = job_in(tmp_path_factory.mktemp("trained") / "one", tiny_base)
    return path, run(path, Heard())


def adapter_of(path: Path) -> Path:
    return path.parent / "adapter"


def heads_of(path: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(adapter_of(path) / FILE)
    return {name: tensor for name, tensor in tensors.items() if is_head_tensor(name)}


def test_trained_heads_guess_better_than_untrained_ones(trained: tuple[Path, Heard]) -> None:
    told = trained[1].of("draft_heads")
    last, before = told[-1], told[-1]["draft_head_accuracy_untrained"]
    after = last["draft_head_accuracy"]
    assert len(before) == len(after) == NUM_HEADS
    assert max(before) < 0.2 and min(after) > 0.5
    assert last["draft_head_accuracy_on"] == "training"
    assert told[0]["draft_head_loss"] > 2 * last["draft_head_loss"]
    # Each event repeats the last progress: it is shown in its place.
    progress = trained[1].of("progress")[-1]
    assert all({**event, **progress, "event": "draft_heads"} == event for event in told)


def test_the_file_has_what_was_counted_and_peft_loads_it(
    trained: tuple[Path, Heard], tiny_base: Path
) -> None:
    """The accuracy again, place by place, from the files alone."""
    path, log = trained
    heads = heads_of(path)
    base = AutoModelForCausalLM.from_pretrained(tiny_base)
    inner = PeftModel.from_pretrained(base, adapter_of(path)).get_base_model()
    lm_head = inner.get_output_embeddings()
    right, count = [0] * NUM_HEADS, [0] * NUM_HEADS
    data = load_examples(TextCodec(tiny_base), path.parent / "data.jsonl", Hyperparameters())
    for tokens, learned in token_rows(data.examples.rows()):
        with torch.no_grad():
            ids = torch.tensor([tokens])
            states = inner.get_decoder()(input_ids=ids).last_hidden_state[0]  # [T, E]
        for place in range(len(learned)):
            for head in range(NUM_HEADS):
                target = place + head + 2
                if target >= len(learned) or not all(learned[place + 1 : target + 1]):
                    continue
                down, up = (heads[name] for name in head_names(head))
                x = states[place]
                guess = lm_head(x + torch.nn.functional.silu(up @ (down @ x))).argmax()
                right[head] += int(guess) == tokens[target]
                count[head] += 1
    shares = [share / number for share, number in zip(right, count, strict=True)]
    # The trainer computes in bfloat16 where the processor does, which may tip a guess.
    assert shares == pytest.approx(log.of("draft_heads")[-1]["draft_head_accuracy"], abs=0.02)


def test_the_upload_check_takes_them(trained: tuple[Path, Heard], tiny_base: Path) -> None:
    folder = adapter_of(trained[0])
    content = (folder / FILE).read_bytes()
    checked = check_adapter(
        config=(folder / "adapter_config.json").read_bytes(),
        start=content,
        file_bytes=len(content),
        base=BaseShape.from_config(json.loads((tiny_base / "config.json").read_text())),
        max_rank=64,
    )
    assert checked.report()["draft_heads"] == NUM_HEADS


def test_drafts_of_trained_heads_change_no_token(
    trained: tuple[Path, Heard], tiny_base: Path
) -> None:
    codec, answers = TextCodec(tiny_base), []
    asked = "<|im_start|>user\nhello {}<|im_end|>\n<|im_start|>assistant\n"
    prompts = [codec.encode(asked.format(i), add_special_tokens=False) for i in range(6)]
    accepted = 0
    for speculation in (False, True):
        engine = Engine(EngineConfig(model_dir=tiny_base, speculation=speculation))
        engine.register_adapter("voice", adapter_of(trained[0]))
        found: dict[str, list[int]] = {}
        for number, prompt in enumerate(prompts):
            engine.add(
                Request(
                    request_id=str(number),
                    token_ids=prompt,
                    sampling=SamplingParams(temperature=0.0, max_tokens=50),
                    adapters=(AdapterPart(digest="voice"),),
                )
            )
            while engine.has_work():
                for output in engine.step():
                    assert output.error is None
                    found.setdefault(output.request_id, []).extend(output.token_ids)
                    if output.finish_reason is not None:
                        accepted += dict(output.accepted_drafts).get("heads", 0)
        answers.append(found)
        engine.close()
    assert answers[0] == answers[1] and len(answers[0]["0"]) > 20
    assert accepted > 20


def test_the_same_seed_gives_the_same_bytes_also_when_stopped_among_the_heads(
    trained: tuple[Path, Heard], tiny_base: Path, tmp_path: Path
) -> None:
    whole, log = trained
    part = job_in(tmp_path / "part", tiny_base)
    heard = Heard()
    work = make_training([part], heard, tmp_path / "state", checkpoint_s=0.0)

    def stop(event: dict[str, Any]) -> None:
        if event["event"] == "draft_heads" and event.get("draft_head_step") == 20:
            work.stop(signal.SIGTERM, None)

    heard.react = stop
    with pytest.raises(Stopped):
        work.run()
    assert not adapter_of(part).exists()
    assert heard.of("draft_heads")[-1]["draft_head_step"] == 20
    saved = heard.of("saved")[-1]["step"]
    again = Heard()
    assert make_training([part], again, tmp_path / "state").run() == 0
    assert again.of("started")[0]["resumed_step"] == saved > 30
    names = ("step", "loss", "draft_head_loss", "draft_head_accuracy")
    ours, theirs = again.of("draft_heads")[-1], log.of("draft_heads")[-1]
    assert [ours[name] for name in names] == [theirs[name] for name in names]
    for file in sorted(adapter_of(whole).iterdir()):
        assert (adapter_of(part) / file.name).read_bytes() == file.read_bytes()
    drawn = [Heads(1, 32, seed=seed).tensors()[head_names(0)[0]] for seed in (0, 0, 5)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


def test_a_run_begins_from_an_adapter_with_heads_and_trains_its_own(
    trained: tuple[Path, Heard], tiny_base: Path, tmp_path: Path
) -> None:
    """Or, without heads of its own, from the LoRA alone."""
    path = job_in(tmp_path / "next", tiny_base, max_steps=2, draft_heads=1, validation_share=0.3)
    start = {"warm_start": str(adapter_of(trained[0]) / FILE), "salt": "x"}
    path.write_text(json.dumps(json.loads(path.read_text()) | start))
    log = run(path, Heard())
    assert log.of("progress")[0]["loss"] < 0.5
    assert heads_of(path).keys() == set(head_names(0))
    assert log.of("draft_heads")[-1]["draft_head_accuracy_on"] == "validation"
    other = job_in(tmp_path / "batch", tiny_base, max_steps=2, draft_heads=0)
    other.write_text(json.dumps(json.loads(other.read_text()) | start))
    adapter = request_of(other, tiny_base).adapter
    assert adapter is not None and not any(map(is_head_tensor, adapter))


def test_no_serving_worker_is_asked_for_heads(tiny_base: Path, tmp_path: Path) -> None:
    path = job_in(tmp_path / "one", tiny_base, draft_heads=1, max_steps=2)
    log = Heard()
    nowhere = tmp_path / "worker.sock"
    assert make_training([path], log, tmp_path / "state", worker=nowhere).run() == 0
    assert log.events[0]["event"] == "later"
    assert log.events[0]["reason"] == "draft_heads: a serving worker trains none"
    assert heads_of(path).keys() == set(head_names(0))


def test_only_tokens_of_one_answer_are_guessed() -> None:
    no = IGNORED
    labels = torch.tensor([[no, no, 5, 6, 7, no, 8, 9, no]])
    reads, targets = targets_of(labels, 2)
    assert reads[0].tolist() == [False, True, True, True, False, True, True, False, False]
    assert targets[0].tolist() == [
        *([no, no], [6, 7], [7, no], [no, no], [no, no], [9, no], [no, no], [no, no], [no, no])
    ]
