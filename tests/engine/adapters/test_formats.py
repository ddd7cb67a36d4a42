"""Every adapter format over every family's features: in fp32, what PEFT gives.

One table for a CPU, for Triton's interpreter and, under `make test-gpu`, for a card.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import AdapterMismatch
from engine.execution.gpu_runner import GpuRunner
from tests.engine.adapters.formats import (
    BLENDS,
    FORMATS,
    NARROW,
    NARROW_BLENDS,
    TOKENS,
    WIDE,
    WIDE_BLENDS,
    FormatOracle,
    check,
)
from tests.engine.adapters.formats import make_engine as make
from tests.engine.adapters.test_extras import edited
from tests.engine.conftest import prompt, request, run
from tests.engine.model.families import FAMILIES, FUSED, ON_A_GPU, save_family

MakeOracle = Callable[[str], FormatOracle]
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Between them biases, a tied head, windows, norms of q and k; the interpreter is slow.
# The formats name the linears that fused families have as one: `test_families.py` has those.
UNFUSED = [name for name, (model_type, _) in FAMILIES.items() if model_type not in FUSED]
CHOSEN = ["llama-biases", "mistral", "qwen2", "qwen3-biases"]
on_a_card = pytest.mark.gpu if torch.cuda.is_available() else lambda test: test


@pytest.fixture(scope="module")
def make_oracle(tmp_path_factory: pytest.TempPathFactory) -> MakeOracle:
    made: dict[str, FormatOracle] = {}

    def make(name: str) -> FormatOracle:
        if name not in made:
            base = save_family(tmp_path_factory.mktemp("family"), name)
            made[name] = FormatOracle(base, tmp_path_factory.mktemp("adapters"))
        return made[name]

    return make


@pytest.mark.parametrize(
    ("family", "max_step_tokens"),
    [*((family, 512) for family in UNFUSED), *((family, 29) for family in CHOSEN)],
)
def test_formats_on_a_cpu(make_oracle: MakeOracle, family: str, max_step_tokens: int) -> None:
    """In one step, and with prompts cut in chunks."""
    oracle = make_oracle(family)
    engine = make(oracle, max_step_tokens=max_step_tokens)
    check(engine, oracle, [*FORMATS, *BLENDS], lengths=list(range(18, 25)), num_tokens=6)
    engine.close()


BY_GRAPHS, ALL = [*NARROW, *NARROW_BLENDS], [*FORMATS, *BLENDS]
LAUNCHED = [*WIDE, *WIDE_BLENDS]
ON_A_GPU = (
    [
        ("qwen3-biases", LAUNCHED),
        *zip(CHOSEN, (ALL, BY_GRAPHS, BY_GRAPHS, ALL), strict=True),
    ]
    if IS_INTERPRETED
    else [(family, names) for family in UNFUSED if family in ON_A_GPU for names in (BY_GRAPHS, ALL)]
)
#: Graphs and windows; launch by launch, norms and biases. `test_new_tokens_take_graphs` has a tied
#: head; all formats over biases have `test_every_format_is_scored`.
SHORT = [("mistral", BY_GRAPHS), ("qwen3-biases", LAUNCHED)]


def interpreted_long(case: tuple[str, list[str]]) -> list[pytest.MarkDecorator]:
    return [pytest.mark.long] if IS_INTERPRETED and case not in SHORT else []


@on_a_card
@pytest.mark.parametrize(
    ("family", "names"),
    [
        pytest.param(
            family, names, id=f"{family}-{len(names)}", marks=interpreted_long((family, names))
        )
        for family, names in ON_A_GPU
    ],
)
def test_formats_on_a_gpu(make_oracle: MakeOracle, family: str, names: list[str]) -> None:
    """By graphs, and, with what is as wide as the vocabulary, launch by launch."""
    oracle = make_oracle(family)
    engine = make(
        oracle,
        device="cpu" if IS_INTERPRETED else "cuda",
        dtype="float32",
        use_triton=True,
        max_running=32,
        max_step_tokens=160,
    )
    check(engine, oracle, names, lengths=[2, 3, 1] if IS_INTERPRETED else [9, 30, 2], num_tokens=2)
    engine.close()


@on_a_card
def test_new_tokens_take_graphs(make_oracle: MakeOracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is beside them, and what they replaced is the base's again when they have gone."""
    oracle = make_oracle("qwen2")
    engine = make(
        oracle,
        device="cpu" if IS_INTERPRETED else "cuda",
        dtype="float32",
        use_triton=True,
        max_running=4,
        max_step_tokens=32,
    )
    monkeypatch.setattr(GpuRunner, "_gpu_batch", None)  # what goes launch by launch
    for names in (["tokens", "dora"], ["dora"], ["tokens-head", "tokens-apart"], ["biased"]):
        check(engine, oracle, names, lengths=[2], num_tokens=2)
    engine.close()


def test_new_rows_leave_memory_and_come_again(make_oracle: MakeOracle) -> None:
    """The arena holds little more than the largest; without host memory each is read again."""
    oracle = make_oracle("llama")
    engine = make(oracle, arena_bytes=64 * 2048 * 4, max_running=2, host_cache_bytes=0)
    for _ in range(2):
        for name in ("saved", "tokens", "saved-tied", "tokens-apart", "saved-head"):
            tokens = [*prompt(1, 40), *TOKENS]
            for max_tokens in (3, 6):  # again, of the prefix that is cached
                made = request("r", tokens, adapter=name, max_tokens=max_tokens, logprobs=20)
                oracle.check(run(engine, made, check=True)["r"], tokens, name)
    engine.close()


def test_a_tied_and_saved_matrix_takes_its_pages_once(make_oracle: MakeOracle) -> None:
    tied, apart = make_oracle("qwen2"), make_oracle("llama")
    pages = []
    for oracle, name in ((tied, "saved-tied"), (apart, "saved")):
        engine = make(oracle)
        run(engine, request("r", prompt(1, 5), adapter=name, max_tokens=1))
        pages.append(engine.stats().adapter_pages)
        engine.close()
    assert pages[0] < 0.6 * pages[1]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"embed_tokens__weight": lambda t: t / 0}, "embed_tokens.weight"),
        ({"lm_head__weight": lambda t: t * 1.5}, "ensure_weight_tying"),
    ],
    ids=["not finite", "not tied"],
)
def test_bad_rows_are_an_adapters_own_error(
    make_oracle: MakeOracle, tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    oracle = make_oracle("qwen2")
    engine = make(oracle)
    folder = edited(oracle.adapters["saved-tied"], tmp_path / "bad", **change)
    engine.register_adapter("bad", folder)
    error = run(engine, request("r", prompt(0, 5), adapter="bad"))["r"].error
    assert isinstance(error, AdapterMismatch)
    assert error.param is not None and error.param.endswith(named)
    tokens = prompt(0, 5)
    made = request("r", tokens, adapter="saved-tied", max_tokens=3, logprobs=20)
    oracle.check(run(engine, made)["r"], tokens, "saved-tied")
    engine.close()


@on_a_card
def test_many_new_tokens(make_oracle: MakeOracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a kernel's table takes go segment by segment, and come out the same."""
    oracle = make_oracle("llama")
    monkeypatch.setattr("engine.execution.lora_extras.MAX_TABLE_TOKENS", 20)
    engine = make(
        oracle,
        device="cpu" if IS_INTERPRETED else "cuda",
        dtype="float32",
        use_triton=True,
        max_running=4,
        max_step_tokens=32,
    )
    check(engine, oracle, ["tokens-head", "tokens"], lengths=[2], num_tokens=2)
    engine.close()
