"""Small tables made on the host for a micro-batch."""

from __future__ import annotations

import torch


def upload(table: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy a table to the device without waiting for the work that it has still to do."""
    if torch.device(device).type == "cpu" or not table.numel():
        return table.to(device)
    return table.pin_memory().to(device, non_blocking=True)
