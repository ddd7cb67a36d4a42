"""Divide the memory of a GPU that a worker and a trainer share.

Both read the same settings: the trainer takes no more than its share, the worker leaves it free.
"""

from __future__ import annotations

#: Largest share of a trainer: with more, the worker has hardly any memory for the model.
MOST = 0.9


def trainer_gpu_share(text: str, worker_gpu: str, trainer_gpu: str) -> float | None:
    """Return the trainer's share; None if none is set, or if worker and trainer have a GPU each.

    text  LORIKEET_TRAINER_GPU_SHARE

    Raises ValueError, which names the variable.
    """
    try:
        share = float(text or "0")
    except ValueError:
        share = -1.0
    # Written so that NaN, which fails every comparison, is refused.
    if not 0.0 <= share <= MOST:
        raise ValueError(f"LORIKEET_TRAINER_GPU_SHARE is {text!r}, not a number from 0 to {MOST}")
    return share if share and worker_gpu == trainer_gpu else None
