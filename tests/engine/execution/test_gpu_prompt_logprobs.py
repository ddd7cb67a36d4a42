"""Log-probabilities of prompts over the GPU runner, beside decodes that replay graphs.

Runs on a card under `make test-gpu`; elsewhere Triton's interpreter runs the same kernels.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from engine.execution import gpu_decoder, prompt_scores
from tests.engine.adapters.formats import BLENDS, FORMATS, TOKENS, FormatOracle
from tests.engine.adapters.formats import make_engine as make_engine_of
from tests.engine.conftest import MakeEngine, Oracle, Result, prompt, request, run
from tests.engine.execution.test_gpu_engine import EXTENDED, make_gpu_engine
from tests.engine.execution.test_prompt_logprobs import assert_scored
from tests.engine.model.families import save_family

if torch.cuda.is_available():
    pytestmark = pytest.mark.gpu

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
INTERPRETED_LONG = [pytest.mark.long] if IS_INTERPRETED else []


def test_scored_beside_others(
    make_engine: MakeEngine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in several chunks, of adapters that are more than tiles as well; all tokens are the
    oracle's."""
    monkeypatch.setattr(prompt_scores, "_BLOCK_BYTES", 5 * 4 * 257)
    engine = make_gpu_engine(make_engine, max_running=10, max_step_tokens=40)
    chosen = [None, *EXTENDED, "all-4", "patterns"]
    prompts = [prompt(80 + i, 7 + 3 * i) for i in range(len(chosen))]
    results = run(
        engine,
        *(
            request(
                str(i),
                tokens,
                adapter=adapter,
                max_tokens=3,
                prompt_logprobs=None if i % 3 == 2 else i % 3,
            )
            for i, (tokens, adapter) in enumerate(zip(prompts, chosen, strict=True))
        ),
        check=True,
    )
    for i, (tokens, adapter) in enumerate(zip(prompts, chosen, strict=True)):
        got = results[str(i)]
        assert got.token_ids == oracle.generate(tokens, 3, adapter), adapter
        if i % 3 == 2:
            assert got.prompt_logprobs is None
        else:
            assert_scored(got.prompt_logprobs, tokens, oracle.logprobs(tokens, adapter), i % 3)


def test_decodes_go_on_between_scored_chunks(make_engine: MakeEngine, oracle: Oracle) -> None:
    """Their tokens have not been read when the step that scores is launched."""
    engine = make_gpu_engine(make_engine, max_step_tokens=20)
    long, tokens = prompt(1, 6), prompt(2, 50)
    engine.add(request("long", long, adapter="all-4", max_tokens=14))
    results = {"long": Result(), "r": Result()}
    for step in range(60):
        if step == 3:
            engine.add(request("r", tokens, adapter="qv-16", max_tokens=3, prompt_logprobs=2))
        for output in engine.step():
            results[output.request_id].add(output)
        engine.check_integrity()
    assert results["long"].token_ids == oracle.generate(long, 14, "all-4")
    assert results["r"].token_ids == oracle.generate(tokens, 3, "qv-16")
    expected = oracle.logprobs(tokens, "qv-16")
    assert_scored(results["r"].prompt_logprobs, tokens, expected, 2)


@pytest.mark.parametrize("long", [pytest.param(512, marks=INTERPRETED_LONG), 96])
def test_a_long_prefill(
    make_engine: MakeEngine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, long: int
) -> None:
    """Beyond 512 tokens the MLP takes another path, and products add themselves to the residual
    in place: also of a prompt that is not scored. The interpreter has the path from 96 on."""
    monkeypatch.setattr(gpu_decoder, "_LONG", long)
    engine = make_gpu_engine(make_engine, max_step_tokens=long + 88)
    third = long // 3
    chosen = {
        "dora": prompt(50, third + 10),
        "bias": prompt(51, third + 5),
        "all-4": prompt(52, third + 20),
    }
    results = run(
        engine,
        *(
            request(
                name,
                tokens,
                adapter=name,
                max_tokens=1,
                prompt_logprobs=None if name == "bias" else 1,
            )
            for name, tokens in chosen.items()
        ),
    )
    for name, tokens in chosen.items():
        assert results[name].token_ids == oracle.generate(tokens, 1, name)
        if name != "bias":
            assert_scored(results[name].prompt_logprobs, tokens, oracle.logprobs(tokens, name), 1)


FORMATS_SCORED = [None, *FORMATS, *BLENDS]


@pytest.mark.parametrize(
    "family",
    ["llama-biases", pytest.param("qwen2", marks=INTERPRETED_LONG)],
)
def test_every_format_is_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """What replaces rows of the head, or all of it, does so in every block of rows."""
    monkeypatch.setattr(prompt_scores, "_BLOCK_BYTES", 5 * 4 * 257)
    base = save_family(tmp_path / "base", family)
    oracle = FormatOracle(base, tmp_path / "adapters")
    engine = make_engine_of(
        oracle,
        device="cpu" if IS_INTERPRETED else "cuda",
        dtype="float32",
        use_triton=True,
        max_running=32,
        max_step_tokens=90,
    )
    prompts = {
        name: [*prompt(i, 2 + i % 3), *TOKENS[: i % 4 + 1]] for i, name in enumerate(FORMATS_SCORED)
    }
    results = run(
        engine,
        *(
            request(
                str(name),
                tokens,
                adapter=BLENDS.get(name, name) if name else None,
                max_tokens=1,
                prompt_logprobs=1,
            )
            for name, tokens in prompts.items()
        ),
    )
    for name, tokens in prompts.items():
        got = results[str(name)]
        assert got.error is None, (name, got.error)
        assert got.prompt_logprobs is not None
        found = oracle.logprobs(tokens, name)
        for entry, row in zip(got.prompt_logprobs, found, strict=False):
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=2e-3), name
            assert entry.top[0][1] == pytest.approx(float(row.max()), abs=2e-3), name
    engine.close()
