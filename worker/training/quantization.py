"""Loads a base in four bits to train over it (QLoRA): a third of the memory, slower steps."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from contract.training import Hyperparameters, JobError


def loading_options(hyper: Hyperparameters, dtype: torch.dtype) -> dict[str, Any]:
    """Return what `from_pretrained` needs besides, to load the base as the run wants it.

    The linears of the decoder layers become NF4 with quantised scales, and are multiplied in
    `dtype`; embeddings, norms and the LM head stay as they are. PEFT's
    `prepare_model_for_kbit_training` would make those float32, which takes more memory than it is
    worth: our loop computes under autocast.
    Raises JobError if bitsandbytes is not installed.

    Source: "QLoRA: Efficient Finetuning of Quantized LLMs", Dettmers et al. 2023.
    """
    if hyper.quantization is None:
        return {}
    if importlib.util.find_spec("bitsandbytes") is None:
        raise JobError(
            "hyperparameters.quantization",
            f"{hyper.quantization!r} needs bitsandbytes, which this trainer does not have",
        )
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=hyper.quantization,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": config}
