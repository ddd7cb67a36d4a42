"""A base that jobs are trained over: its weights, its tokenizer, a trainer with room for them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.model.config import ModelConfig
from engine.model.weights import load_weights
from engine.text.codec import TextCodec
from engine.training.memory import MemoryPlan, bytes_per_element, elements_of, plan_memory
from engine.training.model import TrainingModel
from engine.training.trainer import BatchTrainer, TrainerConfig
from worker.batch_training.jobs import NamedJob, settings_of
from worker.batch_training.judging import CaseJudge
from worker.training.loop import limit_gpu_memory, load_codec, training_dtype

# On a GPU a micro-batch fills the card. On a CPU it gains nothing from more tokens, so that runs
# take turns, and each gives the same bytes whoever else takes part.
_TOKENS = {"cpu": 1024, "cuda": 16_384}
_RUNS = {"cpu": 8, "cuda": 64}


def _free_bytes(share: float) -> int:
    """Return what this process can still allocate on the GPU, of its share of the memory."""
    free, total = torch.cuda.mem_get_info()
    return min(free, int(share * total) - torch.cuda.memory_reserved())


def _host_bytes() -> int:
    """Return the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass(frozen=True, slots=True)
class OpenBase:
    """judge  scores adapters over the same weights, as many tokens a pass as the trainer takes"""

    trainer: BatchTrainer
    codec: TextCodec
    judge: CaseJudge


def open_base(
    folder: Path,
    jobs: Sequence[NamedJob],
    *,
    token_budget: int | None = None,
    max_runs: int | None = None,
    may_join: bool = False,
) -> OpenBase:
    """Load the base on this machine's device, for these jobs.

    may_join  whether others may join them: then there is room for `max_runs` as large as the
              largest; on a GPU for as many as cost no recomputation, and for one in any case, on a
              CPU for as many as half of the machine's memory holds
    Raises UnsupportedModel for a base that the engine does not know, JobError for a tokenizer that
    cannot be trained with.
    """
    threads = [named.job.num_threads for named in jobs if named.job.num_threads is not None]
    if threads:
        torch.set_num_threads(max(threads))
    share = min((named.job.gpu_share or 1.0 for named in jobs), default=1.0)
    limit_gpu_memory(share)
    codec = load_codec(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config, dtype = ModelConfig.from_folder(folder), training_dtype()
    weights = load_weights(folder, config, device, dtype)
    budget = token_budget or _TOKENS[device]
    most = max_runs or _RUNS[device]
    runs = most if may_join else min(most, len(jobs))
    sizes = [elements_of(config, settings_of(named.job.hyperparameters)) for named in jobs]
    sizes.sort(reverse=True)
    later = sizes[0] * max(runs - len(jobs), 0)
    own = sum(sizes[:runs])
    on_host = _host_bytes() // 2 // bytes_per_element(dtype)
    plan = MemoryPlan(own + min(later, max(on_host - own, 0)), 0)
    if device == "cuda":
        torch.cuda.empty_cache()  # of the base before
        plan = plan_memory(
            config,
            dtype,
            free_bytes=_free_bytes(share),
            token_budget=budget,
            wanted_elements=own + min(later, sizes[0]),
            least_elements=sizes[0],
            later_elements=later,
        )
    model = TrainingModel(config, weights, plan.num_recomputed)
    settings = TrainerConfig(
        token_budget=budget,
        max_runs=runs,
        runs_a_pass=1 if device == "cpu" else None,
        pool_elements=plan.pool_elements,
    )
    return OpenBase(BatchTrainer(model, settings), codec, CaseJudge(model, codec, budget))
