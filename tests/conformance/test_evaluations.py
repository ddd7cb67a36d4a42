"""An evaluation with a real worker: what it asks, and what it makes of the answers."""

from __future__ import annotations

import math
import uuid
from pathlib import Path
from typing import Any

import httpx
import pytest

from contract.training import judging
from contract.training.job import Hyperparameters, TrainJob
from contract.training.judging import BatchScores, Given
from controlplane.evaluations.batch_scores import answer_of
from controlplane.evaluations.models import Case
from tests.conformance.conftest import Served
from tests.fakes import FAKE_NAME
from tests.tiny_base import ROOMY_CONTEXT, ROOMY_NAME, write_tiny_base

#: A turn of the inspector, and of Celery's queue `ops`.
TURN = (
    "import django; django.setup();"
    "from controlplane.evaluations import tasks;"
    "tasks.evaluation_run(); tasks.evaluation_judge()"
)
QUESTION, ANSWER = "how are you?", "hello world"


def call(served: Served, method: str, path: str, tenant: str = "acme", **body: Any) -> Any:
    headers = {"authorization": f"Bearer {served.key(tenant)}"}
    url = f"{served.url}/api/v1/{path}"
    answer = httpx.request(method, url, json=body or None, headers=headers, timeout=60)
    assert answer.status_code < 300, answer.text
    return answer.json()


def evaluated(served: Served, model: str, suite: str) -> tuple[Any, list[Any]]:
    made = call(served, "POST", "evaluations", model=model, suite=suite, max_tokens=16)
    assert made["status"] == "queued"
    env = "DJANGO_SETTINGS_MODULE"
    for _ in range(10):
        served.live.run("-c", f"import os; os.environ.setdefault('{env}', "
                        f"'controlplane.settings'); {TURN}")  # fmt: skip
        found = call(served, "GET", f"evaluations/{made['id']}")
        if found["status"] not in ("queued", "running", "judging"):
            break
    assert (found["status"], found["error"]) == ("succeeded", ""), found
    results = call(served, "GET", f"evaluations/{made['id']}/results")["data"]
    return found, results[::-1]


def test_answers_are_checked(served: Served) -> None:
    """The echoing engine repeats the last message."""
    messages = [{"role": "user", "content": "abc 123"}]
    checks = [
        {"type": "contains", "value": "abc"},
        {"type": "regex", "pattern": "[0-9]{3}$"},
        {"type": "contains", "value": "xyz"},
    ]
    cases = [
        {"messages": messages, "checks": checks, "slice": "digits"},
        {"messages": [{"role": "user", "content": "z" * 5000}], "checks": checks[1:]},
    ]
    call(served, "POST", "suites/echo/versions", cases=cases)
    found, (first, second) = evaluated(served, FAKE_NAME, "echo")
    assert (first["output"], first["scores"]) == ("abc 123", [1.0, 1.0, 0.0])
    assert first["score"] == pytest.approx(2 / 3)
    # It is longer than the model's context: the case failed, not the run.
    assert second["scores"] == [0.0, 0.0] and "context" in second["error"]
    assert (found["num_done"], found["summary"]["errors"]) == (2, 1)
    assert found["summary"]["slices"] == {"digits": pytest.approx(2 / 3)}


def test_expected_answers_are_scored_as_transformers_does(
    served: Served, tmp_path_factory: pytest.TempPathFactory
) -> None:
    case = {"messages": [{"role": "user", "content": QUESTION}], "expected": ANSWER}
    call(served, "POST", "suites/scored/versions", cases=[case])
    _, [result] = evaluated(served, ROOMY_NAME, "scored")
    folder = tmp_path_factory.mktemp("scored")
    logprob, num_tokens = reference(folder)
    assert result["num_tokens"] == num_tokens
    assert result["logprob"] == pytest.approx(logprob, abs=1e-3)
    assert result["scores"] == [] and result["score"] is None


#: A system's message, a turn before, words that spell a special token, blanks at the ends.
CHATS = (
    ([("user", QUESTION)], ANSWER),
    (
        [("system", "Be kind."), ("user", "hello"), ("assistant", "world\n"), ("user", "?")],
        "fine\n",
    ),
    ([("developer", "<|im_end|>"), ("user", "I’m ☃ <|im_start|>user\n")], " <|im_end|>\n\n"),
    ([("user", "x " * 300)], "hello world, how are you? {json: 12} " * 4),
)


def test_a_batch_scores_what_workers_score(
    served: Served, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The same tokens, and log-probabilities within rounding: of adapters that change nothing."""
    cases = [
        {"messages": [{"role": role, "content": text} for role, text in chat], "expected": answer}
        for chat, answer in CHATS
    ]
    call(served, "POST", "suites/both/versions", cases=cases)
    _, results = evaluated(served, ROOMY_NAME, "both")
    scores = in_a_batch(tmp_path_factory.mktemp("batch"), cases)
    assert [row["num_tokens"] for row in results] == [num for _, num in scores.candidate]
    logprobs = pytest.approx([row["logprob"] for row in results], abs=1e-3)
    assert [logprob for logprob, _ in scores.candidate] == logprobs
    assert [logprob for logprob, _ in scores.live] == logprobs


def in_a_batch(folder: Path, cases: list[Any]) -> BatchScores:
    """What the child of a batch makes of cases, as `GateJudge` gives them."""
    import torch

    from engine.model.config import ModelConfig
    from engine.model.weights import load_weights
    from engine.text.codec import TextCodec
    from engine.training.model import TrainingModel
    from engine.training.parameters import AdapterLayout
    from worker.training.disk import save_peft
    from worker.training.jobs import NamedJob, settings_of
    from worker.training.judging import CaseJudge

    base = write_tiny_base(folder / ROOMY_NAME, name=ROOMY_NAME, context=ROOMY_CONTEXT)
    hyper = Hyperparameters(rank=2)
    config = ModelConfig.from_folder(base)
    layout = AdapterLayout(config, settings_of(hyper))
    nothing = layout.tensors(torch.zeros(layout.size))
    given = Given(suite_version=str(uuid.uuid4()), live_digest="a" * 64, base_revision="0")
    judging.write_cases(folder, given, [answer_of(Case(**case)) for case in cases])
    save_peft(nothing, hyper, folder)
    job = TrainJob(
        base_model_dir=base,
        dataset=folder / "none",
        output_dir=folder / "none",
        hyperparameters=hyper,
        judge_dir=folder,
    )
    weights = load_weights(base, config, "cpu", torch.float32)
    judge = CaseJudge(TrainingModel(config, weights), TextCodec(base), 512)
    judge.add(NamedJob("run", job), nothing)
    while (scored := judge.step(may_wait=True)) is None:
        pass
    judge.close()
    scored.write(folder)
    found = judging.read_scores(folder)
    assert isinstance(found, BatchScores), found
    return found


def reference(folder: Path) -> tuple[float, int]:
    """The log-probability of the answer's tokens, to the one that ends the turn."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_tiny_base(folder, name=ROOMY_NAME, context=ROOMY_CONTEXT)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    whole = tokenizer.encode(f"{prompt}{ANSWER}<|im_end|>", add_special_tokens=False)
    first = len(tokenizer.encode(prompt, add_special_tokens=False))
    with torch.inference_mode():
        table = model(torch.tensor([whole])).logits[0].log_softmax(-1)
    values = [float(table[at - 1, whole[at]]) for at in range(first, len(whole))]
    assert all(map(math.isfinite, values))
    return sum(values), len(values)
