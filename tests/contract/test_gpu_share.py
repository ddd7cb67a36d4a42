"""Worker and trainer divide a GPU that both use, and only such a one."""

from __future__ import annotations

import pytest

from contract.training.gpu_share import trainer_gpu_share


@pytest.mark.parametrize(
    ("text", "worker_gpu", "trainer_gpu", "share"),
    [
        ("", "0", "0", None),
        ("0", "0", "0", None),
        ("0.3", "0", "0", 0.3),
        ("0.3", "", "", 0.3),
        ("0.3", "0", "1", None),
        ("0.9", "GPU-1", "GPU-1", 0.9),
    ],
)
def test_what_is_shared(text: str, worker_gpu: str, trainer_gpu: str, share: float | None) -> None:
    assert trainer_gpu_share(text, worker_gpu, trainer_gpu) == share


@pytest.mark.parametrize("text", ["a third", "-0.1", "0.91", "30", "nan", "inf"])
def test_a_wrong_share_is_named(text: str) -> None:
    # Also where the GPUs differ, so that a mistake shows at once.
    with pytest.raises(ValueError, match="LORIKEET_TRAINER_GPU_SHARE"):
        trainer_gpu_share(text, "0", "1")
