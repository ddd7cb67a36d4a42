"""What users hand to a DashEngine: prompts of all kinds, and folders that move or rot."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, ByT5Tokenizer

from engine import (
    AdapterUnavailable,
    DashConfig,
    DashEngine,
    InvalidPrompt,
    RequestError,
    SamplingParams,
)
from tests.engine.conftest import Oracle, prompt

SIZES: dict[str, Any] = {"adapter_vram_pool": "2MB", "kv_pool": "2MB"}


@pytest.fixture(scope="module")
def dash(tiny_model: Path) -> Iterator[DashEngine]:
    with DashEngine(tiny_model, DashConfig(**SIZES)) as engine:
        yield engine


@pytest.mark.parametrize(
    "give",
    [
        tuple,
        np.array,
        torch.tensor,
        lambda ids: [np.int64(i) for i in ids],
        lambda ids: [ids],
        lambda ids: np.array([ids]),
        lambda ids: torch.tensor([ids]),
        lambda ids: [torch.tensor(ids)],
        lambda ids: iter([ids]),
    ],
)
def test_token_ids_may_be_of_any_kind(dash: DashEngine, oracle: Oracle, give: Any) -> None:
    (got,) = dash.generate(give(prompt(0, 20)), max_new_tokens=4)
    assert got.error is None
    assert got.token_ids == oracle.generate(prompt(0, 20), 4)


@pytest.mark.parametrize("bad", [None, 2.5, [1.5], {"role": "user"}, object()], ids=repr)
def test_what_is_no_prompt_is_its_own_completions_error(dash: DashEngine, bad: Any) -> None:
    good, wrong = dash.generate([[1, 2], bad], max_new_tokens=2)
    assert isinstance(wrong.error, InvalidPrompt)
    assert good.error is None and len(good.token_ids) == 2


def test_a_tokenizers_result_is_not_taken_for_prompts(dash: DashEngine, tiny_model: Path) -> None:
    """Its items are the names of its fields, which would be continued as text."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    with pytest.raises(ValueError, match="prompts is a BatchEncoding"):
        dash.generate(tokenizer("ab", return_tensors="pt"))
    with pytest.raises(ValueError, match="prompts is a NoneType"):
        dash.generate(None)  # type: ignore[arg-type]


def test_a_chat_that_its_template_refuses_leaves_the_others_alone(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = (
        "{% for message in messages %}{% if message.role == 'system' %}"
        "{{ raise_exception('no system messages, please') }}{% endif %}"
        "{{ message.content }}{% endfor %}"
    )
    chats = [[{"role": role, "content": "hello"}] for role in ("user", "system")]
    with DashEngine(tiny_model, DashConfig(**SIZES), tokenizer=tokenizer) as engine:
        good, wrong = engine.generate(chats, max_new_tokens=2)
    assert good.error is None
    assert isinstance(wrong.error, InvalidPrompt) and "no system messages" in str(wrong.error)


def test_a_tokenizer_that_is_no_fast_one_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match="the tokenizer is a ByT5Tokenizer, not a fast one"):
        DashEngine(tiny_model, DashConfig(**SIZES), tokenizer=ByT5Tokenizer())


@pytest.mark.parametrize("bad", [5, ["a", "b"], 0.5], ids=repr)
def test_what_names_no_adapter_is_its_own_completions_error(dash: DashEngine, bad: Any) -> None:
    good, wrong = dash.generate([[1, 2]] * 2, [None, bad], max_new_tokens=2)
    assert isinstance(wrong.error, RequestError) and wrong.error.param == "active_adapters"
    assert good.error is None


def test_relative_paths_are_of_where_the_process_was(
    tiny_model: Path,
    adapters: dict[str, Path],
    oracle: Oracle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An adapter for which host memory has no room is read when it is needed, maybe elsewhere."""
    monkeypatch.chdir(adapters["all-4"].parent)
    with DashEngine(tiny_model, DashConfig(**SIZES, host_cache="1KB")) as engine:
        engine.register_adapter("a", "all-4")
        while engine.stats().adapters["a"] == "loading":
            pass
        monkeypatch.chdir(tmp_path)
        (got,) = engine.generate([prompt(0, 8)], "a", max_new_tokens=4)
    assert got.error is None
    assert got.token_ids == oracle.generate(prompt(0, 8), 4, "all-4")


def test_a_relative_offload_dir_is_too(
    tiny_model: Path, adapters: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with DashEngine(tiny_model, DashConfig(**SIZES, offload_dir="cache")) as engine:
        monkeypatch.chdir(tmp_path / "elsewhere")
        engine.register_adapter("a", adapters["all-4"])
        assert engine.generate([[1]], "a", max_new_tokens=1)[0].error is None
    assert os.listdir(tmp_path / "elsewhere") == []


@pytest.mark.parametrize("loss", ["bytes", "file"])
def test_a_damaged_copy_is_copied_again(
    tiny_model: Path, adapters: dict[str, Path], tmp_path: Path, oracle: Oracle, loss: str
) -> None:
    config = DashConfig(**SIZES, offload_dir=tmp_path / "cache")
    with DashEngine(tiny_model, config) as engine:
        engine.register_adapter("a", adapters["all-4"])
        engine.generate([[1]], "a", max_new_tokens=1)
    (copy,) = (tmp_path / "cache").iterdir()
    tensors = copy / "adapter_model.safetensors"
    if loss == "bytes":
        tensors.write_bytes(tensors.read_bytes()[:-4] + b"\1\1\1\1")
    else:
        tensors.unlink()
    with DashEngine(tiny_model, config) as engine:
        engine.register_adapter("a", adapters["all-4"])
        (got,) = engine.generate([prompt(0, 8)], "a", max_new_tokens=4)
    assert got.error is None
    assert got.token_ids == oracle.generate(prompt(0, 8), 4, "all-4")
    assert list((tmp_path / "cache").iterdir()) == [copy]


def test_names_of_one_adapter_may_be_copied_at_once(
    tiny_model: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    names = [f"name-{i}" for i in range(12)]
    with DashEngine(tiny_model, DashConfig(**SIZES, offload_dir=tmp_path)) as engine:
        for name in names:
            engine.register_adapter(name, adapters["all-4"])
        got = engine.generate([[1]] * len(names), names, max_new_tokens=1)
    assert [completion.error for completion in got] == [None] * len(names)
    assert len(list(tmp_path.iterdir())) == 1


def test_the_file_that_is_missing_is_named(dash: DashEngine, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    dash.register_adapter("half", tmp_path)
    (got,) = dash.generate([[1]], "half", max_new_tokens=1)
    dash.unregister_adapter("half")
    assert isinstance(got.error, AdapterUnavailable)
    assert str(tmp_path / "adapter_model.safetensors") in str(got.error)


@pytest.mark.parametrize("is_offloaded", [False, True])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_file_is_not_read(
    tiny_model: Path, adapters: dict[str, Path], tmp_path: Path, kind: str, is_offloaded: bool
) -> None:
    """Nobody writes to the pipe and the device has no end: either would keep a thread for ever."""
    source = shutil.copytree(adapters["all-4"], tmp_path / "source")
    tensors = source / "adapter_model.safetensors"
    tensors.unlink()
    if kind == "pipe":
        os.mkfifo(tensors)
    elif kind == "device":
        tensors.symlink_to("/dev/zero")
    else:
        tensors.mkdir()
    offload_dir = tmp_path / "cache" if is_offloaded else None
    with DashEngine(tiny_model, DashConfig(**SIZES, offload_dir=offload_dir)) as engine:
        engine.register_adapter("odd", source)
        (got,) = engine.generate([[1]], "odd", max_new_tokens=1)
    assert isinstance(got.error, AdapterUnavailable)
    assert f"{str(tensors)!r} cannot be read: not a file" in str(got.error)


def test_a_continuation_that_a_stop_string_ends_is_computed_no_further(dash: DashEngine) -> None:
    sampling = SamplingParams(temperature=2.0, seed=3, logit_bias={256: -100})  # no end
    call: dict[str, Any] = {"n": 2, "sampling": sampling, "max_new_tokens": 100}
    (first,) = dash.generate([[1, 2]], **call)
    (other,) = first.alternatives
    stop = next(c for c in first.text[:20] if c.isprintable() and c not in other.text)
    before = dash.stats().num_generated
    (ended,) = dash.generate([[1, 2]], stop=stop, **call)
    assert ended.finish_reason == "stop" and first.text.startswith(ended.text)
    assert ended.alternatives[0].token_ids == other.token_ids
    computed = dash.stats().num_generated - before
    assert computed < len(other.token_ids) + 60, "the first went on to its last token"
