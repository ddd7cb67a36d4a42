"""Bad uploads of every kind: {name: (adapter_config.json, adapter_model.safetensors, field)}.

The field is one that the rejection must name.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
import zipfile
from typing import Any

from tests.controlplane.adapters import files
from tests.controlplane.adapters.files import GOOD_CONFIG, GOOD_TENSORS, config_bytes, pack

Upload = tuple[bytes, bytes, str]

FILE = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
TENSORS = files.tensors()
FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
SECOND = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
LAST = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"
DATA = b"".join(data for _, _, data in TENSORS.values())
HEADER = json.dumps(files.header(TENSORS)).encode()


def _zip_bomb() -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(8 << 20))
    return target.getvalue()


def _entry(**changed: Any) -> bytes:
    """The good file, its first tensor's entry changed."""
    entries = files.header(TENSORS)
    entries[FIRST].update(changed)
    return pack(TENSORS, entries)


def _entries(**changed: Any) -> bytes:
    return pack(TENSORS, {**files.header(TENSORS), **changed})


def _tensors(**changed: tuple[str, tuple[int, ...], bytes]) -> bytes:
    return pack({**TENSORS, **changed})


def _without(name: str) -> bytes:
    return pack({key: value for key, value in TENSORS.items() if key != name})


def _with_value(dtype: str, value: bytes, place: int) -> bytes:
    """The good file in another dtype, all ones but one."""
    one = {"F32": struct.pack("<f", 1), "F16": struct.pack("<e", 1), "BF16": b"\x80\x3f"}[dtype]
    found: files.Tensors = {}
    for name, (_, shape, data) in TENSORS.items():
        values = [one] * (len(data) // 4)
        if name == LAST:
            values[place] = value
        found[name] = (dtype, shape, b"".join(values))
    return pack(found)


def _gap() -> bytes:
    entries = files.header(TENSORS)
    entries[LAST]["data_offsets"] = [offset + 4 for offset in entries[LAST]["data_offsets"]]
    return files.pack_text(json.dumps(entries).encode(), DATA + bytes(4))


def _swapped() -> bytes:
    entries = files.header(TENSORS)
    entries[SECOND]["data_offsets"] = entries[FIRST]["data_offsets"]
    return pack(TENSORS, entries)


def _named(name: str) -> bytes:
    return _tensors(**{name: ("F32", (4, 16), bytes(256))})


FILES: dict[str, tuple[bytes, str]] = {
    "one byte": (b"x", FILE),
    "a length and no header": (struct.pack("<Q", 100), FILE),
    "a header cut in its middle": (GOOD_TENSORS[: 8 + len(HEADER) // 2], FILE),
    "a header's length of 2^63": (struct.pack("<Q", 1 << 63) + GOOD_TENSORS[8:], FILE),
    "a header's length of 5 MB": (struct.pack("<Q", 5 << 20) + bytes(5 << 20), FILE),
    "an empty header": (files.pack_text(b"", DATA), FILE),
    "an empty object": (files.pack_text(b"{}", b""), FILE),
    "a header that is a list": (files.pack_text(b"[1]", b""), FILE),
    "a header that is no JSON": (files.pack_text(b"{'a': 1}", b""), FILE),
    "a header in UTF-16": (files.pack_text(HEADER.decode().encode("utf-16"), DATA), FILE),
    "a header with a NUL": (files.pack_text(HEADER + b"\0", DATA), FILE),
    "a name twice": (files.pack_text(HEADER[:-1] + b"," + HEADER[1:], DATA), FILE),
    "deep JSON": (files.pack_text(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b""), FILE),
    "many empty lists": (files.pack_text(b'{"a":[' + b"[]," * 1_300_000 + b"0]}", b""), "a"),
    "NaN in the header": (_entry(shape=[float("nan"), 16]), FILE),
    "metadata that is a list": (_entries(__metadata__=[1]), FILE),
    "metadata with a number": (_entries(__metadata__={"a": 1}), FILE),
    "cut data": (GOOD_TENSORS[:-1], FILE),
    "data behind the end": (GOOD_TENSORS + b"\0", FILE),
    "overlapping tensors": (_swapped(), SECOND),
    "a gap between tensors": (_gap(), LAST),
    "offsets in the wrong order": (_entry(data_offsets=[256, 0]), FIRST),
    "negative offsets": (_entry(data_offsets=[-4, 252]), FIRST),
    "offsets of 2^63": (_entry(data_offsets=[1 << 63, (1 << 63) + 256]), FIRST),
    "one offset": (_entry(data_offsets=[0]), FIRST),
    "offsets of text": (_entry(data_offsets=["0", "256"]), FIRST),
    "offsets of booleans": (_entry(data_offsets=[False, True]), FIRST),
    "a shape whose product overflows": (_entry(shape=[1 << 31] * 8), FIRST),
    "a shape of nine dimensions": (_entry(shape=[1] * 9), FIRST),
    "a shape with zero": (_entry(shape=[0, 16], data_offsets=[0, 0]), FIRST),
    "another field in an entry": (_entry(strides=[1]), FIRST),
    "an entry that is a list": (_entries(**{FIRST: [1]}), FIRST),
    "dtype F64": (_tensors(**{FIRST: ("F64", (4, 16), bytes(512))}), FIRST),
    "dtype I8": (_tensors(**{FIRST: ("I8", (4, 16), bytes(64))}), FIRST),
    "dtype F8": (_tensors(**{FIRST: ("F8_E4M3", (4, 16), bytes(64))}), FIRST),
    "dtype a number": (_entry(dtype=7), FIRST),
    "another rank": (_tensors(**{FIRST: ("F32", (8, 16), bytes(512))}), FIRST),
    "A transposed": (_tensors(**{FIRST: ("F32", (16, 4), bytes(256))}), FIRST),
    "A flat": (_tensors(**{FIRST: ("F32", (64,), bytes(256))}), FIRST),
    "a wider base's A": (_tensors(**{FIRST: ("F32", (4, 32), bytes(512))}), FIRST),
    "A without B": (_without(SECOND), SECOND),
    "B without A": (_without(FIRST), FIRST),
    "a layer that the base has not": (
        _named(FIRST.replace("layers.0", "layers.2")),
        FIRST.replace("layers.0", "layers.2"),
    ),
    "a module that was not adapted": (
        _named("base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight"),
        "target_modules",
    ),
    "a norm": (
        _named("base_model.model.model.norm.weight"),
        "base_model.model.model.norm.weight",
    ),
    "a name twice in two spellings": (
        _named(FIRST.replace("lora_A", "lora_A.default")),
        FIRST.replace("lora_A", "lora_A.default"),
    ),
    "a path for a name": (_named("../../../etc/passwd"), "../../../etc/passwd"),
    "a name with a NUL": (_named("a\0b"), "a\\x00b"),
    "an empty name": (_named(""), FILE),
    "a name of a megabyte": (_named("n" * (1 << 20)), "n" * 120 + "..."),
    "a name that looks like another": (
        _named(FIRST.replace("q_proj", "\u0071\u200b_proj")),
        "base_model.model.model.layers.0.self_attn.q\\u200b_proj.lora_A.weight",
    ),
    "a name from right to left": (_named("\u202eweight"), "\\u202eweight"),
    "a lone surrogate in a name": (
        files.pack_text(HEADER.replace(b"q_proj", b"\\ud800", 1), DATA),
        FIRST.replace("q_proj", "\\ud800"),
    ),
    "40,000 tensors": (pack({f"t{n}": ("F16", (1,), bytes(2)) for n in range(40_000)}), "t0"),
    "a pickle": (pickle.dumps({"weight": [1.0] * 100}, protocol=2), FILE),
    "a pickle of protocol 5": (pickle.dumps({"weight": [1.0] * 100}, protocol=5), FILE),
    "a zip bomb": (_zip_bomb(), FILE),
    "a gzip archive": (gzip.compress(GOOD_TENSORS), FILE),
    "a GGUF file": (b"GGUF" + bytes(100), FILE),
    "an HTML page": (b"<!doctype html><title>404</title>" + bytes(100), FILE),
    "an LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", FILE),
    "zeros": (bytes(4096), FILE),
    **{
        f"{kind} in {dtype} at {place}": (_with_value(dtype, value, place), LAST)
        for dtype, kind, value, place in [
            ("F32", "NaN", struct.pack("<f", float("nan")), 0),
            ("F32", "infinity", struct.pack("<f", float("inf")), 63),
            ("F32", "a signalling NaN", b"\x01\x00\x80\x7f", 5),
            ("F16", "NaN", struct.pack("<e", float("nan")), 0),
            ("F16", "minus infinity", struct.pack("<e", float("-inf")), 63),
            ("BF16", "NaN", b"\xc0\x7f", 0),
            ("BF16", "infinity", b"\x80\x7f", 63),
        ]
    },
}

CONFIGS: dict[str, tuple[bytes, str]] = {
    "no config": (b"{}", "peft_type"),
    "a config that is a list": (b"[]", CONFIG),
    "a config that is no JSON": (b"peft_type: LORA", CONFIG),
    "a config of NaN": (b'{"lora_alpha": NaN}', CONFIG),
    "a config of 1e999": (b'{"lora_alpha": 1e999}', CONFIG),
    "a field twice": (b'{"peft_type": "LORA", "peft_type": "LORA"}', CONFIG),
    "a deep config": (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, CONFIG),
    "a config with a lone surrogate": (b'{"revision": "\\ud800"}', CONFIG),
    "a config in Latin-1": (b'{"revision": "\xe9"}', CONFIG),
    "a number of 60,000 digits": (b'{"r": ' + b"9" * 60_000 + b"}", CONFIG),
    "IA3": (config_bytes(peft_type="IA3"), "peft_type"),
    "a classifier without a head": (
        config_bytes(task_type="SEQ_CLS"),
        "base_model.model.score.weight",
    ),
    "rank 0": (config_bytes(r=0), "r"),
    "rank 257": (config_bytes(r=257), "r"),
    "a rank that the tensors have not": (config_bytes(r=8), "r"),
    "alpha of 1e30": (config_bytes(lora_alpha=1e30), "lora_alpha"),
    "unknown modules": (config_bytes(target_modules=["attention.wq"]), "target_modules"),
    "modules by path": (config_bytes(target_modules=["../q_proj"]), "target_modules"),
    "a pattern that takes for ever": (
        config_bytes(target_modules="(" * 30 + ".*" + ")*" * 30 + "x"),
        "target_modules",
    ),
    "a pattern that refers back": (
        config_bytes(rank_pattern={"(q)\\1": 4}),
        "rank_pattern",
    ),
    "DoRA without magnitudes": (
        config_bytes(use_dora=True),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector",
    ),
    "DoRA with biases": (config_bytes(use_dora=True, lora_bias=True), "lora_bias"),
    "DoRA as text": (config_bytes(use_dora="true"), "use_dora"),
    "rsLoRA as a number": (config_bytes(use_rslora=1), "use_rslora"),
    "a classifier's head saved": (config_bytes(modules_to_save=["score"]), "modules_to_save"),
    "an embedding saved that is not there": (
        config_bytes(modules_to_save=["embed_tokens"]),
        "modules_to_save",
    ),
    "an unknown token": (
        config_bytes(trainable_token_indices=[64]),
        "trainable_token_indices",
    ),
    "PiSSA": (config_bytes(init_lora_weights="pissa"), "init_lora_weights"),
    "copied layers": (config_bytes(layer_replication=[[0, 2]]), "layer_replication"),
    "Megatron": (config_bytes(megatron_config={"a": "b"}), "megatron_config"),
    "trained biases": (config_bytes(bias="every"), "bias"),
    "a field of tomorrow": (config_bytes(use_tomorrow=True), "use_tomorrow"),
    "another base": (
        config_bytes(base_model_name_or_path="mistralai/Mistral-7B-v0.3"),
        "base_model_name_or_path",
    ),
    "another commit of the base": (
        config_bytes(base_model_name_or_path="org/tiny", revision="b" * 40),
        "revision",
    ),
}

BAD_UPLOADS: dict[str, Upload] = {
    **{name: (GOOD_CONFIG, content, field) for name, (content, field) in FILES.items()},
    **{name: (content, GOOD_TENSORS, field) for name, (content, field) in CONFIGS.items()},
    "DoRA's magnitudes without DoRA": (
        GOOD_CONFIG,
        pack(files.tensors(dora=True)),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector",
    ),
    "a bad config and a bad file": (config_bytes(r=0), b"PK\x03\x04....", FILE),
}
