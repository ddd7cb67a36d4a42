"""Recognise files that people upload by mistake, and say what to do."""

from __future__ import annotations

#: The name of mlx-lm's tensors file; mlx-lm also calls its configuration adapter_config.json.
MLX_FILE = "adapters.safetensors"
MLX_ADAPTER = (
    "it is an adapter of mlx-lm: run `lorikeet adapters convert FOLDER`, and upload the folder "
    "that it writes"
)
BIN_FILE = "adapter_model.bin"
#: Code that converts adapter_model.bin to a file that runs no code when it is read.
CONVERT_BIN = (
    "convert it where you trust it: import torch, safetensors.torch as st; "
    'st.save_file({k: v.clone().contiguous() for k, v in torch.load("adapter_model.bin", '
    'map_location="cpu", weights_only=True).items()}, "adapter_model.safetensors")'
)
BIN_PICKLE = f"it is a pickle, which is not read: {CONVERT_BIN}"
_SAVE = "save the adapter with safe_serialization=True"
_DOWNLOAD = "download the file itself"
#: First bytes, in lower case -> what it is and what to do.
_KINDS = (
    (
        b"version https://git-lfs.github.com/",
        "a Git LFS pointer, not the file: run `git lfs pull`, and upload what it fetches",
    ),
    (b"<!doctype html", f"a web page: {_DOWNLOAD}"),
    (b"<html", f"a web page: {_DOWNLOAD}"),
    (b"pk\x03\x04", f"a zip archive, as torch.save writes: {CONVERT_BIN}"),
    *((bytes((0x80, version)), f"a Python pickle: {CONVERT_BIN}") for version in range(2, 6)),
    (b"gguf", f"a GGUF file: {_SAVE}"),
    (b"\x89hdf", f"an HDF5 file: {_SAVE}"),
    (b"\x1f\x8b", f"a gzip archive: {_SAVE}"),
)


def other_kind(start: bytes) -> str | None:
    """Say what kind of file begins with these bytes, and what to do; None if unknown."""
    lower = start[:64].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    return next((f"it is {kind}" for magic, kind in _KINDS if lower.startswith(magic)), None)
