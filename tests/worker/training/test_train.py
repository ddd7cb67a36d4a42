"""`python -m worker.train` as its callers see it: a job file in, JSON lines and a folder out."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from contract.training.job import Hyperparameters
from engine.text.codec import TextCodec
from tests.tiny_base import TINY_NAME, write_tiny_base
from tests.worker.training.job_runs import run, run_here, start, token_rows, write_job, write_rows
from worker.training.chat_data import DatasetError, load_examples, read_rows

CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "world "},
    {"role": "user", "content": "assistant\nhow?"},
    {"role": "assistant", "content": "fine\n"},
]


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_base(tmp_path_factory.mktemp("base") / TINY_NAME)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return write_rows(
        tmp_path / "data.jsonl",
        [
            {
                "messages": [
                    {"role": "user", "content": f"hello {i}" * (i % 5 + 1)},
                    {"role": "assistant", "content": "world"},
                ]
            }
            for i in range(12)
        ],
    )


def test_trains_reports_and_writes_an_adapter_that_peft_loads(
    tmp_path: Path, tiny_base: Path, dataset: Path
) -> None:
    targets = ["q_proj", "down_proj"]
    job = write_job(tmp_path, tiny_base, dataset, max_steps=30, target_modules=targets)
    code, events, stderr = run(job, is_real=True)
    assert code == 0, stderr

    assert [event["event"] for event in events] == ["started", *["progress"] * 30, "done"]
    first, *progress, done = events
    assert (first["rows"], first["steps"], first["truncated_rows"]) == (12, 30, 0)
    assert [event["step"] for event in progress] == list(range(1, 31))
    assert all(event["steps"] == 30 and event["tokens_per_s"] > 0 for event in progress)
    assert progress[0]["learning_rate"] > progress[-1]["learning_rate"]
    assert progress[-1]["eta_s"] == 0
    assert done["final_loss"] < progress[0]["loss"] / 2
    assert done["trained_tokens"] > 0

    folder = Path(done["output"])
    assert {path.name for path in folder.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == TINY_NAME
    assert (config["r"], config["target_modules"]) == (4, sorted(targets))
    tensors = load_file(folder / "adapter_model.safetensors")
    assert len(tensors) == 2 * 2 * 2  # A and B of two modules in two layers
    trained, untrained = hf_losses(tiny_base, folder, dataset)
    assert trained < untrained / 2
    # The Trainer's loss over a shuffled batch and HF's own over all rows speak of the same thing.
    assert trained == pytest.approx(done["final_loss"], rel=0.2)


def hf_losses(base: Path, adapter: Path, dataset: Path) -> tuple[float, float]:
    """The mean loss over a dataset's answers, as HF computes it, with the adapter and without."""
    rows = load_examples(TextCodec(base), dataset, Hyperparameters()).examples.rows()
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)

    def mean_loss() -> float:
        losses = [
            model(
                input_ids=torch.tensor([tokens]),
                labels=torch.tensor([tokens]).where(torch.tensor([learned]), -100),
            ).loss.item()
            for tokens, learned in token_rows(rows)
        ]
        return sum(losses) / len(losses)

    with torch.no_grad():
        trained = mean_loss()
        with model.disable_adapter():
            return trained, mean_loss()


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path, tiny_base: Path, dataset: Path) -> None:
    """In two processes: PEFT writes sets in an order that changes with each."""
    jobs = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        jobs.append(write_job(tmp_path / name, tiny_base, dataset, max_steps=3, seed=7))
    code, _, stderr = run(jobs[0])
    assert code == 0, stderr
    run_here(jobs[1])
    contents = [
        [path.read_bytes() for path in sorted((job.parent / "adapter").iterdir())] for job in jobs
    ]
    assert contents[0] == contents[1]


@pytest.mark.parametrize("max_length", [32, 512])
def test_only_the_assistants_tokens_carry_a_loss(
    tmp_path: Path, tiny_base: Path, max_length: int
) -> None:
    codec = TextCodec(tiny_base)
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": CHAT}])
    hyper = Hyperparameters(max_length=max_length, truncate=True)
    data = load_examples(codec, path, hyper)
    ((tokens, learned),) = token_rows(data.examples.rows())
    assert len(tokens) <= max_length
    assert (data.num_rows, data.num_cut, data.num_dropped) == (1, int(max_length == 32), 0)
    marked = [token for token, is_learned in zip(tokens, learned, strict=True) if is_learned]
    answers = codec.decode_whole(marked)
    assert "world <|im_end|>fine\n<|im_end|>".startswith(answers)
    assert answers.endswith("<|im_end|>") or data.num_cut
    # Where the marks begin is where generation begins.
    prompt = codec.encode_chat(codec.render(CHAT[:2]))
    assert tokens[: len(prompt)] == prompt
    assert not any(learned[: len(prompt)]) and learned[len(prompt)]


def test_a_row_that_the_template_refuses_is_named(tmp_path: Path, tiny_base: Path) -> None:
    """As Mistral's templates refuse some roles, and some begin an answer as they never write it."""
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    thinks = "{% if add_generation_prompt %}<think>{% endif %}"
    template = (tiny_base / "chat_template.jinja").read_text()
    for file in tiny_base.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    dataset = write_rows(tmp_path / "rows.jsonl", [{"messages": CHAT[1:3]}, {"messages": CHAT}])
    for changed, message in (
        (refusal + template, r"line 2: .*no system"),
        (template + thinks, r"line 1: .* does not begin messages\[1\] as it begins an answer"),
    ):
        (tmp_path / "chat_template.jinja").write_text(changed)
        with pytest.raises(DatasetError, match=message):
            load_examples(TextCodec(tmp_path), dataset, Hyperparameters())


USER, ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
GOOD = {"messages": [USER, ASSISTANT]}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([GOOD, {"prompt": "a"}], "line 2: completion must be a string"),
        ([GOOD, GOOD, {"messages": []}], "line 3: "),
        ([{"messages": [USER, {"role": "sage", "content": "b"}]}], r"line 1: messages\[1\].role"),
        ([{"messages": [USER, {"role": "assistant"}]}], r"line 1: messages\[1\].content"),
        ([{"messages": [ASSISTANT, USER]}], "line 1: messages must begin with a message"),
        (
            [{"messages": [{"role": "system", "content": "s"}]}],
            "line 1: messages must have a message of the assistant",
        ),
        ([], "no rows"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        list(read_rows(write_rows(tmp_path / "bad.jsonl", rows)))


@pytest.mark.parametrize("line", [b"{", b"\xff\xfe", b"[" * 100_000, b'"' + b"a" * (1 << 20)])
def test_bytes_that_are_no_row_are_named_by_their_line(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n\n" + line)
    with pytest.raises(DatasetError, match=r"^line 3 is "):
        list(read_rows(path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hyperparameters": {"rank": 300}}, "rank"),
        ({"dataset": "/nowhere"}, "dataset"),
        ({"base_model_dir": "/nowhere"}, "base_model_dir"),
        ({"num_threads": 0}, "num_threads"),
        ({"gpu_share": 1.5}, "gpu_share"),
        ({"output_dir": "/"}, "output_dir"),
    ],
)
def test_a_wrong_job_ends_with_one_error_event_and_exit_code_2(
    tmp_path: Path, tiny_base: Path, dataset: Path, change: dict[str, Any], message: str
) -> None:
    job = write_job(tmp_path, tiny_base, dataset)
    job.write_text(json.dumps(json.loads(job.read_text()) | change))
    code, events, _ = run(job)
    assert code == 2
    assert [event["event"] for event in events] == ["error"]
    assert message in events[0]["message"]


def test_a_module_that_the_model_has_not_is_named(
    tmp_path: Path, tiny_base: Path, dataset: Path
) -> None:
    job = write_job(tmp_path, tiny_base, dataset, target_modules=["q_proj", "lm_head"])
    [error] = run_here(job)
    assert "'lm_head' is not one of down_proj" in error["message"]
    assert error["field"] == "hyperparameters.target_modules"
    assert not (tmp_path / "adapter").exists()


LONG_ANSWER = {"messages": [USER, {"role": "assistant", "content": "world " * 50}]}
LONG_PROMPT = {"messages": [{"role": "user", "content": "hello " * 50}, ASSISTANT]}


def test_a_row_too_long_is_an_error_with_its_line_and_tokens(
    tmp_path: Path, tiny_base: Path
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [GOOD, LONG_ANSWER, GOOD, LONG_PROMPT])
    code, events, _ = run(write_job(tmp_path, tiny_base, path, max_steps=1, max_length=32))
    assert code == 2
    (event,) = events
    codec = TextCodec(tiny_base)
    longest = [
        max(load_examples(codec, each, Hyperparameters()).examples.rows().lengths)
        for each in (
            write_rows(tmp_path / "a", [LONG_ANSWER]),
            write_rows(tmp_path / "b", [LONG_PROMPT]),
        )
    ]
    told = f"max_length=32 tokens: line 2 has {longest[0]}, line 4 has {longest[1]}. Raise"
    assert told in event["message"] and "context of 512" in event["message"]


def test_a_row_longer_than_the_context_is_one_whatever_max_length_says(
    tmp_path: Path, tiny_base: Path
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": [USER, ASSISTANT] * 100}])
    with pytest.raises(DatasetError, match=r"max_length=512 tokens: line 1 has \d{3,4}\. "):
        load_examples(TextCodec(tiny_base), path, Hyperparameters(max_length=32_768))


def test_rows_are_cut_when_that_is_asked_for_and_counted(tmp_path: Path, tiny_base: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [GOOD, LONG_ANSWER, LONG_PROMPT])
    job = write_job(tmp_path, tiny_base, path, max_steps=1, max_length=32, truncate=True)
    code, events, stderr = run(job)
    assert code == 0, stderr
    counts = {
        name: events[0][name] for name in ("rows", "examples", "truncated_rows", "dropped_rows")
    }
    assert counts == {"rows": 3, "examples": 2, "truncated_rows": 2, "dropped_rows": 1}
    with pytest.raises(DatasetError, match="no row has an answer within max_length=32"):
        hyper = Hyperparameters(max_length=32, truncate=True)
        load_examples(TextCodec(tiny_base), write_rows(path, [LONG_PROMPT]), hyper)


def test_a_training_longer_than_it_may_be_is_refused(
    tmp_path: Path, tiny_base: Path, dataset: Path
) -> None:
    job = write_job(tmp_path, tiny_base, dataset, epochs=2)
    fields = json.loads(job.read_text())
    for name, most in (("most_steps", 5), ("most_tokens", 100)):
        job.write_text(json.dumps(fields | {name: most}))
        code, events, _ = run(job)
        assert code == 2
        assert "hyperparameters.epochs: the run would have" in events[-1]["message"]
        assert f"{most} is the limit" in events[-1]["message"]


def test_sigterm_stops_it_and_leaves_nothing(
    tmp_path: Path, tiny_base: Path, dataset: Path
) -> None:
    with start(write_job(tmp_path, tiny_base, dataset, max_steps=1_000_000)) as process:
        assert process.stdout is not None
        events = [json.loads(process.stdout.readline()) for _ in range(3)]
        assert events[-1]["event"] == "progress"
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        rest, _ = process.communicate(timeout=60)
    assert process.returncode == 143
    assert time.monotonic() - began < 30
    assert all(json.loads(line)["event"] == "progress" for line in rest.splitlines())
    assert {path.name for path in tmp_path.iterdir()} == {"data.jsonl", "job.json"}


def test_it_ends_when_nobody_listens_any_more(
    tmp_path: Path, tiny_base: Path, dataset: Path
) -> None:
    with start(write_job(tmp_path, tiny_base, dataset, max_steps=1_000_000)) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 1
        process.stdout = None  # for the end of the block, which would read it
