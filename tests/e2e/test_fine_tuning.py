"""OpenAI's client has a real trainer fine-tune SmolLM2: the commands of docs/leaving-openai.md."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from demo.seed import ROOT
from tests.cli.runner import Cli
from tests.e2e.system import System, until

PAGE = ROOT / "docs" / "leaving-openai.md"
_BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.M | re.S)


@pytest.fixture(scope="module")
def trainer(system: System) -> Iterator[System]:
    """The system with its trainer, the inspector, and beat for versions that wait for a check."""
    platform = system.platform
    processes = (platform.trainer, platform.inspector, platform.beat)
    for process in processes:
        process.start()
    yield system
    for process in processes:
        process.ask_to_stop()
    for process in processes:
        process.stop()


def store(folder: Path) -> None:
    """Write what a reader has of OpenAI's job."""
    rows = (ROOT / "demo" / "data" / "acme.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "chats.jsonl").write_bytes(b"".join(rows[:12]))
    asked = {"role": "user", "content": "Total of 3 x 12?"}
    old = [
        {"messages": [asked], "answer": "36"},
        {"messages": [asked, {"role": "assistant", "content": '{"total": 36}'}]},
    ]
    (folder / "old.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in old))
    job = {
        "object": "fine_tuning.job",
        "id": "ftjob-old",
        "model": "gpt-4o-mini-2024-07-18",
        "fine_tuned_model": "ft:gpt-4o-mini-2024-07-18:acme:imported:9XyZ",
        "status": "succeeded",
        "training_file": "file-old",
        "validation_file": None,
        "method": {
            "type": "supervised",
            "supervised": {"hyperparameters": {"n_epochs": "auto", "batch_size": 1}},
        },
        "seed": 7,
        "integrations": [{"type": "wandb", "wandb": {"project": "p"}}],
        "metadata": {"team": "support"},
    }
    (folder / "job.json").write_text(json.dumps(job))


def run_page(system: System, folder: Path, *, imports: bool) -> list[str]:
    """Run the page's blocks in one folder: that which imports a job, or the others.

    Returns what each printed.
    """
    store(folder)
    command = folder / "bin" / "lorikeet"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m lorikeet_cli "$@" 2>&1\n')
    command.chmod(0o755)
    env = {
        **Cli(folder).environment(),
        "PATH": f"{command.parent}:{os.environ['PATH']}",
        "OPENAI_BASE_URL": f"{system.base_url}/v1",
        "OPENAI_API_KEY": system.tenants["acme"].api_key,
    }
    printed = []
    for language, code in _BLOCK.findall(PAGE.read_text()):
        if ("import-openai" in code) != imports:
            continue
        code = code.replace("smollm2-135m-instruct", system.base_model)
        shell = ["bash", "-euo", "pipefail", "-c", code]
        argv = [sys.executable, "-c", code] if language == "python" else shell
        done = subprocess.run(
            argv, env=env, cwd=folder, capture_output=True, text=True, timeout=580, check=False
        )
        assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
        printed.append(done.stdout)
    return printed


@pytest.mark.long  # minutes: a training, and a suite on two models
@pytest.mark.timeout(1200)
def test_a_job_of_openais_is_made_again_and_compared(trainer: System, tmp_path: Path) -> None:
    [imported] = run_page(trainer, tmp_path, imports=True)
    check_imported(trainer, tmp_path, imported)


@pytest.mark.timeout(600)
def test_a_job_from_the_file_to_the_answer(trainer: System, tmp_path: Path) -> None:
    system = trainer
    made, followed, used = run_page(system, tmp_path, imports=False)
    client = system.client()
    job = client.fine_tuning.jobs.retrieve((tmp_path / "job.txt").read_text())
    assert made.startswith(f"{job.id} queued")
    assert (job.status, job.error, job.model) == ("succeeded", None, system.base_model)
    assert job.fine_tuned_model is not None and job.fine_tuned_model.startswith("support@")
    assert job.trained_tokens and job.finished_at
    # The stream ended with the job, and had each of its steps.
    assert followed.endswith("data: [DONE]\n\n")
    assert "Step 2/2: training loss=" in followed
    assert "New fine-tuned model created" in followed
    assert used.startswith(f"succeeded {job.fine_tuned_model} {job.trained_tokens} None")
    assert "step,train_loss" in used
    assert f"2 {job.fine_tuned_model}" in used
    assert "The job has successfully completed" in used

    # What it used is billed to the tenant, by day and adapter.
    billed = training_usage(system, "acme")
    (row,) = [row for row in billed if row["adapter"] == "support"]
    assert (row["runs"], row["trained_tokens"]) == (1, job.trained_tokens)
    assert row["cpu_seconds"] + row["gpu_seconds"] > 0

    # Nobody else sees any of it.
    stranger = system.client("globex")
    assert job.id not in [other.id for other in stranger.fine_tuning.jobs.list()]
    # The stranger has a `support` of its own: the long name says whose is meant.
    name, number = job.fine_tuned_model.split("@")
    model = f"ft:{system.base_model}:{job.organization_id}:{name}:{number}"
    hello: Any = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    assert client.chat.completions.create(model=model, **hello).model
    with pytest.raises(openai.NotFoundError):
        stranger.chat.completions.create(model=model, **hello)
    with pytest.raises(openai.NotFoundError):
        stranger.files.content(job.result_files[0])
    assert "support" not in [row["adapter"] for row in training_usage(system, "globex")]


PAIRS = "".join(
    json.dumps(
        {
            "input": {"messages": [{"role": "user", "content": f"Hello {number}"}]},
            "preferred_output": [{"role": "assistant", "content": "Good day."}],
            "non_preferred_output": [{"role": "assistant", "content": "Hi!"}],
        }
    )
    + "\n"
    for number in range(4)
)


@pytest.mark.timeout(600)
def test_a_job_of_preferences_becomes_a_version(trainer: System) -> None:
    client, rows = trainer.client(), PAIRS.encode()
    job = client.fine_tuning.jobs.create(
        model=trainer.base_model,
        training_file=client.files.create(file=("pairs.jsonl", rows), purpose="fine-tune").id,
        suffix="polite",
        method={"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.5, "batch_size": 2}}},
        extra_body={"lorikeet": {"rank": 4, "alpha": 8, "max_steps": 3}},
    )

    def ended() -> Any:
        found = client.fine_tuning.jobs.retrieve(job.id)
        return found if found.status in ("succeeded", "failed") else None

    done = until(ended, "the job's end", 500)
    assert (done.status, done.error, done.fine_tuned_model) == ("succeeded", None, "polite@1")
    assert done.method is not None and done.method.type == "dpo"
    events = client.fine_tuning.jobs.list_events(job.id).data
    steps = [event for event in reversed(events) if event.type == "metrics"]
    figures: list[Any] = [event.data for event in steps]
    assert [each["step"] for each in figures] == [1, 2, 3]
    assert figures[0]["train_loss"] == pytest.approx(0.6931, abs=1e-3)
    assert figures[-1]["train_loss"] < figures[0]["train_loss"]
    assert figures[-1]["reward_margin"] > 0 and figures[-1]["reward_accuracy"] == 1
    assert "reward_margin" in client.files.content(done.result_files[0]).text
    hello: Any = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    assert client.chat.completions.create(model="polite@1", **hello).model


@pytest.mark.timeout(600)
def test_a_job_by_reinforcement_becomes_a_version(trainer: System) -> None:
    client = trainer.client()
    prompts = "".join(
        f"{json.dumps({'messages': [{'role': 'user', 'content': f'Say {word}'}], 'word': word})}\n"
        for word in ("one", "two", "three", "four")
    )
    likeness = {"input": "{{ sample.output_text }}", "reference": "{{ item.word }}"}
    parts: dict[str, Any] = {
        "has": {"type": "string_check", "name": "has", "operation": "ilike", **likeness},
        "like": {"type": "text_similarity", "name": "like", "evaluation_metric": "fuzzy_match",
                 **likeness},
        "short": {"type": "python", "name": "short",
                  "source": "def grade(s, i): return len(s['output_text']) < 20"},
    }  # fmt: skip
    formula = "(has + like + short) / 3"
    grader: Any = {"type": "multi", "name": "all", "graders": parts, "calculate_output": formula}
    rows = client.files.create(file=("words.jsonl", prompts.encode()), purpose="fine-tune").id
    hyperparameters: Any = {"compute_multiplier": 0.5, "batch_size": 2, "eval_interval": 2}
    own: Any = {"grader": grader, "hyperparameters": hyperparameters}
    job = client.fine_tuning.jobs.create(
        model=trainer.base_model,
        training_file=rows,
        validation_file=rows,
        suffix="words",
        method={"type": "reinforcement", "reinforcement": own},
        extra_body={"lorikeet": {"rank": 4, "alpha": 8, "max_steps": 2, "max_tokens": 6}},
    )

    def ended() -> Any:
        found = client.fine_tuning.jobs.retrieve(job.id)
        return found if found.status in ("succeeded", "failed") else None

    done = until(ended, "the job's end", 500)
    assert (done.status, done.error, done.fine_tuned_model) == ("succeeded", None, "words@1")
    events = client.fine_tuning.jobs.list_events(job.id).data
    figures: list[Any] = [each.data for each in reversed(events) if each.type == "metrics"]
    assert [each["step"] for each in figures] == [1, 2]
    for each in figures:
        of_parts = [each[f"reward_{name}"] for name in parts]
        assert each["reward"] == pytest.approx(sum(of_parts) / 3, abs=2e-4)
        assert each["mismatch_share"] == 0 and len(each["samples"]) == 3
    assert figures[1]["valid_loss"] == -figures[1]["validation_reward"]
    assert "reward,reward_spread,kl" in client.files.content(done.result_files[0]).text
    hello: Any = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    assert client.chat.completions.create(model="words@1", **hello).model


@pytest.mark.timeout(600)
def test_a_job_of_preferences_of_openais_is_made_again(trainer: System, tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text(PAIRS)
    method = {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.2, "batch_size": 2}}}
    job = {"id": "ftjob-pairs", "model": "gpt-4o-2024-08-06", "suffix": "moved", "method": method}
    (tmp_path / "job.json").write_text(json.dumps(job))
    key = trainer.tenants["acme"].api_key
    cli = Cli(tmp_path, {"LORIKEET_URL": trainer.base_url, "LORIKEET_API_KEY": key})
    argv = ["import-openai", "job.json", "--training-file=pairs.jsonl", "--set=max_steps=1"]
    done = cli.run(*argv, f"--base-model={trainer.base_model}", "--output=json")
    assert done.code == 0, done.err
    made = json.loads(done.out)["job"]
    assert (made["fine_tuned_model"], made["method"]["type"]) == ("moved@1", "dpo")
    assert made["method"]["dpo"]["hyperparameters"]["beta"] == 0.2


def check_imported(system: System, folder: Path, printed: str) -> None:
    """What `lorikeet import-openai` made, and said; again it makes nothing."""
    client = system.client()
    (job,) = client.fine_tuning.jobs.list(metadata={"team": "support"}).data
    assert (job.status, job.fine_tuned_model, job.seed) == ("succeeded", "imported@1", 7)
    assert job.hyperparameters.batch_size == 1 and job.metadata is not None
    assert job.metadata["imported_from"].startswith("ftjob-old ")
    for said in (
        *(f"model: {system.base_model} is trained in place of gpt-4o-mini", "integrations: wandb"),
        *(f"{job.id} is queued", "imported@1", "Against 2 old answers", "similarity", "exact"),
    ):
        assert said in printed, (said, printed)
    # Each row of the table: what the base and the new model have.
    (line,) = [line for line in printed.splitlines() if line.startswith("all ")]
    _, base, new, difference, low, high = line.split()
    assert 0 <= float(base) <= 1 and 0 <= float(new) <= 1
    assert float(low) <= float(difference) <= float(high)

    key = system.tenants["acme"].api_key
    cli = Cli(folder, {"LORIKEET_URL": system.base_url, "LORIKEET_API_KEY": key})
    argv = ["import-openai", "job.json", "--training-file", "chats.jsonl"]
    argv += ["--base-model", system.base_model]
    argv += ["--set=rank=4", "--set=alpha=8", "--set=max_steps=2"]
    done = cli.run(*argv, "--old-answers=old.jsonl", "--min-score=1", "--output=json")
    assert done.code == 1 and "score is" in done.err
    again = json.loads(done.out)
    assert again["job"]["id"] == job.id
    assert again["replay"]["suite"]["version"] == 1
    assert again["replay"]["new"]["model"] == "imported@1"
    assert {row["case"] for row in again["replay"]["worst"]} <= {1, 2}
    assert f"{again['replay']['score']:.4g}" == new


def training_usage(system: System, tenant: str) -> list[dict[str, Any]]:
    answer = httpx.get(
        f"{system.base_url}/api/v1/usage",
        headers={"Authorization": f"Bearer {system.tenants[tenant].api_key}"},
        timeout=30,
    )
    assert answer.status_code == 200, answer.text
    rows: list[dict[str, Any]] = answer.json()["training"]
    return rows


def test_a_running_job_is_paused_resumed_and_cancelled(trainer: System, tmp_path: Path) -> None:
    client = trainer.client()
    rows = (ROOT / "demo" / "data" / "acme.jsonl").read_bytes()
    file = client.files.create(file=("chats.jsonl", rows), purpose="fine-tune")
    job = client.fine_tuning.jobs.create(
        model=trainer.base_model,
        training_file=file.id,
        extra_body={"lorikeet": {"rank": 1, "max_length": 256, "max_steps": 10_000}},
        hyperparameters={"batch_size": 1},
    )

    def status() -> str:
        return str(client.fine_tuning.jobs.retrieve(job.id).status)

    until(lambda: status() == "running", "it runs", timeout_s=120)
    client.fine_tuning.jobs.pause(job.id)
    until(lambda: status() == "paused", "it is paused", timeout_s=60)
    # The trainer may have it before the answer is written.
    assert client.fine_tuning.jobs.resume(job.id).status in ("queued", "running")
    until(lambda: status() == "running", "it runs again", timeout_s=120)
    client.fine_tuning.jobs.cancel(job.id)
    until(lambda: status() == "cancelled", "it is cancelled", timeout_s=60)
    assert client.fine_tuning.jobs.retrieve(job.id).fine_tuned_model is None
