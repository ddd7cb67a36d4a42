"""The offline API: names, strings, stop strings, blends, and errors that stay with their prompt."""

from __future__ import annotations

import gc
import json
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from engine import (
    AdapterDamaged,
    AdapterMismatch,
    AdapterUnavailable,
    BadGrammar,
    ContextTooLong,
    DashConfig,
    DashEngine,
    Engine,
    FinishReason,
    InvalidPrompt,
    RequestError,
    SamplingParams,
    UnknownAdapter,
)
from engine.dash.config import parse_bytes, throughput_limits
from engine.dash.run import Completion
from tests.engine.conftest import Oracle, edit_config, prompt, request

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


def test_a_stop_string_may_have_more_tokens_than_characters(dash: DashEngine) -> None:
    said = "é" * 20  # two tokens each
    schema = json.dumps({"const": f"{said}, and more"}, ensure_ascii=False)
    (cut,) = dash.generate("hello", max_new_tokens=80, stop=said, json_schema=schema)
    assert (cut.text, cut.finish_reason, cut.error) == ('"', FinishReason.STOP, None)


def test_a_path_that_is_none_is_unavailable(dash: DashEngine) -> None:
    dash.register_adapter("nowhere", "a\0b")
    (got,) = dash.generate("hello", "nowhere")
    assert isinstance(got.error, AdapterUnavailable)


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


def test_prompts_are_scored(dash: DashEngine, adapters: dict[str, Path], oracle: Oracle) -> None:
    dash.register_adapter("a", adapters["qv-16"])
    tokens = prompt(1, 30)
    sampling = SamplingParams(prompt_logprobs=2)
    (got,) = dash.generate([tokens], "a", max_new_tokens=0, sampling=sampling)
    assert got.prompt_logprobs is not None and got.token_ids == []
    expected = oracle.logprobs(tokens, "qv-16")
    for entry, row in zip(got.prompt_logprobs, expected, strict=False):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)


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


def settle(dash: DashEngine) -> dict[str, str]:
    """The adapters' states once nothing is loading."""
    end = time.monotonic() + 20
    while "loading" in (states := dash.stats().adapters).values():
        assert time.monotonic() < end, states
        time.sleep(0.01)
    return dict(states)


def test_a_source_that_changes_behind_its_name_is_refused(
    tiny_model: Path, adapters: dict[str, Path], tmp_path: Path, oracle: Oracle
) -> None:
    """Registered as one adapter and another when it is read; naming it again makes it the other."""
    source = shutil.copytree(adapters["all-4"], tmp_path / "source")
    config = DashConfig(adapter_vram_pool="2MB", kv_pool="2MB", host_cache="1KB")
    with DashEngine(tiny_model, config) as dash:
        dash.register_adapter("a", source)
        assert settle(dash) == {"a": "on disk"}  # nothing has been read but the header
        for file in adapters["ko-1"].iterdir():
            shutil.copyfile(file, source / file.name)
        (got,) = dash.generate([prompt(0, 8)], "a", max_new_tokens=6)
        assert isinstance(got.error, AdapterDamaged) and got.token_ids == []
        dash.register_adapter("a", source)
        (again,) = dash.generate([prompt(0, 8)], "a", max_new_tokens=6)
        assert _agrees(again, oracle.generate(prompt(0, 8), 6, "ko-1"))


def test_what_is_registered_is_read_before_it_is_used(
    dash: DashEngine, adapters: dict[str, Path], tmp_path: Path, oracle: Oracle
) -> None:
    source = shutil.copytree(adapters["all-4"], tmp_path / "source")
    dash.register_adapter("a", source)
    assert settle(dash) == {"a": "ready"}
    assert dash.stats().adapter_bytes == 0  # in host memory, and nowhere else
    shutil.rmtree(source)
    (got,) = dash.generate([prompt(0, 8)], "a", max_new_tokens=6)
    assert _agrees(got, oracle.generate(prompt(0, 8), 6, "all-4"))
    assert settle(dash) == {"a": "resident"}


def test_a_bad_file_is_told_before_anybody_uses_it(
    dash: DashEngine, adapters: dict[str, Path], tmp_path: Path
) -> None:
    """What only reading the values shows; a mended file is read when it is needed."""
    bad = shutil.copytree(adapters["all-4"], tmp_path / "bad")
    tensors = load_file(bad / "adapter_model.safetensors")
    name = min(tensors)
    tensors[name][0, 0] = float("nan")
    save_file(tensors, bad / "adapter_model.safetensors")
    dash.register_adapter("bad", bad)
    dash.register_adapter("good", adapters["qv-16"])
    states = settle(dash)
    assert states["good"] == "ready"
    assert states["bad"].startswith("failed: ") and f"{name} has values" in states["bad"]
    time.sleep(0.6)  # longer than the engine rests after a failure
    assert settle(dash) == states
    good, first, again = dash.generate([[1]] * 3, ["good", "bad", "bad"], max_new_tokens=2)
    assert good.error is None
    for got in (first, again):
        assert isinstance(got.error, AdapterMismatch) and name in str(got.error)
    assert settle(dash) == {"bad": states["bad"], "good": "resident"}


def test_of_more_adapters_than_host_memory_holds_the_first_are_read(
    tiny_model: Path, adapters: dict[str, Path], oracle: Oracle
) -> None:
    config = DashConfig(adapter_vram_pool="2MB", kv_pool="2MB", host_cache="80KB")
    names = ["all-4", "qv-16", "mlp-rs", "patterns", "ko-1", "layer-1"]
    with DashEngine(tiny_model, config) as dash:
        for name in names:
            dash.register_adapter(name, adapters[name])
        states = settle(dash)
        assert set(states.values()) == {"ready", "on disk"}
        for name in names:
            (got,) = dash.generate([prompt(1, 6)], name, max_new_tokens=6)
            assert _agrees(got, oracle.generate(prompt(1, 6), 6, name))
        dash._loop.call(lambda engine: engine.check_integrity()).result()
        assert set(settle(dash).values()) == {"resident"}


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


def _agrees(completion: Completion, wanted: list[int]) -> bool:
    """Whether these are the oracle's tokens, up to an end that it disregards."""
    token_ids = completion.token_ids
    is_whole = len(token_ids) == len(wanted) or completion.finish_reason == FinishReason.STOP
    return is_whole and token_ids == wanted[: len(token_ids)]


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ({"prompts": [[1] * 512]}, ContextTooLong, "the context is 512 tokens"),
        ({"prompts": [[1, 999]]}, InvalidPrompt, "999 at index 1 (its ids are 1 to 999)"),
        ({"prompts": [[999]]}, InvalidPrompt, "the prompt has 999 at index 0"),
        ({"active_adapters": "nobody"}, UnknownAdapter, "no adapter is named 'nobody'"),
        ({"active_adapters": {"a": float("nan")}}, RequestError, "weight of 'a' is nan"),
        ({"active_adapters": {"a": "much"}}, RequestError, "weight of 'a' is 'much'"),
        ({"active_adapters": {"a": 1.0, "b": 1.0}}, UnknownAdapter, "named 'b'"),
        ({"max_new_tokens": -1}, RequestError, "max_tokens"),
        ({"sampling": SamplingParams(temperature=-1)}, RequestError, "temperature"),
        ({"json_schema": "{"}, BadGrammar, "not JSON"),
        ({"n": 65}, RequestError, "n must be a whole number from 1 to 64"),
    ],
)
def test_each_mistake_has_its_own_error(
    dash: DashEngine,
    adapters: dict[str, Path],
    bad: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    dash.register_adapter("a", adapters["all-4"])
    (completion,) = dash.generate(**{"prompts": [[1]], "max_new_tokens": 2, **bad})
    assert type(completion.error) is error and message in str(completion.error)
    assert completion.finish_reason == FinishReason.ERROR
    assert all(isinstance(other.error, error) for other in completion.alternatives)
    assert dash.generate([1], "a", max_new_tokens=2)[0].error is None


def test_adapters_that_do_not_fit_say_so(
    dash: DashEngine, adapters: dict[str, Path], tmp_path: Path
) -> None:
    for name, changes in (("dora", {"lora_dropout": "x"}), ("rank", {"r": 3})):
        edit_config(adapters["all-4"], tmp_path / name, **changes)
        dash.register_adapter(name, tmp_path / name)
    endless = shutil.copytree(adapters["all-4"], tmp_path / "endless")
    tensors = load_file(endless / "adapter_model.safetensors")
    tensors[min(tensors)][0, 0] = float("inf")
    save_file(tensors, endless / "adapter_model.safetensors")
    dash.register_adapter("endless", endless)
    dash.register_adapter("good", adapters["all-4"])
    *bad, good = dash.generate([[1]] * 3, ["rank", "endless", "good"], max_new_tokens=2)
    assert [type(completion.error) for completion in bad] == [AdapterMismatch] * 2
    assert "not finite" in str(bad[1].error)
    assert good.error is None
    assert dash.stats().adapters["rank"].startswith("failed: ")
    assert dash.stats().adapters["endless"].startswith("failed: ")
    assert "rank failed: " in str(dash.stats())


def test_a_replaced_name_means_the_new_adapter_and_the_old_one_finishes(
    dash: DashEngine, adapters: dict[str, Path], oracle: Oracle
) -> None:
    tokens = prompt(3, 8)
    dash.register_adapter("a", adapters["all-4"])
    under_way = dash.stream([tokens], "a", max_new_tokens=20)
    dash.register_adapter("a", adapters["qv-16"])
    (new,) = dash.generate([tokens], "a", max_new_tokens=GREEDY_TOKENS)
    old = list(under_way)[-1].completion
    assert _agrees(old, oracle.generate(tokens, 20, "all-4"))
    assert _agrees(new, oracle.generate(tokens, GREEDY_TOKENS, "qv-16"))
    dash.unregister_adapter("a")
    assert dash.stats().num_adapters == 0
    assert dash._loop.call(lambda engine: engine.stats().num_adapters).result() == 0


def test_two_names_of_one_adapter_blend_as_one(
    dash: DashEngine, adapters: dict[str, Path], oracle: Oracle
) -> None:
    for name in "ab":
        dash.register_adapter(name, adapters["all-4"])
    (blended,) = dash.generate([prompt(5, 8)], {"a": 0.25, "b": 0.75}, max_new_tokens=8)
    assert _agrees(blended, oracle.generate(prompt(5, 8), 8, "all-4"))


def test_more_adapters_than_the_pool_holds(
    tiny_model: Path, adapters: dict[str, Path], oracle: Oracle
) -> None:
    config = DashConfig(adapter_vram_pool="100KB", kv_pool="60KB", host_cache="100KB")
    with DashEngine(tiny_model, config) as engine:
        names = ["all-4", "qv-16", "mlp-rs", "patterns", "ko-1", "layer-1"] * 3
        for name in names[:6]:
            engine.register_adapter(name, adapters[name])
        prompts = [prompt(i, 6) for i in range(len(names))]
        for tokens, name, got in zip(
            prompts, names, engine.generate(prompts, names, max_new_tokens=6), strict=True
        ):
            assert _agrees(got, oracle.generate(tokens, 6, name)), (name, got)
        assert engine.stats().adapter_bytes <= 100_000
        states = set(engine.stats().adapters.values())
        assert "resident" in states and states & {"ready", "on disk"}
        assert states <= {"resident", "ready", "on disk", "loading"}


def test_streams_spell_what_generate_spells(dash: DashEngine) -> None:
    prompts = ["one", "two", "three"]
    whole = dash.generate(prompts, max_new_tokens=30)
    texts = ["", "", ""]
    ended = []
    for piece in dash.stream(prompts, max_new_tokens=30):
        texts[piece.index] += piece.text
        if piece.finish_reason is not None:
            ended.append(piece.index)
    assert texts == [completion.text for completion in whole]
    assert sorted(ended) == [0, 1, 2]


def test_streams_end_before_stop_strings(dash: DashEngine) -> None:
    (whole,) = dash.generate("hello there", max_new_tokens=30)
    stop = whole.text[6:9]
    pieces = list(dash.stream("hello there", max_new_tokens=30, stop=stop))
    assert "".join(map(str, pieces)) == whole.text[: whole.text.index(stop)]
    assert pieces[-1].finish_reason == FinishReason.STOP


def test_a_closed_stream_cancels_its_request(dash: DashEngine) -> None:
    stream = dash.stream([[1, 2], [3, 4]], max_new_tokens=400)
    next(stream)
    assert dash.stats().running > 0
    stream.close()
    stats = dash.stats()
    assert (stats.running, stats.waiting, stats.kv_bytes) == (0, 0, 0)
    assert stats.num_generated < 800


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """A shell that starts tests in the background has them ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_cancels_the_requests_and_leaves_the_engine_sound(
    dash: DashEngine, ctrl_c: None
) -> None:
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)

    def interrupt() -> None:
        while not dash.stats().running:
            time.sleep(0.01)
        signal.raise_signal(signal.SIGINT)

    with ThreadPoolExecutor(1) as threads, pytest.raises(KeyboardInterrupt):
        threads.submit(interrupt)
        dash.generate([[i] for i in range(40)], max_new_tokens=400, sampling=sampling)
    stats = dash.stats()
    assert (stats.running, stats.waiting, stats.kv_bytes) == (0, 0, 0)
    dash._loop.call(lambda engine: engine.check_integrity()).result()
    assert len(dash.generate([1], max_new_tokens=3, sampling=sampling)[0].token_ids) == 3


def test_threads_share_one_batch(
    dash: DashEngine, adapters: dict[str, Path], oracle: Oracle
) -> None:
    dash.register_adapter("a", adapters["all-4"])

    def ask(i: int) -> Completion:
        return dash.generate([prompt(i, 6)], "a" if i % 2 else None, max_new_tokens=10)[0]

    with ThreadPoolExecutor(8) as threads:
        completions = list(threads.map(ask, range(8)))
    for i, completion in enumerate(completions):
        assert _agrees(completion, oracle.generate(prompt(i, 6), 10, "all-4" if i % 2 else None))


def test_a_slow_adapter_holds_up_nobody_else(
    dash: DashEngine,
    adapters: dict[str, Path],
    oracle: Oracle,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from engine.dash import adapters as dash_adapters

    go_on, read = threading.Event(), dash_adapters._digest

    def read_slowly(folder: Path) -> str:
        assert go_on.wait(30)
        return read(folder)

    monkeypatch.setattr(dash_adapters, "_digest", read_slowly)
    dash.register_adapter("slow", adapters["all-4"])
    assert dash.stats().adapters == {"slow": "loading"}
    stream = dash.stream([prompt(1, 6), [3, 4]], ["slow", None], max_new_tokens=4)
    pieces = [next(stream)]
    while pieces[-1].finish_reason is None:
        pieces.append(next(stream))
    assert {piece.index for piece in pieces} == {1}
    go_on.set()
    last = list(stream)[-1]
    assert last.index == 0
    assert _agrees(last.completion, oracle.generate(prompt(1, 6), 4, "all-4"))


def test_closing_ends_what_is_under_way(tiny_model: Path) -> None:
    engine = DashEngine(tiny_model, DashConfig(adapter_vram_pool="2MB", kv_pool="2MB"))
    stream = engine.stream([1, 2], max_new_tokens=500)
    next(stream)
    engine.close()
    with pytest.raises(RuntimeError, match="the engine is closed"):
        list(stream)
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.generate([1])
    engine.close()


def test_closing_while_adapters_load(tiny_model: Path, adapters: dict[str, Path]) -> None:
    with DashEngine(tiny_model, DashConfig(adapter_vram_pool="2MB", kv_pool="2MB")) as engine:
        for i in range(50):
            engine.register_adapter(f"a{i}", adapters["all-4"])
        threads = [engine._loop._thread, *engine._names._threads._threads]
    assert not any(thread.is_alive() for thread in threads)


def test_an_engine_that_nobody_holds_ends(tiny_model: Path) -> None:
    engine = DashEngine(tiny_model, DashConfig(adapter_vram_pool="2MB", kv_pool="2MB"))
    thread = engine._loop._thread
    del engine
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_an_engine_that_fails_says_why(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ArithmeticError("lost")

    with DashEngine(tiny_model, DashConfig(adapter_vram_pool="2MB", kv_pool="2MB")) as engine:
        runner = engine._loop.call(lambda inner: inner._runner).result()
        monkeypatch.setattr(runner, "run", fail)
        with pytest.raises(RuntimeError, match="the engine failed: ArithmeticError: lost"):
            engine.generate([1])
        with pytest.raises(RuntimeError, match="the engine failed"):
            engine.stats()


def test_continuations_of_one_prompt(dash: DashEngine) -> None:
    sampling = SamplingParams(temperature=1.0, seed=7, logprobs=0)
    (first,) = dash.generate([1, 2], n=3, sampling=sampling, max_new_tokens=8)
    every = [first, *first.alternatives]
    assert len({tuple(each.token_ids) for each in every}) == 3
    for i, each in enumerate(every):
        alone = SamplingParams(temperature=1.0, seed=7 + i)
        (wanted,) = dash.generate([1, 2], sampling=alone, max_new_tokens=8)
        assert each.token_ids == wanted.token_ids
        assert [p.token_id for p in each.logprobs or []] == each.token_ids
    with pytest.raises(ValueError, match="n is 0"):
        dash.generate([1], n=0)


def test_chats_are_put_in_the_models_template(dash: DashEngine) -> None:
    chat = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    one, many = dash.generate(chat, max_new_tokens=6), dash.generate([chat], max_new_tokens=6)
    (wanted,) = dash.generate("abcd", max_new_tokens=6)
    assert [one[0].text, many[0].text] == [wanted.text] * 2


def test_the_progress_bar_counts(dash: DashEngine, capsys: pytest.CaptureFixture[str]) -> None:
    dash.generate([[1], [2], [3]], max_new_tokens=4, progress=True)
    shown = capsys.readouterr().err
    assert "3/3" in shown and "tokens/s" in shown
    dash.generate([[1]], max_new_tokens=4)
    assert capsys.readouterr().err == ""  # not a terminal


def test_completions_and_statistics_say_what_they_are(
    dash: DashEngine, adapters: dict[str, Path]
) -> None:
    dash.register_adapter("a", adapters["all-4"])
    (completion,) = dash.generate("hello", "a", max_new_tokens=3)
    assert repr(completion) == f"Completion({completion.text!r}, 3 tokens, length)"
    stats = dash.stats()
    assert stats.adapters == {"a": "resident"}
    assert stats.num_generated == 3 and stats.adapter_bytes > 0
    assert str(stats).startswith("1 adapters: 1 resident\nrequests: 0 running, 0 waiting")
    assert "cpu, float32, 1 adapters" in repr(dash)


@pytest.mark.parametrize(
    "bad",
    [
        {"max_concurrent_adapters": 0},
        {"max_running": True},
        {"max_step_tokens": 0},
        {"max_context": -1},
        {"num_threads": 1.5},
        {"adapter_vram_pool": "lots"},
        {"kv_pool": 0},
        {"host_cache": None},
        {"device": "tpu"},
        {"dtype": "int4"},
    ],
)
def test_config_fields_are_checked_by_name(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(bad))} is "):
        DashConfig(**bad)


@pytest.mark.parametrize(
    ("card_bytes", "wanted"),
    [
        (None, (64, 512)),
        (141 << 30, (512, 16384)),
        (80 << 30, (256, 8192)),
        (24 << 30, (64, 2048)),
        (1 << 20, (16, 16)),
    ],
)
def test_a_device_decides_how_much_runs_at_a_time(
    card_bytes: int | None, wanted: tuple[int, int]
) -> None:
    assert throughput_limits(card_bytes) == wanted


def test_the_tokens_of_a_step_are_the_users_to_choose(tiny_model: Path) -> None:
    with DashEngine(tiny_model, DashConfig(max_step_tokens=16, max_running=3)) as dash:
        dash.generate([prompt(1, 40)], max_new_tokens=1)
        stats = dash.stats()
    assert (stats.max_step_tokens, stats.max_running) == (16, 3)
    assert stats.num_steps == 3  # 16, 16 and 8 tokens


def test_each_prompt_has_its_own_length(dash: DashEngine) -> None:
    short, long = dash.generate([prompt(1, 5), prompt(2, 5)], max_new_tokens=[1, 4])
    assert (len(short.token_ids), len(long.token_ids)) == (1, 4)
    with pytest.raises(ValueError, match="1 max_new_tokens for 2 prompts"):
        dash.generate([prompt(1, 5), prompt(2, 5)], max_new_tokens=[1])


def test_the_first_of_many_requests_runs_while_the_others_are_added(dash: DashEngine) -> None:
    """Adding is the host's work; the device is not to wait for the last of them."""
    seen: list[int] = []

    def add_slowly(engine: Engine) -> None:
        time.sleep(0.01)
        seen.append(engine.stats().num_generated)

    first: SimpleQueue[Any] = SimpleQueue()
    own = request("first", prompt(1, 4), max_tokens=2)
    gate = threading.Event()
    dash._loop.call(lambda engine: gate.wait())  # all of it is asked for before the engine steps
    dash._loop.add("first", 1, lambda engine: engine.add(own), first)
    others = [dash._loop.call(add_slowly) for _ in range(30)]
    gate.set()
    others[-1].result()
    assert seen[0] == 0 and seen[-1] > 0


@pytest.mark.parametrize("name", ["", None, 3])
def test_names_are_strings(dash: DashEngine, name: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="name must be a string"):
        dash.register_adapter(name, tmp_path)
