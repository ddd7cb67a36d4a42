"""What is accepted of PEFT, and that everything else is refused by its name."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from contract.adapters.peft_config import MAX_PATTERNS
from contract.adapters.peft_fields import HONOURED, NEUTRAL, REFUSED
from engine import AdapterMismatch, AdapterUnavailable
from engine.adapters.config import check_config, parse_config
from engine.adapters.plan import parse_header, plan_adapter
from engine.adapters.tiles import fill_tiles, place_tiles
from engine.model.config import ModelConfig
from engine.model.plan import Plan
from engine.model.rope import Rotation
from kernels import NUM_PROJECTIONS, PageLayout
from kernels.fp8 import FP8
from tests.engine.conftest import MakeEngine, edit_config, prompt, request, run

peft = pytest.importorskip("peft")  # GPU machines have none

MODEL = ModelConfig(
    vocab_size=100,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=64,
    plan=Plan(eps=1e-5, rotations=(Rotation(theta=10_000.0),) * 2),
    tie_embeddings=False,
    eos_token_ids=(),
)
NO_BASE: Any = None  # plain LoRA does not ask for the base's weights
LAYOUT = PageLayout(num_layers=2, num_kv_heads=2, head_dim=16)
PLAIN: dict[str, Any] = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8}
PREFIX = "base_model.model.model.layers"


def shapes(rank: int = 4, names: tuple[str, ...] = ("0.self_attn.q_proj",)) -> dict[str, Any]:
    widths = {"q": (64, 64), "k": (64, 32), "v": (64, 32), "o": (64, 64), "d": (96, 64)}
    header: dict[str, Any] = {}
    for name in names:
        in_width, out_width = widths.get(name.split(".")[-1][0], (64, 96))
        header[f"{PREFIX}.{name}.lora_A.weight"] = (rank, in_width)
        header[f"{PREFIX}.{name}.lora_B.weight"] = (out_width, rank)
    return header


def test_the_default_config_of_peft_is_accepted() -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM").to_dict()
    config["target_modules"] = ["q_proj"]
    check_config(config)


# A value that switches each of PEFT's inference-changing fields on.
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", "yes"),
        ("lora_bias", 1),
        ("ensure_weight_tying", "yes"),
        ("target_modules", {"q_proj": 1}),
        ("exclude_modules", "q_(.*"),
        ("exclude_modules", [1]),
        ("exclude_modules", {"q_proj": 1}),
        ("target_modules", "(q)_proj\\1"),
        ("target_modules", [["q_proj"]]),
        ("layers_to_transform", ["0"]),
        ("layers_pattern", "blocks"),
        ("bias", "some"),
        ("layer_replication", [[0, 1]]),
        ("alora_invocation_tokens", [1]),
        ("target_parameters", "experts.down_proj"),
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("arrow_config", {"top_k": 3}),
        ("kasa_config", {"beta": 1}),
        ("monteclora_config", {"num_samples": 8}),
        ("velora_config", {"x": 1}),
        ("megatron_config", {"x": 1}),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", ["gaussian"]),
        ("some_field_of_tomorrow", 1),
        ("peft_type", "IA3"),
        ("task_type", "SEQ_CLS"),
        ("r", 0),
        ("r", 257),
        ("r", True),
        ("r", "8"),
        ("lora_alpha", float("nan")),
        ("lora_alpha", None),
        ("use_rslora", "yes"),
        ("rank_pattern", ["q_proj"]),
        ("rank_pattern", {"(a)\\1": 4}),
        ("rank_pattern", {"(?i:Q_proj)": 4}),
        ("rank_pattern", {"q_proj(": 4}),
        ("rank_pattern", {"q_proj": 257}),
        ("rank_pattern", {"q_proj": True}),
        ("alpha_pattern", {"x" * 257: 4}),
        ("alpha_pattern", {"q_proj": "big"}),
    ],
    ids=str,
)
def test_a_field_that_cannot_be_honoured_is_named(field: str, value: Any) -> None:
    with pytest.raises(AdapterMismatch) as raised:
        check_config({**PLAIN, field: value})
    assert raised.value.param == field
    assert field in raised.value.message


@pytest.mark.parametrize("alpha", [10**400, 1e39, -1e308, float("nan"), "8", True])
def test_an_alpha_that_fp32_cannot_hold_is_refused(alpha: Any) -> None:
    with pytest.raises(AdapterMismatch) as raised:
        check_config({**PLAIN, "lora_alpha": alpha})
    assert raised.value.param == "lora_alpha"
    with pytest.raises(AdapterMismatch) as raised:
        check_config({**PLAIN, "alpha_pattern": {"q_proj": alpha}})
    assert raised.value.param == "alpha_pattern"


def test_as_many_patterns_as_are_allowed_take_a_moment() -> None:
    """Thousands of patterns times hundreds of modules once took a step loop minutes."""
    model = dataclasses.replace(MODEL, num_layers=80)
    names = tuple(f"{layer}.self_attn.{name}_proj" for layer in range(80) for name in "qkvo")
    patterns = {f"layers.{i}.self_attn.q_proj_of_no_model": 1 for i in range(MAX_PATTERNS - 1)}
    config = {**PLAIN, "alpha_pattern": {**patterns, "q_proj": 2}, "rank_pattern": patterns}
    began = time.process_time()
    plan = plan_adapter(config, shapes(names=names), model)
    assert time.process_time() - began < 10
    assert {target.scaling for target in plan.targets if target.projection == 0} == {0.5}
    with pytest.raises(AdapterMismatch) as raised:
        check_config({**config, "alpha_pattern": {**patterns, "one": 1, "two more": 1}})
    assert raised.value.param == "alpha_pattern"


@pytest.mark.parametrize("fields", [{"use_dora": True}, {"init_lora_weights": "gaussian"}], ids=str)
def test_what_peft_refuses_beside_biases_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="lora_bias"):
        peft.LoraConfig(lora_bias=True, **fields)
    with pytest.raises(AdapterMismatch) as raised:
        check_config({**PLAIN, "lora_bias": True, **fields})
    assert raised.value.param == "lora_bias"


def test_every_field_of_peft_is_decided() -> None:
    """A PEFT that adds a field must not slip through unread, on by default or not."""
    config = peft.LoraConfig(task_type="CAUSAL_LM").to_dict()
    for field in config:
        check_config({**PLAIN, field: config[field]} if field not in PLAIN else PLAIN)
    known = HONOURED | NEUTRAL | REFUSED.keys()
    assert {field.name for field in dataclasses.fields(peft.LoraConfig)} <= known


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({f"{PREFIX}.0.self_attn.q_proj.lora_A.weight": (4, 63)}, "lora_A"),
        ({f"{PREFIX}.0.self_attn.q_proj.lora_B.weight": (64, 5)}, "lora_B"),
        ({f"{PREFIX}.0.self_attn.z_proj.lora_A.weight": (4, 64)}, "z_proj"),
        ({f"{PREFIX}.0.mlp.q_proj.lora_A.weight": (4, 64)}, "mlp.q_proj"),
        ({f"{PREFIX}.2.self_attn.q_proj.lora_A.weight": (4, 64)}, "layer 2"),
        ({f"{PREFIX}.1.self_attn.k_proj.lora_A.weight": (4, 64)}, "counterpart"),
        ({f"{PREFIX}.0.self_attn.q_proj.lora_magnitude_vector": (64,)}, "magnitude"),
        ({"base_model.model.lm_head.weight": (101, 64)}, "lm_head"),
        ({"base_model.model.lm_head.lora_A.weight": (4, 64)}, "counterpart"),
        ({"base_model.model.model.embed_tokens.lora_A.weight": (4, 64)}, "embed_tokens"),
        ({"base_model.model.lm_head.lora_embedding_A": (4, 64)}, "lm_head"),
        ({f"{PREFIX}.0.self_attn.q_proj.lora_B.bias": (64,)}, "bias"),
        ({f"{PREFIX}.0.self_attn.q_proj.lora_A.bias": (64,)}, "lora_A.bias"),
        ({f"{PREFIX}.0.self_attn.q_proj.base_layer.weight": (64, 64)}, "base_layer"),
        ({f"{PREFIX}.0.self_attn.q_proj.weight": (64, 64)}, "q_proj"),
        ({f"{PREFIX}.0.self_attn.q_proj.lora_A.default.weight": (4, 64)}, "repeats"),
        ({"model.layers.0.self_attn.q_proj.lora_A.weight": (4, 64)}, "rename it to base_model"),
    ],
    ids=str,
)
def test_tensors_that_do_not_fit_are_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(AdapterMismatch, match=named):
        plan_adapter(PLAIN, {**shapes(), **change}, MODEL)


def test_a_tensor_outside_target_modules_is_refused() -> None:
    with pytest.raises(AdapterMismatch) as raised:
        plan_adapter({**PLAIN, "target_modules": ["k_proj"]}, shapes(), MODEL)
    assert raised.value.param == "target_modules"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("modules_to_save", ["score"]),
        ("modules_to_save", "lm_head"),
        ("modules_to_save", ["lm_head"]),  # whose tensor the file has not
        ("trainable_token_indices", [3]),
        ("trainable_token_indices", {"q_proj": [3]}),
        ("trainable_token_indices", {"lm_head": []}),
        ("trainable_token_indices", [3, 3]),
        ("trainable_token_indices", [-1]),
        ("trainable_token_indices", [10**9]),
        ("trainable_token_indices", ["3"]),
        ("trainable_token_indices", 3),
    ],
    ids=str,
)
def test_rows_that_cannot_be_replaced_are_named(field: str, value: Any) -> None:
    with pytest.raises(AdapterMismatch) as raised:
        plan_adapter({**PLAIN, field: value}, shapes(), MODEL)
    assert raised.value.param == field
    assert field in raised.value.message


def test_an_empty_adapter_is_refused() -> None:
    with pytest.raises(AdapterMismatch):
        plan_adapter(PLAIN, {}, MODEL)


def header_of(content: bytes) -> dict[str, Any]:
    return parse_header(content, len(content))


GOOD = save({"a": torch.zeros(2, 3), "b": torch.zeros(4)})


def reheadered(header: dict[str, Any], body: bytes = bytes(40)) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def entry(shape: list[Any], *offsets: Any, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04\x95",
        GOOD[:-1],
        GOOD + b"x",
        GOOD[:20],
        (2**63).to_bytes(8, "little") + b"{}",
        reheadered([]),  # type: ignore[arg-type]
        reheadered({"a": 3}),
        reheadered({"a": entry([10], 0, 40), "b": entry([10], 0, 40)}),
        reheadered({"a": entry([9], 4, 40)}),
        reheadered({"a": entry([11], 0, 40)}),
        reheadered({"a": entry([-10], 0, 40)}),
        reheadered({"a": entry([10.0], 0, 40)}),
        reheadered({"a": entry([True] * 10, 0, 40)}),
        reheadered({"a": entry([2**40, 2**40], 0, 40)}),
        reheadered({"a": entry([10], 0, 40, dtype="I64")}),
        reheadered({"a": {"dtype": "F32", "shape": [10]}}),
        (50_000).to_bytes(8, "little") + b"[" * 50_000,
    ],
    ids=range(18),
)
def test_a_lying_file_is_refused(content: bytes) -> None:
    with pytest.raises(AdapterMismatch):
        header_of(content)


def test_a_good_header() -> None:
    found = {name: (tensor.dtype, tensor.shape) for name, tensor in header_of(GOOD).items()}
    assert found == {"a": ("F32", (2, 3)), "b": ("F32", (4,))}


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"nul",
        b'{"a":' * 5000,
        b" " * (1 << 21),
        b'{"r": 4, "r": 8}',
        b'{"lora_alpha": NaN}',
        b'{"lora_alpha": 1e999}',
        rb'{"revision": "\ud800"}',
    ],
    ids=range(9),
)
def test_a_config_that_is_no_object_is_refused(text: bytes) -> None:
    with pytest.raises(AdapterMismatch):
        parse_config(text)


ALL = tuple(
    f"{layer}.{name}"
    for layer in range(2)
    for name in (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    )
)  # fmt: skip


@pytest.mark.parametrize("rank", [1, 4, 7, 8, 9, 16, 40, 64, 256])
def test_tiles_hold_exactly_the_tensors(rank: int) -> None:
    """Every value is found where the map says, nothing overlaps, and little space is lost."""
    plan = plan_adapter({**PLAIN, "r": rank}, shapes(rank, ALL), MODEL)
    tiles = place_tiles(plan, MODEL, LAYOUT)
    content = {name: torch.randn(shape) for name, shape in shapes(rank, ALL).items()}
    packed = torch.full((tiles.num_pages, LAYOUT.page_elems), float("nan"))
    fill_tiles(packed, plan, tiles, content.__getitem__, NO_BASE)
    num_values = sum(tensor.numel() for tensor in content.values())
    assert int(packed.isfinite().sum()) == num_values
    assert packed.numel() <= 1.05 * num_values + 2 * LAYOUT.page_elems
    for target in plan.targets:
        at = target.layer * NUM_PROJECTIONS + target.projection
        for offsets, wanted in (
            (tiles.a_offset[at], content[target.a_name]),
            (tiles.b_offset[at], content[target.b_name].T),
        ):
            width = wanted.shape[1]
            rows = [
                packed.view(-1)[offset : offset + count * width].view(count, width)
                for offset, count in zip(offsets.tolist(), tiles.rows[at].tolist(), strict=True)
                if offset >= 0
            ]
            assert torch.equal(torch.cat(rows), wanted)
            for offset, row in zip(offsets.tolist(), rows, strict=False):
                assert (
                    offset // LAYOUT.page_elems == (offset + row.numel() - 1) // LAYOUT.page_elems
                )


@pytest.mark.parametrize("rank", [1, 9, 64])
def test_tiles_in_fp8_take_a_quarter_of_fp32(rank: int) -> None:
    """Each matrix is its numbers times its scale; both scales are in the tile's."""
    layout = dataclasses.replace(LAYOUT, tile_per_element=4)
    plan = plan_adapter({**PLAIN, "r": rank}, shapes(rank, ALL), MODEL)
    tiles, whole = place_tiles(plan, MODEL, layout), place_tiles(plan, MODEL, LAYOUT)
    assert tiles.num_pages <= whole.num_pages // 4 + 1
    content = {name: torch.randn(shape) / 64 for name, shape in shapes(rank, ALL).items()}
    packed = torch.zeros(tiles.num_pages, layout.page_elems)
    fill_tiles(packed, plan, tiles, content.__getitem__, NO_BASE)
    numbers = packed.view(FP8).view(-1)
    for target in plan.targets:
        at = target.layer * NUM_PROJECTIONS + target.projection
        product = 1.0
        for offsets, wanted in (
            (tiles.a_offset[at], content[target.a_name]),
            (tiles.b_offset[at], content[target.b_name].T),
        ):
            width, rows = wanted.shape[1], []
            for offset, count in zip(offsets.tolist(), tiles.rows[at].tolist(), strict=True):
                rows.append(numbers[4 * offset : 4 * offset + count * width].view(count, width))
            scale = float(wanted.abs().max()) / 448
            product *= scale
            found = torch.cat(rows).float() * scale
            # Half of the last of three bits; below the smallest normal number half of its step.
            torch.testing.assert_close(found, wanted, rtol=2**-4, atol=scale * 2**-10)
        scales = tiles.scale[at][tiles.rows[at] > 0]
        assert scales.tolist() == pytest.approx([target.scaling * product] * len(scales))


@pytest.mark.parametrize("rank", [1, 9, 64])
def test_an_original_in_fp8_tiles_is_whole(rank: int) -> None:
    """Two parts of each matrix sum up to it in bf16, so their products do; they take its room."""
    layout = dataclasses.replace(LAYOUT, tile_per_element=4)
    plan = plan_adapter({**PLAIN, "r": rank}, shapes(rank, ALL), MODEL)
    copy = place_tiles(plan, MODEL, layout)
    tiles = place_tiles(plan, MODEL, layout, is_original=True)
    assert tiles.num_tiles == 4 * copy.num_tiles
    assert tiles.num_pages <= 2 * copy.num_pages + 1
    content = {name: torch.randn(shape) / 64 for name, shape in shapes(rank, ALL).items()}
    packed = torch.zeros(tiles.num_pages, layout.page_elems)
    fill_tiles(packed, plan, tiles, content.__getitem__, NO_BASE)
    numbers = packed.view(FP8).view(-1)
    for target in plan.targets:
        at = target.layer * NUM_PROJECTIONS + target.projection
        a, b = (content[name].bfloat16().double() for name in (target.a_name, target.b_name))
        found = torch.zeros(b.shape[0], a.shape[1], dtype=torch.float64)
        columns = (tiles.a_offset[at], tiles.b_offset[at], tiles.rows[at], tiles.scale[at])
        for a_at, b_at, count, scale in zip(*columns, strict=True):
            if count:
                a_rows = numbers[4 * a_at : 4 * a_at + count * a.shape[1]].view(count, -1)
                b_rows = numbers[4 * b_at : 4 * b_at + count * b.shape[0]].view(count, -1)
                found += float(scale) * (b_rows.double().T @ a_rows.double())
        torch.testing.assert_close(found, target.scaling * b @ a, rtol=1e-6, atol=1e-9)


def test_tiles_move_with_their_pages() -> None:
    plan = plan_adapter(PLAIN, shapes(4, ALL), MODEL)
    tiles = place_tiles(plan, MODEL, LAYOUT)
    pages = list(range(50, 50 + 3 * tiles.num_pages, 3))
    moved = tiles.at(pages, LAYOUT.page_elems)
    for relative, absolute in zip(tiles.a_offset.ravel(), moved.a_offset.ravel(), strict=True):
        if relative < 0:
            assert absolute == -1
        else:
            page, offset = divmod(int(relative), LAYOUT.page_elems)
            assert absolute == pages[page] * LAYOUT.page_elems + offset


# Bad adapters in a running engine


def damaged(source: Path, folder: Path, kind: str) -> Path:
    edit_config(source, folder)
    file = folder / "adapter_model.safetensors"
    if kind == "vanished":
        file.unlink()
    elif kind == "truncated":
        file.write_bytes(file.read_bytes()[:-8])
    elif kind == "nan":
        content = load_file(file)
        next(iter(content.values()))[0, 0] = float("nan")
        save_file(content, file)
    elif kind == "replaced":
        save_file({"x": torch.zeros(3)}, file)
    return folder


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("vanished", AdapterUnavailable),
        ("truncated", AdapterMismatch),
        ("replaced", AdapterMismatch),
    ],
)
def test_a_bad_file_is_refused_at_registration(
    make_engine: MakeEngine,
    adapters: dict[str, Path],
    tmp_path: Path,
    kind: str,
    error: type[Exception],
) -> None:
    engine = make_engine()
    with pytest.raises(error):
        engine.register_adapter("bad", damaged(adapters["all-4"], tmp_path / "bad", kind))
    engine.check_integrity()


@pytest.mark.parametrize("kind", ["vanished", "truncated", "nan", "replaced"])
def test_a_file_that_goes_bad_ends_its_own_requests_only(
    make_engine: MakeEngine, adapters: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    now = [100.0]
    engine = make_engine(clock=lambda: now[0])
    folder = edit_config(adapters["all-4"], tmp_path / "bad")
    engine.register_adapter("bad", folder)
    if kind == "vanished":
        (folder / "adapter_config.json").unlink()
    else:
        good = (folder / "adapter_model.safetensors").read_bytes()
        (folder / "adapter_model.safetensors").unlink()
        source = damaged(adapters["all-4"], tmp_path / "worse", kind)
        content = (source / "adapter_model.safetensors").read_bytes()
        (folder / "adapter_model.safetensors").write_bytes(content)
    results = run(
        engine,
        request("bad1", prompt(0, 5), adapter="bad", max_tokens=5),
        request("bad2", prompt(0, 5), adapter={"bad": 1.0, "qv-16": 1.0}, max_tokens=5),
        request("good", prompt(0, 5), adapter="all-4", max_tokens=5),
        request("base", prompt(0, 5), max_tokens=5),
        check=True,
    )
    wanted = AdapterUnavailable if kind == "vanished" else AdapterMismatch
    assert isinstance(results["bad1"].error, wanted)
    assert isinstance(results["bad2"].error, wanted)
    assert len(results["good"].token_ids) == len(results["base"].token_ids) == 5
    # Some time later a request tries again, and a mended file is read.
    now[0] += 10
    if kind != "vanished":
        (folder / "adapter_model.safetensors").write_bytes(good)
        again = run(engine, request("again", prompt(0, 5), adapter="bad", max_tokens=5))
        assert again["again"].token_ids == results["good"].token_ids


def test_unregistering_lets_accepted_requests_finish(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(request("r", prompt(0, 5), adapter="all-4", max_tokens=8))
    engine.unregister_adapter("all-4")
    engine.unregister_adapter("nobody")
    got = run(engine)["r"]
    assert len(got.token_ids) == 8
    assert engine.stats().adapter_pages == 0
    from engine import UnknownAdapter

    with pytest.raises(UnknownAdapter):
        engine.add(request("late", prompt(0, 5), adapter="all-4"))


def test_registering_is_idempotent(make_engine: MakeEngine, adapters: dict[str, Path]) -> None:
    engine = make_engine()
    before = engine.stats().num_adapters
    engine.register_adapter("all-4", adapters["all-4"])
    engine.register_adapter("all-4", Path("/nowhere"))
    assert engine.stats().num_adapters == before


@pytest.mark.parametrize(
    "name",
    ["x" * 1_000_000, "\ud800\x1b[31m" * 1000, "q_proj"],
    ids=["long", "unprintable", "plain"],
)
def test_what_an_error_quotes_of_a_file_can_be_shown(name: str) -> None:
    with pytest.raises(AdapterMismatch) as raised:
        check_config({**PLAIN, name: 1})
    error = raised.value
    assert error.message == str(error) and len(str(error)) < 2001 and error.param is not None
    for text in (str(error), error.param):
        assert text.encode() and text.isprintable() and len(text) < 2001
        assert (name in text) == (name == "q_proj")
