"""Bases in 4 bits: GPTQ, AWQ and compressed-tensors, with adapters, are what Hugging Face's are."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CompressedTensorsConfig

from engine.errors import UnsupportedModel
from engine.model.config import ModelConfig
from kernels.fp8 import quantize_matrix
from tests.engine.model.families import FUSED, save_family
from tests.engine.model.fp8_bases import FORMATS as FP8_FORMATS
from tests.engine.model.fp8_bases import make_fp8
from tests.engine.model.int4_bases import EVERY, FORMATS, put_weights, save_checkpoint
from tests.engine.model.test_families import (
    WIDE,
    FamilyOracle,
    check,
    make_engine,
    save_adapters,
)
from tests.engine.model.test_fp8 import (
    FURTHER,
    KINDS,
    MEAN_TOLERANCE,
    TOLERANCE,
    by_transformers,
    check_weights,
    edit,
    refused,
)

FEW = ("gptq", "awq", "packed", "packed-zeros")


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return functools.cache(lambda name: save_family(tmp_path_factory.mktemp("family"), name))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *itertools.product(FORMATS, KINDS),
        *(("packed", kind) for kind in FURTHER if kind not in FUSED),
    ],
)
def test_a_checkpoint_of_each_format(
    family: Callable[[str], Path], tmp_path: Path, name: str, kind: str
) -> None:
    base = family(kind)
    adapters = save_adapters(base, tmp_path / "adapters")
    change = functools.partial(put_weights, dense=save_checkpoint(base, tmp_path / "int4", name))
    oracle = FamilyOracle(base, adapters, change)
    engine = make_engine(oracle, model_dir=tmp_path / "int4")
    check(engine, oracle)
    engine.close()


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_the_checkpoints(tmp_path: Path, name: str, kind: str) -> None:
    base = save_family(tmp_path / "base", kind, **WIDE)
    expected = save_checkpoint(base, tmp_path / "int4", name)
    check_weights(tmp_path / "int4", expected, torch.float32)


@pytest.mark.parametrize("name", [n for n in EVERY if n.startswith("packed")])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_compressed_tensors(tmp_path: Path, name: str, kind: str) -> None:
    """In bfloat16, as it multiplies by scales of bfloat16."""
    pytest.importorskip("compressed_tensors")  # GPU machines have none
    save_checkpoint(save_family(tmp_path / "base", kind, **WIDE), tmp_path / "int4", name)
    expected = by_transformers(tmp_path / "int4", CompressedTensorsConfig)
    check_weights(tmp_path / "int4", expected, torch.bfloat16)


GROUP = "config_groups.group_0"


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("gptq", "bits", 8),
        ("gptq", "bits", 3),
        ("gptq", "bits", "4"),
        ("gptq", "desc_act", True),
        ("gptq", "group_size", 0),
        ("gptq", "group_size", 48),
        ("gptq", "group_size", "32"),
        ("gptq", "checkpoint_format", "marlin"),
        ("gptq", "lm_head", True),
        ("gptq", "dynamic", {"-:.*": {}}),
        ("awq", "version", "gemv"),
        ("awq", "bits", None),
        ("awq", "group_size", 0),
        ("awq", "modules_to_not_convert", ["vision_tower"]),
        ("awq", "modules_to_not_convert", [5]),
        ("packed", f"{GROUP}.weights.num_bits", 8),
        ("packed", f"{GROUP}.weights.type", "float"),
        ("packed", f"{GROUP}.weights.strategy", "tensor"),
        ("packed", f"{GROUP}.weights.actorder", "group"),
        ("packed", f"{GROUP}.weights.group_size", None),
        ("packed", f"{GROUP}.weights.group_size", 0),
        ("packed", f"{GROUP}.weights.new_field", True),
        ("packed", "ignore", ["lm_haed"]),
        ("packed", f"{GROUP}.input_activations", {"num_bits": 8}),
    ],
)
def test_a_config_is_refused_by_the_name_of_its_field(
    family: Callable[[str], Path], tmp_path: Path, name: str, path: str, value: Any
) -> None:
    fields = json.loads((family("llama") / "config.json").read_text())
    fields["quantization_config"] = json.loads(json.dumps(FORMATS[name][0]))
    edit(fields["quantization_config"], path, value)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UnsupportedModel) as caught:
        ModelConfig.from_folder(tmp_path)
    assert caught.value.param == f"quantization_config.{path}"


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "tensor", "change"),
    [
        ("gptq", f"{Q}.qweight", lambda t: t[:3].clone()),
        ("gptq", f"{Q}.qweight", lambda t: t.float()),
        ("gptq", f"{Q}.scales", lambda t: t.fill_(float("nan"))),
        ("gptq", f"{Q}.scales", lambda t: t.fill_(0)),
        ("gptq", f"{Q}.scales", lambda t: t.repeat_interleave(2, dim=0)),
        ("gptq", f"{Q}.g_idx", lambda t: t.flip(0).clone()),
        ("gptq", f"{Q}.qzeros", lambda t: None),
        ("gptq", f"{Q}.bias", lambda t: t + 1),
        ("awq", f"{Q}.qweight", lambda t: t.T.contiguous()),
        ("awq", f"{Q}.scales", lambda t: t.fill_(float("inf"))),
        ("awq", f"{Q}.qzeros", lambda t: t[:, :1].clone()),
        ("packed", f"{Q}.weight_shape", lambda t: t + 1),
        ("packed", f"{Q}.weight_scale", lambda t: t.fill_(float("-inf"))),
        ("packed", f"{Q}.weight_packed", lambda t: None),
        ("packed", f"{Q}.weight_scale", lambda t: t[:, :1].clone()),
        ("packed-zeros", f"{Q}.weight_zero_point", lambda t: t[:1].clone()),
        ("packed-zeros", f"{Q}.weight_zero_point", lambda t: None),
    ],
)
def test_a_checkpoint_is_refused_by_the_name_of_its_tensor(
    family: Callable[[str], Path],
    tmp_path: Path,
    name: str,
    tensor: str,
    change: Callable[..., Any],
) -> None:
    folder = tmp_path / "int4"
    save_checkpoint(family("llama"), folder, name)
    tensors = load_file(folder / "model.safetensors")
    changed = change(tensors.pop(tensor))
    if changed is not None:
        tensors[tensor] = changed
    save_file(tensors, folder / "model.safetensors")
    error = refused(folder)
    assert error.param == tensor and tensor in str(error)


def test_zeros_that_the_config_does_not_speak_of_are_refused(
    family: Callable[[str], Path], tmp_path: Path
) -> None:
    save_checkpoint(family("llama"), tmp_path / "int4", "packed-zeros")
    fields = json.loads((tmp_path / "int4" / "config.json").read_text())
    edit(fields["quantization_config"], f"{GROUP}.weights.symmetric", True)
    (tmp_path / "int4" / "config.json").write_text(json.dumps(fields))
    assert refused(tmp_path / "int4").param == "model.layers.0.mlp.down_proj.weight_zero_point"


@pytest.mark.parametrize("told", [*FEW, "channel-token"])
@pytest.mark.parametrize("stored", FEW)
def test_a_config_of_another_format_is_refused(
    family: Callable[[str], Path], tmp_path: Path, stored: str, told: str
) -> None:
    """By the name of the first tensor that is not what the config speaks of."""
    if stored == told:
        return
    folder = tmp_path / "int4"
    save_checkpoint(family("llama"), folder, stored)
    fields = json.loads((folder / "config.json").read_text())
    fields["quantization_config"] = FP8_FORMATS[told] if told in FP8_FORMATS else FORMATS[told][0]
    (folder / "config.json").write_text(json.dumps(fields))
    assert (refused(folder).param or "").startswith("model.layers.0.")


def test_linears_that_are_not_quantised_become_fp8(
    family: Callable[[str], Path], tmp_path: Path
) -> None:
    base = family("llama")
    weights = save_checkpoint(base, tmp_path / "int4", "awq")

    def change(model: Any) -> None:
        plain = {
            name: quantize_matrix(module.weight.data)
            for name, module in model.named_modules()
            if name.startswith("model.layers.1.mlp.") and name.endswith("_proj")
        }
        make_fp8(model, plain)
        put_weights(model, weights)

    oracle = FamilyOracle(base, save_adapters(base, tmp_path), change, TOLERANCE)
    engine = make_engine(oracle, model_dir=tmp_path / "int4", base_precision="fp8")
    check(engine, oracle)
    assert 1e-6 < oracle.mean_error < MEAN_TOLERANCE
    engine.close()
