"""What `lorikeet import-openai` reads: job objects and old answers as people have stored them.

tests/e2e/test_fine_tuning.py runs the command against a real trainer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lorikeet_cli.errors import CliError
from lorikeet_cli.old_answers import MAX_CASES, read_answers
from lorikeet_cli.openai_job import OldJob, read_job

from tests.cli.runner import Cli

#: As OpenAI's documentation shows one, with what older and newer ones have, too.
JOB: dict[str, Any] = {
    "object": "fine_tuning.job",
    "id": "ftjob-abc123",
    "model": "gpt-4o-mini-2024-07-18",
    "created_at": 1721764800,
    "finished_at": 1721765900,
    "fine_tuned_model": "ft:gpt-4o-mini-2024-07-18:acme:support-v2:9XyZ",
    "organization_id": "org-123",
    "result_files": ["file-res"],
    "status": "succeeded",
    "validation_file": None,
    "training_file": "file-abc",
    "hyperparameters": {"n_epochs": 3, "batch_size": 1, "learning_rate_multiplier": 1.8},
    "trained_tokens": 5768,
    "error": {},
    "integrations": [],
    "seed": 42,
    "estimated_finish": None,
    "method": {
        "type": "supervised",
        "supervised": {
            "hyperparameters": {
                "n_epochs": 4,
                "batch_size": "auto",
                "learning_rate_multiplier": "auto",
            }
        },
    },
    "metadata": {"team": "support"},
}


def read(folder: Path, **changes: Any) -> OldJob:
    path = folder / "job.json"
    path.write_text(json.dumps(JOB | changes))
    return read_job(path)


def test_a_job_is_taken_over(tmp_path: Path) -> None:
    old = read(tmp_path, result_files=[])
    assert old == OldJob(
        id="ftjob-abc123",
        model="gpt-4o-mini-2024-07-18",
        method="supervised",
        suffix="support-v2",
        hyperparameters={
            "n_epochs": 4,
            "batch_size": "auto",
            "learning_rate_multiplier": "auto",
        },
        seed=42,
        metadata={"team": "support"},
        has_validation=False,
        notes=(),
    )


def test_what_cannot_be_taken_over_is_named(tmp_path: Path) -> None:
    old = read(
        tmp_path,
        method=None,
        hyperparameters={"n_epochs": 2, "learning_rate_multiplier": 1.8, "beta": 0.1},
        user_provided_suffix="Support Team!",
        integrations=[{"type": "wandb", "wandb": {"project": "p"}}],
        model="ft:gpt-4o-mini-2024-07-18:acme::7abc",
        seed=2**31,
        metadata={f"key{n:02}": "x" for n in range(16)},
        novelty={"on": True},
    )
    assert old.hyperparameters == {"n_epochs": 2, "learning_rate_multiplier": 1.8}
    assert old.suffix == "support-team" and old.seed is None and len(old.metadata) == 15
    said = "\n".join(old.notes)
    for name in (
        *("learning_rate_multiplier: 1.8", "hyperparameters.beta", "suffix: 'Support Team!'"),
        *("integrations: wandb", "model: the weights of ft:", "seed: 2147483648"),
        *("metadata: without key15", "novelty: it is not known", "result_files"),
    ):
        assert name in said, (name, said)


def test_another_method_cannot_be_made_here(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="method is magic: supervised, dpo, reinforcement jobs"):
        read(tmp_path, method={"type": "magic"})
    with pytest.raises(CliError, match="The job has no grader"):
        read(tmp_path, method={"type": "reinforcement", "reinforcement": {}})
    with pytest.raises(CliError, match="supervised, dpo, reinforcement jobs"):
        read(tmp_path, method={"type": ["dpo"]})


def test_a_dpo_job_is_taken_over(tmp_path: Path) -> None:
    hyperparameters = {"n_epochs": 2, "beta": 0.2, "learning_rate_multiplier": 2, "gamma": 1}
    method = {"type": "dpo", "dpo": {"hyperparameters": hyperparameters}}
    old = read(tmp_path, method=method, hyperparameters=None, result_files=[])
    taken = {"n_epochs": 2, "beta": 0.2, "learning_rate_multiplier": 2}
    assert (old.method, old.hyperparameters) == ("dpo", taken)
    assert old.notes[0] == "hyperparameters.gamma: it is not known here."
    assert "2 is taken over, but of 0.0001, this server's rate" in old.notes[1]


def test_a_job_by_reinforcement_is_taken_over(tmp_path: Path) -> None:
    like = {"type": "string_check", "name": "a", "input": "x", "reference": "y", "operation": "eq"}
    judged = {"type": "score_model", "name": "b", "model": "gpt-4.1", "input": []}
    code = {"type": "python", "name": "c", "source": "def grade(s, i): ...", "image_tag": "1"}
    parts = {"a": like, "b": judged, "c": code}
    grader = {"type": "multi", "name": "m", "graders": parts, "calculate_output": "a + b + c"}
    given = {"compute_multiplier": 2, "eval_samples": 3}
    own = {"grader": grader, "response_format": {"type": "json_schema"}, "hyperparameters": given}
    old = read(tmp_path, method={"type": "reinforcement", "reinforcement": own}, result_files=[])
    assert old.hyperparameters == {"compute_multiplier": 2}
    del code["image_tag"]
    assert old.grader == grader | {"graders": parts}
    said = "\n".join(old.notes)
    for name in (
        *("response_format: answers are sampled freely", "grader.c.image_tag"),
        *("grader.b.model: gpt-4.1 must be", "hyperparameters.eval_samples: it is not known"),
    ):
        assert name in said, (name, said)


@pytest.mark.parametrize("content", ["", "[]", '{"id": 1}', "{" * 10_000, '{"model": 3}'])
def test_what_is_no_job_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "job.json").write_text(content)
    with pytest.raises(CliError, match="is not a fine-tuning job"):
        read_job(tmp_path / "job.json")


def answers(folder: Path, *rows: Any) -> Path:
    path = folder / "old.jsonl"
    path.write_text(
        "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    )
    return path


USER = {"role": "user", "content": "hello"}


def test_old_answers_become_cases(tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    path = answers(
        tmp_path,
        {"messages": [USER], "answer": "Hi.", "slice": "short"},
        {"messages": [USER, {"role": "assistant", "content": '{"total": 36}'}]},
        "",
        {"messages": [USER], "answer": {"content": [{"type": "text", "text": "parts"}]}},
        {"messages": [USER, {"role": "assistant", "tool_calls": [call]}]},
    )
    found = read_answers(path)
    assert found.num_left_out == 1
    assert [(case["expected"], case["slice"]) for case in found.cases] == [
        ("Hi.", "short"),
        ('{"total": 36}', ""),
        ("parts", ""),
    ]
    assert all(case["messages"] == [USER] for case in found.cases)
    kinds = [[check["type"] for check in case["checks"]] for case in found.cases]
    texts = ["exact", "similarity"]
    assert kinds == [texts, [*texts, "json_f1"], texts]


def test_broken_lines_are_named(tmp_path: Path) -> None:
    good = {"messages": [USER], "answer": "Hi."}
    path = answers(tmp_path, good, "{", {"messages": []}, {"messages": [USER]}, [good], good)
    with pytest.raises(CliError, match=r"line 2, 3, 4, 5: a line is"):
        read_answers(path)
    with pytest.raises(CliError, match="has no text answers"):
        read_answers(answers(tmp_path))
    with pytest.raises(CliError, match=f"{MAX_CASES} can be compared"):
        read_answers(answers(tmp_path, *[good] * (MAX_CASES + 1)))
    with pytest.raises(CliError, match="more than 2,000,000 bytes of answers"):
        read_answers(answers(tmp_path, *[{**good, "answer": "x" * 30_000}] * 80))


def test_the_command_line_says_what_is_wrong_before_it_asks_the_server(
    cli: Cli, tmp_path: Path
) -> None:
    (tmp_path / "job.json").write_text(json.dumps(JOB))
    rows = answers(tmp_path, {"messages": [USER], "answer": "Hi."})
    nobody = {"LORIKEET_URL": "http://nobody.invalid", "LORIKEET_API_KEY": "lk_live_x"}
    done = cli.run(
        "import-openai", "job.json", "--training-file", rows.name, "--min-score", "0.5", **nobody
    )
    assert done.code == 2 and "--min-score is for --old-answers" in done.err
    done = cli.run("import-openai", "job.json", "--training-file", "none.jsonl", **nobody)
    assert done.code == 1 and "Cannot read none.jsonl" in done.err
