"""Find one cause that explains many misfitting tensors: another vocabulary, rank or layers.

Each is told in one sentence, before what else is wrong; its tensors need no sentences of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from contract.adapters.base_shape import EMBEDDING, HEAD
from contract.adapters.families import STACKED
from contract.adapters.peft_config import FILE as CONFIG_FILE
from contract.adapters.peft_config import AdaptedModules
from contract.adapters.problems import Problem, shown
from contract.adapters.safetensors_header import FILE as TENSORS_FILE
from contract.adapters.tensor_names import BIAS, MAGNITUDE, PREFIX, WHOLE, Key, matrices

Shape = tuple[int, ...]


class Faults:
    """The faults of one adapter; those of one kind become one sentence: the first, and a number."""

    def __init__(self) -> None:
        self._found: list[Problem] = []
        self._alike: dict[str, list[Problem]] = {}

    def add(self, *problems: Problem) -> None:
        self._found += problems

    def add_first(self, *problems: Problem) -> None:
        self._found[:0] = problems

    def complain(self, field: str, message: str) -> None:
        self._found.append(Problem(CONFIG_FILE, field, message))

    def complain_of(self, name: str, message: str, kind: str) -> None:
        """Add a fault that many tensors may share."""
        self.add_alike(Problem(TENSORS_FILE, shown(name), message), kind)

    def add_alike(self, problem: Problem, kind: str) -> None:
        self._alike.setdefault(kind, []).append(problem)

    @property
    def problems(self) -> list[Problem]:
        """Return the problems, first those that are one sentence by themselves."""
        told = list(self._found)
        for first, *others in self._alike.values():
            message = first.message
            if others:
                message += (
                    "; 1 other has the same fault"
                    if len(others) == 1
                    else f"; {len(others)} others have the same fault"
                )
            told.append(Problem(first.file, first.field, message))
        return told


#: Index of a tensor's axis that runs along the vocabulary.
_VOCABULARY_AXIS: Mapping[Key, int] = {
    (EMBEDDING, "lora_embedding_A"): 1,
    **dict.fromkeys(((HEAD, "lora_B.weight"), (HEAD, BIAS), (HEAD, MAGNITUDE)), 0),
    **{(module, part): 0 for module in (EMBEDDING, HEAD) for part in WHOLE},
}


def vocabulary_problem(
    unfit: Mapping[Key, Shape], needed: Mapping[Key, Shape]
) -> tuple[Problem | None, set[Key]]:
    """Return a problem if the vocabularies differ, and the tensors that show it.

    unfit   shapes of the tensors that do not fit
    needed  shapes that would
    """
    explained = set()
    problem = None
    for key, shape in unfit.items():
        axis = _VOCABULARY_AXIS.get(key)
        need = needed[key]
        if axis is None or len(shape) != len(need):
            continue
        if shape[:axis] + shape[axis + 1 :] != need[:axis] + need[axis + 1 :]:
            continue
        explained.add(key)
        message = (
            f"its vocabulary has {shape[axis]} tokens, but the base model has {need[axis]}: "
            "choose the base model that it was trained on, with the tokens that were added to it"
        )
        problem = problem or Problem(TENSORS_FILE, f"{PREFIX}{'.'.join(key)}", message)
    return problem, explained


def rank_problem(
    unfit: Mapping[Key, Shape], needed: Mapping[Key, Shape], adapted: AdaptedModules
) -> tuple[Problem | None, set[Key]]:
    """Return a problem if matrices have other ranks than the config says, and those matrices.

    Other arguments as in `vocabulary_problem`
    """
    ranks: dict[str, int] = {}
    for module, _ in unfit:
        a, b = ((module, part) for part in matrices(module))
        if module.endswith(STACKED):
            continue  # its tensors have the ranks of all experts
        if a in unfit and b in unfit and len(unfit[a]) == len(unfit[b]) == 2:
            rank = unfit[a][0]
            if (unfit[a], unfit[b]) == ((rank, needed[a][1]), (needed[b][0], rank)):
                ranks[module] = rank
    if not ranks:
        return None, set()
    module, rank = next(iter(ranks.items()))
    pairs = {(adapted.rank(module), rank) for module, rank in ranks.items()}
    field = "rank_pattern" if module in adapted.ranks else "r"
    of = f" for {module}" if len(pairs) > 1 or field == "rank_pattern" else ""
    others = f" (and for {len(ranks) - 1} other modules)" if of and ranks.keys() - {module} else ""
    message = (
        f"it is {adapted.rank(module)}{of}, but the tensors have rank {rank}{others}: upload the "
        f"{CONFIG_FILE} that was saved with them"
    )
    explained = {(module, part) for module in ranks for part in matrices(module)}
    return Problem(CONFIG_FILE, field, message), explained


def layers_problem(
    absent: Iterable[str],
    there: Iterable[str],
    adapted: AdaptedModules,
    layers: Mapping[str, int | None],
) -> Problem | None:
    """Return a problem if the file has tensors of fewer layers than the config asks for; else None.

    absent  modules without a tensor in the file
    there   modules that are complete
    layers  of all modules
    """
    missing = {layers[module] for module in absent}
    present = sorted({layer for module in there if (layer := layers[module]) is not None})
    config = adapted.config
    is_by_path = not missing.isdisjoint({layers.get(name) for name in config.target_names} - {None})
    if None in missing or not present or not missing.isdisjoint(present) or is_by_path:
        return None
    names = sorted({module.rpartition(".")[2] for module in there})
    fix = f'"layers_to_transform": {json.dumps(present)}'
    if not config.target_names:  # an expression: PEFT then takes no layers
        fix = f'"target_modules": {json.dumps(names)}, {fix}'
    count = "1 layer" if len(present) == 1 else f"{len(present)} layers"
    message = f"the file has tensors of {count} alone: write {fix}"
    return Problem(CONFIG_FILE, "layers_to_transform", message)
