"""The environment of child processes that compute."""

from __future__ import annotations

from collections.abc import Mapping

#: No passwords of databases, Redis and S3: these are all the variables that a child may have.
VARIABLES = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "LANG",
    "TZ",
    "TMPDIR",
    "VIRTUAL_ENV",
    "LD_LIBRARY_PATH",
    "XDG_CACHE_HOME",
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONUNBUFFERED",
    "PYTHONDONTWRITEBYTECODE",
    "CC",
)
PREFIXES = (
    "LC_",
    "OMP_",
    "MKL_",
    "KMP_",
    "CUDA_",
    "NVIDIA_",
    "NCCL_",
    "TORCH_",
    "TORCHINDUCTOR_",
    "PYTORCH_",
    "TRITON_",
)


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a child may have."""
    return {
        name: value
        for name, value in environment.items()
        if name in VARIABLES or name.startswith(PREFIXES)
    }
