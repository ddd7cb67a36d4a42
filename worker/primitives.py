"""Train adapters call by call: `python -m worker.primitives BASE_FOLDER [--gpu-share SHARE]`.

Each line of standard input is an order, with an `id` that its answer has, for a client; a client
has one order under way at a time:

    {"open": CLIENT, "tenant", "settings": {"rank", "alpha", "seed", "target_modules"}, "state",
     "keeps_optimiser"}     state: a file, or null for PEFT's initial adapter
    {"pass": CLIENT, "file"}    `contract.training.calls`; its log-probabilities go to FILE.out
    {"step": CLIENT, "adam": {…}}
    {"state": CLIENT, "file", "has_gradient"}   writes its adapter, the optimiser's moments, and
                            the gradient that is not used yet
    {"adapter": CLIENT, "folder", "base"}       writes what PEFT reads
    {"close": CLIENT}       forgets it

Standard output has an answer to each: {"id", …}, with `error` and `field` for a call that is wrong,
or with `full` when there is no room for another client now. The end of the input ends the process.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TextIO

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from contract.training.calls import PassRows
from contract.training.job import Hyperparameters
from engine.model.config import ModelConfig
from engine.model.weights import load_weights
from engine.primitives.losses import TokenLoss
from engine.primitives.trainer import Adam, CallTrainer, Pass, State
from engine.training.errors import TrainingError
from engine.training.memory import (
    MemoryPlan,
    bytes_per_element,
    dense_bytes,
    elements_of,
    plan_memory,
)
from engine.training.model import TrainingModel
from engine.training.run import RunSettings
from engine.training.trainer import TrainerConfig
from worker.child import take_stdout
from worker.training import device
from worker.training.adapter_folder import write_adapter
from worker.training.base import RUNS, TOKENS
from worker.training.disk import save_peft

Order = dict[str, Any]
#: The rank of the clients that there is to be room for; larger ones take the room of several.
_RANK = 32


def open_trainer(folder: Path, share: float) -> CallTrainer:
    """Load the base on this machine's device, with room for clients of rank 32."""
    device.limit_gpu_memory(share)
    kind, dtype = "cuda" if torch.cuda.is_available() else "cpu", device.training_dtype()
    config = ModelConfig.from_folder(folder)
    weights = load_weights(folder, config, kind, dtype)
    budget, one = TOKENS[kind], elements_of(config, RunSettings(rank=_RANK))
    room = device.host_bytes() // 4 // bytes_per_element(dtype)
    plan = MemoryPlan(min(8 * one * RUNS[kind], room), 0)
    if kind == "cuda":
        plan = plan_memory(
            config,
            dtype,
            free_bytes=device.free_gpu_bytes(share),
            token_budget=budget,
            wanted_elements=8 * one,
            least_elements=one,
            later_elements=RUNS[kind] * one,
            dense_bytes=dense_bytes(weights.layers, dtype),
        )
    settings = TrainerConfig(
        token_budget=budget,
        runs_a_pass=1 if kind == "cpu" else None,
        pool_elements=plan.pool_elements,
    )
    return CallTrainer(TrainingModel(config, weights, plan.num_recomputed), settings)


class Calls:
    """Does orders with a trainer, and answers each."""

    def __init__(self, trainer: CallTrainer, out: TextIO) -> None:
        self._trainer, self._out = trainer, out
        self._settings: dict[str, RunSettings] = {}
        self._passes: dict[str, Order] = {}
        self._steps: dict[str, Order] = {}
        self._orders: dict[str, Callable[[str, Order], None]] = {
            "open": self._open,
            "pass": self._pass,
            "step": self._step,
            "state": self._state,
            "adapter": self._adapter,
            "close": self._close,
        }

    def run(self, orders: SimpleQueue[Order | None]) -> None:
        """Do what is ordered until None comes."""
        self._answer({"id": 0}, device=device.device_name())
        while True:
            while self._is_idle or not orders.empty():
                order = orders.get()
                if order is None:
                    return
                self._do(order)
            self._make_steps()
            for passed in self._trainer.step():
                order = self._passes.pop(passed.caller)
                Path(f"{order['file']}.out").write_bytes(passed.logprobs.numpy().tobytes())
                self._answer(order, loss=passed.loss)

    @property
    def _is_idle(self) -> bool:
        return not self._steps and not self._trainer.has_work

    def _do(self, order: Order) -> None:
        what = next(name for name in self._orders if name in order)
        try:
            self._orders[what](order[what], order)
        except TrainingError as error:
            self._answer(order, error=error.message, field=error.param)

    def _answer(self, order: Order, **said: Any) -> None:
        self._out.write(json.dumps({"id": order["id"], **said}) + "\n")
        self._out.flush()

    def _open(self, client: str, order: Order) -> None:
        given = order["settings"]
        settings = RunSettings(**{**given, "target_modules": tuple(given["target_modules"])})
        settings.check()
        state = None if order["state"] is None else _read_state(Path(order["state"]))
        if state is not None and not order["keeps_optimiser"]:
            state = State({"master": state.tensors["master"]}, 0)
        if self._trainer.open(client, order["tenant"], settings, state):
            self._settings[client] = settings
            self._answer(order)
        else:
            self._answer(order, full=True)

    def _pass(self, client: str, order: Order) -> None:
        rows = PassRows.decode(Path(order["file"]).read_bytes())
        asked = Pass(
            token_ids=torch.frombuffer(rows.token_ids, dtype=torch.int32),
            targets=torch.frombuffer(rows.targets, dtype=torch.int32).long(),
            weights=torch.frombuffer(rows.weights, dtype=torch.float32),
            sampled=torch.frombuffer(rows.sampled, dtype=torch.float32),
            lengths=rows.lengths,
            loss=TokenLoss(rows.loss, rows.low, rows.high),
            is_forward=rows.is_forward,
        )
        self._trainer.begin(client, asked)
        self._passes[client] = order

    def _step(self, client: str, order: Order) -> None:
        self._steps[client] = order

    def _make_steps(self) -> None:
        """Make the steps of all clients that asked for one, together."""
        orders, self._steps = self._steps, {}
        if not orders:
            return
        adams = {client: Adam(**order["adam"]) for client, order in orders.items()}
        norms = self._trainer.optimise(adams)
        for client, order in orders.items():
            self._answer(order, norm=str(norms[client]))

    def _state(self, client: str, order: Order) -> None:
        state = self._trainer.state(client, has_gradient=order["has_gradient"])
        metadata = {"steps": str(state.steps)}
        save_file(dict(state.tensors), Path(order["file"]), metadata=metadata)
        self._answer(order)

    def _adapter(self, client: str, order: Order) -> None:
        settings = self._settings[client]
        hyper = Hyperparameters(rank=settings.rank, alpha=settings.alpha)
        save = functools.partial(save_peft, self._trainer.adapter(client), hyper)
        write_adapter(save, order["base"], Path(order["folder"]))
        self._answer(order)

    def _close(self, client: str, order: Order) -> None:
        self._trainer.close(client)
        del self._settings[client]
        self._answer(order)


def _read_state(path: Path) -> State:
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        return State(tensors, int(file.metadata()["steps"]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m worker.primitives")
    parser.add_argument("base", type=Path)
    parser.add_argument("--gpu-share", type=float, default=1.0)
    options = parser.parse_args()
    out = take_stdout()
    orders: SimpleQueue[Order | None] = SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            orders.put(json.loads(line))
        orders.put(None)

    threading.Thread(target=read, name="orders", daemon=True).start()
    Calls(open_trainer(options.base, options.gpu_share), out).run(orders)


if __name__ == "__main__":
    main()
