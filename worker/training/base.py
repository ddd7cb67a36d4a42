"""A base that jobs are trained over: its weights, its tokenizer, a trainer with room for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from contract.training.job import JobError
from engine.model.config import ModelConfig
from engine.model.weights import load_weights
from engine.text.codec import TextCodec
from engine.training.memory import (
    MemoryPlan,
    bytes_per_element,
    dense_bytes,
    elements_of,
    plan_memory,
)
from engine.training.model import TrainingModel
from engine.training.run import RunRequest
from engine.training.trainer import BatchTrainer, TrainerConfig
from worker.training import device
from worker.training.draft_heads import HeadTraining
from worker.training.jobs import NamedJob, settings_of
from worker.training.judging import CaseJudge
from worker.training.rewards.rollouts import Rollouts
from worker.training.rewards.sampler import Sampler

# On a GPU a micro-batch fills the card. On a CPU it gains nothing from more tokens, so that runs
# take turns, and each gives the same bytes whoever else takes part.
TOKENS = {"cpu": 1024, "cuda": 16_384}
RUNS = {"cpu": 8, "cuda": 64}


def load_codec(folder: Path) -> TextCodec:
    """Return the base's tokenizer and chat template. Raises JobError without a tokenizer."""
    if not (folder / "tokenizer.json").is_file():
        raise JobError("base_model_dir", "there is no tokenizer.json")
    return TextCodec(folder)


@dataclass(frozen=True, slots=True)
class OpenBase:
    """A base in this process's memory.

    judge         scores adapters over the same weights
    token_budget  tokens that the trainer, and the judge, take in a pass
    rollouts      of runs of rewards; None: none of the jobs that the base was opened for is one
    """

    trainer: BatchTrainer
    codec: TextCodec
    judge: CaseJudge
    model: TrainingModel
    token_budget: int
    rollouts: Rollouts | None = None

    def train_heads(self, request: RunRequest, adapter: Mapping[str, torch.Tensor]) -> HeadTraining:
        """Return what trains draft heads over a run's adapter."""
        return HeadTraining(
            self.model, request=request, adapter=adapter, token_budget=self.token_budget
        )


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
    if threads := [named.job.num_threads for named in jobs if named.job.num_threads is not None]:
        torch.set_num_threads(max(threads))
    share = min((named.job.gpu_share or 1.0 for named in jobs), default=1.0)
    device.limit_gpu_memory(share)
    codec = load_codec(folder)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    samples = any(named.job.hyperparameters.samples for named in jobs)
    # On a CPU an engine is fast in float32 alone.
    dtype = torch.float32 if samples and kind == "cpu" else device.training_dtype()
    config = ModelConfig.from_folder(folder)
    weights = load_weights(folder, config, kind, dtype)
    budget, most = token_budget or TOKENS[kind], max_runs or RUNS[kind]
    runs = most if may_join else min(most, len(jobs))
    sampler = Sampler(folder, config, weights, dtype) if samples else None
    sizes = [elements_of(config, settings_of(named.job.hyperparameters)) for named in jobs]
    sizes.sort(reverse=True)
    later = sizes[0] * max(runs - len(jobs), 0)
    own = sum(sizes[:runs])
    on_host = device.host_bytes() // 2 // bytes_per_element(dtype)
    saves = any(named.job.hyperparameters.gradient_checkpointing for named in jobs)
    recomputed = config.num_layers if saves else 0
    plan = MemoryPlan(own + min(later, max(on_host - own, 0)), recomputed)
    if kind == "cuda":
        torch.cuda.empty_cache()  # frees the memory of the base before
        plan = plan_memory(
            config,
            dtype,
            free_bytes=device.free_gpu_bytes(share),
            token_budget=budget,
            wanted_elements=own + min(later, sizes[0]),
            least_elements=sizes[0],
            later_elements=later,
            dense_bytes=dense_bytes(weights.layers, dtype),
        )
    model = TrainingModel(config, weights, plan.num_recomputed)
    settings = TrainerConfig(
        token_budget=budget,
        max_runs=runs,
        runs_a_pass=1 if kind == "cpu" else None,
        pool_elements=plan.pool_elements,
    )
    trainer = BatchTrainer(model, settings)
    rollouts = None if sampler is None else Rollouts(trainer, sampler, codec)
    return OpenBase(trainer, codec, CaseJudge(model, codec, budget), model, budget, rollouts)
