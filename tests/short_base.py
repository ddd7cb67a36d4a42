"""The packaged base model with its first layers alone, for tests that ask how and not how well.

Tokenizer, chat template, vocabulary and shapes are the real model's; a pass and a load take a third
of the time. `make demo`, `make test-compose` and the long tests have the whole one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from pathlib import Path

from safetensors import safe_open
from safetensors.numpy import save_file

from contract.adapters.base_model import MANIFEST
from worker.base_model import packaged_model

CACHE = Path(__file__).parent.parent / ".cache"
NUM_LAYERS = 4
WEIGHTS = "model.safetensors"


def short_base() -> Path:
    """Return the folder, which has the model's name; make it on first use."""
    whole = packaged_model(CACHE / "base")
    manifest = json.loads((whole / MANIFEST).read_text())
    revision = f"{NUM_LAYERS} layers of {manifest['revision']}"
    manifest["revision"] = hashlib.sha256(revision.encode()).hexdigest()
    folder = CACHE / "base-short" / whole.name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # lanes begin together
        made = folder / MANIFEST
        if not made.exists() or json.loads(made.read_text()) != manifest:
            shutil.rmtree(folder, ignore_errors=True)
            _cut(whole, folder)
            made.write_text(json.dumps(manifest))
    return folder


def _cut(whole: Path, folder: Path) -> None:
    """Copy all but the manifest, which is written when the rest is there."""
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns(WEIGHTS, MANIFEST))
    config = json.loads((whole / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": NUM_LAYERS}))
    with safe_open(whole / WEIGHTS, "np") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys() if _is_kept(name)}
        save_file(tensors, folder / WEIGHTS, metadata=file.metadata())


def _is_kept(name: str) -> bool:
    layer = name.partition("model.layers.")[2].partition(".")[0]
    return not layer or int(layer) < NUM_LAYERS
