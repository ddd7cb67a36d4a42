"""The offline API: names, strings, stop strings, blends, and errors that stay with their prompt."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import AdapterUnavailable, DashConfig, DashEngine, FinishReason, UnknownAdapter
from engine.dash_config import parse_bytes
from tests.engine.conftest import Oracle, prompt

GREEDY_TOKENS = 12


@pytest.fixture
def dash(tiny_model: Path) -> Iterator[DashEngine]:
    config = DashConfig(adapter_vram_pool="2MB", kv_pool="2MB", max_concurrent_adapters=4)
    with DashEngine(tiny_model, config) as engine:
        yield engine


def test_each_prompt_has_its_own_adapters(
    dash: DashEngine, adapters: dict[str, Path], oracle: Oracle
) -> None:
    dash.register_adapter("mine", adapters["all-4"])
    dash.register_adapter("yours", adapters["qv-16"])
    oracle.blend("dash", {"all-4": 0.3, "qv-16": 0.7})
    prompts = [prompt(i, 8) for i in range(4)]
    got = dash.generate(
        prompts,
        ["mine", {"mine": 0.3, "yours": 0.7}, None, "yours"],
        max_new_tokens=GREEDY_TOKENS,
    )
    for tokens, name, completion in zip(
        prompts, ["all-4", "dash", None, "qv-16"], got, strict=True
    ):
        wanted = oracle.generate(tokens, GREEDY_TOKENS, name)
        assert completion.token_ids == wanted[: len(completion.token_ids)]
        assert len(completion.token_ids) == GREEDY_TOKENS or completion.finish_reason == "stop"


def test_strings_and_stop_strings(dash: DashEngine) -> None:
    (whole,) = dash.generate("hello there", max_new_tokens=30)
    assert str(whole) == whole.text == dash.tokenizer.decode(whole.token_ids)
    stop = whole.text[4:6]
    (cut,) = dash.generate("hello there", max_new_tokens=30, stop=[stop, "never said"])
    assert cut.finish_reason == FinishReason.STOP
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert len(cut.token_ids) < len(whole.token_ids)


def test_a_single_list_of_token_ids_is_one_prompt(dash: DashEngine) -> None:
    assert len(dash.generate([1, 2, 3], max_new_tokens=2)) == 1
    assert len(dash.generate([[1, 2, 3], [4]], max_new_tokens=2)) == 2
    assert dash.generate([], max_new_tokens=2) == []


def test_what_is_wrong_stays_with_its_prompt(
    dash: DashEngine, adapters: dict[str, Path], tmp_path: Path
) -> None:
    dash.register_adapter("gone", tmp_path / "nothing")
    unknown, gone, empty, good = dash.generate(
        [[1], [1], [], [1]], ["who", "gone", None, None], max_new_tokens=3
    )
    assert isinstance(unknown.error, UnknownAdapter)
    assert isinstance(gone.error, AdapterUnavailable)
    assert empty.finish_reason == FinishReason.ERROR
    assert good.error is None and good.token_ids


def test_unregistered_names_are_unknown(dash: DashEngine, adapters: dict[str, Path]) -> None:
    dash.register_adapter("a", adapters["all-4"])
    dash.register_adapter("b", adapters["all-4"])
    first = dash.generate([[5, 6]], "a", max_new_tokens=4)[0]
    dash.unregister_adapter("a")
    assert isinstance(dash.generate([[5, 6]], "a")[0].error, UnknownAdapter)
    assert dash.generate([[5, 6]], "b", max_new_tokens=4)[0].token_ids == first.token_ids
    dash.unregister_adapter("b")
    assert dash.stats().num_adapters == 0
    with pytest.raises(UnknownAdapter):
        dash.unregister_adapter("b")


def test_offloaded_adapters_outlive_their_source(
    tiny_model: Path, adapters: dict[str, Path], tmp_path: Path, oracle: Oracle
) -> None:
    source = shutil.copytree(adapters["all-4"], tmp_path / "source")
    config = DashConfig(adapter_vram_pool="2MB", kv_pool="2MB", offload_dir=tmp_path / "cache")
    with DashEngine(tiny_model, config) as engine:
        engine.register_adapter("a", source)
        first = engine.generate([prompt(0, 8)], "a", max_new_tokens=6)[0]
        shutil.rmtree(source)
        again = engine.generate([prompt(0, 8)], "a", max_new_tokens=6)[0]
    wanted = oracle.generate(prompt(0, 8), 6, "all-4")
    assert first.token_ids == again.token_ids == wanted[: len(first.token_ids)]


def test_adapters_that_do_not_match_the_prompts_are_refused(dash: DashEngine) -> None:
    with pytest.raises(ValueError, match="2 active_adapters for 1 prompts"):
        dash.generate(["x"], [None, None])


@pytest.mark.parametrize(
    ("size", "wanted"), [("2GB", 2 * 10**9), ("1.5 KiB", 1536), ("10", 10), (7, 7)]
)
def test_sizes(size: str | int, wanted: int) -> None:
    assert parse_bytes(size) == wanted


@pytest.mark.parametrize("size", ["", "GB", "2XB", "-1GB", "2 G B"])
def test_bad_sizes(size: str) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_bytes(size)
