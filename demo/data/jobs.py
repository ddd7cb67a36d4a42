"""The demo's training jobs: each takes at most about two minutes on two CPU cores."""

from __future__ import annotations

from typing import Any

HYPERPARAMETERS: dict[str, dict[str, Any]] = {
    "acme": {"rank": 16, "alpha": 32, "max_steps": 22, "learning_rate": 2e-3, "batch_size": 8},
    "globex": {"rank": 8, "alpha": 16, "max_steps": 24, "learning_rate": 2e-3, "batch_size": 8},
}
