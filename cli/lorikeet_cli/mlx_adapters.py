"""Conversion of an mlx-lm adapter into the two files of PEFT, by the standard library alone.

mlx-lm computes y = W x + scale * (x A) B, with A [in, rank] and B [rank, out]. PEFT's two matrices
are these transposed, its scale is lora_alpha / r, and DoRA's magnitudes mean the same to both.
Sources: LoRALinear and DoRALinear in mlx_lm/tuner, load_adapters in mlx_lm/tuner/utils.py.
"""

from __future__ import annotations

import array
import dataclasses
import json
import math
import re
import shutil
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from lorikeet_cli.errors import CliError

CONFIG, TENSORS, MLX_TENSORS = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapters.safetensors",
)
MAX_HEADER_BYTES = 16 << 20
MAX_RANK = 256
#: Data type of a tensor -> type code of an array whose items have the same size.
_ITEMS = {"F32": "I", "F16": "H", "BF16": "H"}
_NAME = re.compile(
    r"(?P<module>model\.layers\.(?P<layer>\d{1,4})\.(?P<path>[A-Za-z_]\w*(?:\.\w+)*)|lm_head)"
    r"\.(?P<part>lora_a|lora_b|m)",
    re.ASCII,
)
_PARTS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "m": "lora_magnitude_vector"}
_PARAMETERS = frozenset({"rank", "scale", "dropout", "keys", "alpha"})


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    dtype: str
    shape: tuple[int, ...]
    begin: int  # its first byte, counted from the start of the file
    end: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings that mlx-lm reads from adapter_config.json when it loads an adapter.

    keys        paths of the adapted modules; None: whatever the tensors are of
    num_layers  how many of the last layers are adapted; None: all
    """

    rank: int
    scale: float
    dropout: float
    keys: frozenset[str] | None
    num_layers: int | None
    is_dora: bool
    base: str | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A PEFT adapter: its config, and its tensors by name, each with that of mlx-lm.

    config   adapter_config.json
    tensors  PEFT's name -> mlx-lm's name
    """

    config: dict[str, Any]
    tensors: Mapping[str, str]


def convert(folder: Path, raw: Any, output: Path) -> Conversion:
    """Write the PEFT folder `output` of the mlx-lm adapter in `folder`.

    raw  its adapter_config.json, parsed
    Raises CliError; then nothing is written.
    """
    settings = read_settings(raw, folder / CONFIG)
    path = folder / MLX_TENSORS
    try:
        with path.open("rb") as file:
            tensors = read_tensors(file, path)
            made = plan(settings, {name: tensor.shape for name, tensor in tensors.items()}, path)
            _write(output, made, tensors, file)
    except FileExistsError as error:
        raise CliError(f"{output} exists already. Name another folder with --to.") from error
    except OSError as error:
        raise CliError(f"Cannot convert {folder}: {error.strerror}.") from error
    return made


def read_settings(raw: Any, path: Path) -> Settings:
    """Read mlx-lm's adapter_config.json. Raises CliError."""
    raw = raw if isinstance(raw, dict) else {}
    kind = raw.get("fine_tune_type") or ("dora" if raw.get("use_dora") is True else "lora")
    if kind == "full":
        raise CliError(
            f"{path}: fine_tune_type is full, so mlx-lm trained the whole model, which is no "
            "adapter. Train with --fine-tune-type lora or dora."
        )
    given: Any = raw.get("lora_parameters")
    if not isinstance(given, dict):
        raise CliError(f"{path} is not a configuration of mlx-lm: lora_parameters is missing.")
    if kind not in ("lora", "dora"):
        raise CliError(f"{path}: fine_tune_type is {kind!r}, neither lora nor dora.")
    if unknown := given.keys() - _PARAMETERS:
        raise CliError(f"{path}: mlx-lm has no lora_parameters.{min(unknown)}. Remove the key.")
    rank: Any = given.get("rank")
    scale: Any = given.get("scale")
    dropout: Any = given.get("dropout", 0.0)
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        raise CliError(f"{path}: lora_parameters.rank must be from 1 to {MAX_RANK}.")
    if type(scale) not in (int, float) or not 0 < scale < math.inf:
        raise CliError(f"{path}: lora_parameters.scale must be a number above 0.")
    if type(dropout) not in (int, float) or not 0 <= dropout < 1:
        raise CliError(f"{path}: lora_parameters.dropout must be a number from 0 to 1.")
    if given.get("alpha") not in (None, rank) and "num_layers" not in raw:
        raise CliError(
            f"{path}: the first releases of mlx-lm multiplied lora_parameters.scale by alpha / "
            "rank, and the next did not. Write the factor that yours used as scale, and remove "
            "alpha."
        )
    keys, layers = given.get("keys"), raw.get("num_layers", raw.get("lora_layers"))
    if keys is not None and not (
        isinstance(keys, list) and all(isinstance(key, str) for key in keys)
    ):
        raise CliError(f"{path}: lora_parameters.keys must be a list of modules.")
    if layers is not None and type(layers) is not int:
        raise CliError(f"{path}: num_layers must be a number.")
    base = raw.get("model")
    return Settings(
        rank=rank,
        scale=float(scale),
        dropout=float(dropout),
        keys=None if keys is None else frozenset(keys),
        num_layers=layers if layers is not None and layers > 0 else None,
        is_dora=kind == "dora",
        base=base if isinstance(base, str) else None,
    )


def read_tensors(file: BinaryIO, path: Path) -> dict[str, Tensor]:
    """Read the header of a safetensors file. Raises CliError, OSError."""
    num_bytes = file.seek(0, 2)
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    try:
        if not 2 <= length <= min(MAX_HEADER_BYTES, num_bytes - 8):
            raise ValueError
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        tensors = {name: _tensor(entry, 8 + length) for name, entry in header.items()}
        if sum(each.end - each.begin for each in tensors.values()) != num_bytes - 8 - length:
            raise ValueError
        if any(each.end > num_bytes for each in tensors.values()):
            raise ValueError
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CliError(
            f"{path} is not a complete safetensors file of F32, F16 or BF16. Download it again."
        ) from error
    return tensors


def _tensor(entry: Any, body: int) -> Tensor:
    """Read an entry of the header. Raises ValueError, TypeError, KeyError."""
    shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    item = array.array(_ITEMS[entry["dtype"]]).itemsize
    if not all(type(size) is int and size > 0 for size in shape):
        raise ValueError
    if type(begin) is not int or begin < 0 or end - begin != math.prod(shape) * item:
        raise ValueError
    return Tensor(entry["dtype"], shape, body + begin, body + end)


def plan(settings: Settings, shapes: Mapping[str, tuple[int, ...]], path: Path) -> Conversion:
    """Return the PEFT adapter that computes what mlx-lm computes. Raises CliError.

    shapes  of mlx-lm's tensors, by name
    path    of their file, for errors
    """
    modules: dict[str, dict[str, str]] = defaultdict(dict)
    layers: dict[int, set[str]] = defaultdict(set)
    for name in shapes:
        match = _NAME.fullmatch(name)
        if match is None:
            raise CliError(f"{path}: {_why_not(name)}")
        if settings.keys is not None and settings.keys.isdisjoint((match["path"], match["module"])):
            raise CliError(
                f"{path}: {name} is of a module that lora_parameters.keys does not name, so "
                "mlx-lm does not read it."
            )
        modules[match["module"]][match["part"]] = name
        if match["layer"] is not None:
            layers[int(match["layer"])].add(match["path"])
    if settings.num_layers is not None and len(layers) > settings.num_layers:
        raise CliError(
            f"{path} has tensors of {len(layers)} layers, and num_layers is {settings.num_layers}: "
            "mlx-lm does not read them all."
        )
    for module, parts in modules.items():
        _check_parts(settings, module, {part: shapes[name] for part, name in parts.items()}, path)
    if not modules:
        raise CliError(f"{path} has no tensor.")
    return Conversion(
        config=_config(settings, sorted(modules), layers),
        tensors={
            f"base_model.model.{module}.{_PARTS[part]}": name
            for module, parts in modules.items()
            for part, name in parts.items()
        },
    )


def _why_not(name: str) -> str:
    if "embed_tokens" in name:
        return (
            f"{name} is of the embedding, with which mlx-lm also changes a tied head, and PEFT "
            "does not. Train without it."
        )
    if name.endswith((".lora_a", ".lora_b", ".m")):
        return f"{name} is of a module that Lorikeet does not adapt. Train without it."
    return f"{name} is not a tensor of LoRA or DoRA. Train without it."


def _check_parts(
    settings: Settings, module: str, found: Mapping[str, tuple[int, ...]], path: Path
) -> None:
    """Raise CliError unless the module has all its tensors, and their shapes agree."""
    for part in ("lora_a", "lora_b", *(["m"] if settings.is_dora else [])):
        if part not in found:
            raise CliError(f"{path}: {module}.{part} is missing.")
    if "m" in found and not settings.is_dora:
        raise CliError(f"{path}: {module}.m is of DoRA, but fine_tune_type is lora.")
    a, b = found["lora_a"], found["lora_b"]
    if len(a) != 2 or len(b) != 2 or a[1] != b[0] or found.get("m", b[1:]) != b[1:]:
        raise CliError(
            f"{path}: the tensors of {module} have the shapes {list(a)} and {list(b)}, which are "
            "not [in, rank] and [rank, out]: layers of experts cannot be converted."
        )
    if a[1] != settings.rank:
        raise CliError(
            f"{path}: lora_parameters.rank is {settings.rank}, and the tensors have rank {a[1]}. "
            f"Use the {CONFIG} that was saved with them."
        )


def _config(
    settings: Settings, modules: list[str], layers: Mapping[int, set[str]]
) -> dict[str, Any]:
    alpha = settings.scale * settings.rank
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": settings.base,
        "bias": "none",
        "inference_mode": True,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": settings.dropout,
        "r": settings.rank,
        "target_modules": modules,
        "use_dora": settings.is_dora,
    }
    if layers and len({frozenset(paths) for paths in layers.values()}) == 1:
        config["target_modules"] = sorted({module.rpartition(".")[2] for module in modules})
        config["layers_to_transform"] = sorted(layers)
    return config


def _write(output: Path, made: Conversion, tensors: Mapping[str, Tensor], source: BinaryIO) -> None:
    """Write the folder, which must not exist; remove it if that fails. Raises OSError."""
    output.mkdir()
    try:
        with (output / TENSORS).open("wb") as target:
            header, offset = {}, 0
            for name, old in made.tensors.items():
                tensor = tensors[old]
                end = offset + tensor.end - tensor.begin
                shape, offsets = list(reversed(tensor.shape)), [offset, end]
                header[name] = {"dtype": tensor.dtype, "shape": shape, "data_offsets": offsets}
                offset = end
            text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
            target.write(len(text).to_bytes(8, "little") + text)
            for old in made.tensors.values():
                target.write(_transposed(tensors[old], source))
        (output / CONFIG).write_text(json.dumps(made.config, indent=2) + "\n")
    except BaseException:
        shutil.rmtree(output, ignore_errors=True)
        raise


def _transposed(tensor: Tensor, source: BinaryIO) -> array.array[int]:
    """Read a tensor and return its transpose; one of one dimension stays as it is."""
    items = array.array(_ITEMS[tensor.dtype])
    source.seek(tensor.begin)
    items.frombytes(source.read(tensor.end - tensor.begin))
    if len(tensor.shape) < 2:
        return items
    rows, columns = tensor.shape
    turned = array.array(items.typecode, items)
    if rows < columns:
        for row in range(rows):
            turned[row::rows] = items[row * columns : (row + 1) * columns]
    else:
        for column in range(columns):
            turned[column * rows : (column + 1) * rows] = items[column::columns]
    return turned
