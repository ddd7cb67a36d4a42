"""The head of an adapter that classifies: what PEFT saves for the task SEQ_CLS.

The probabilities of the labels are softmax(head @ x), or a sigmoid where there is one label, with x
[hidden] what the base's LM head would read at the prompt's last token.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from contract.adapters.problems import Problem, shown
from contract.adapters.safetensors_header import FILE
from contract.adapters.tensor_names import PREFIX

TASK = "SEQ_CLS"
MAX_LABELS = 1024
MAX_LABEL_CHARS = 200
#: Names of the head's module in transformers' models; PEFT lists both, and saves the one there is.
MODULES = ("score", "classifier")
NAMES = tuple(f"{PREFIX}{module}.weight" for module in MODULES)
_NAME = re.compile(rf"{re.escape(PREFIX)}(?:{'|'.join(MODULES)})\.", re.ASCII)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Classifier:
    """The head: its tensor [labels, hidden], and its labels in their order."""

    name: str
    labels: tuple[str, ...]

    @property
    def num_labels(self) -> int:
        return len(self.labels)


def is_classifier_tensor(name: str) -> bool:
    """Return whether a tensor belongs to a classifier's head rather than to the LoRA."""
    return _NAME.match(name) is not None


def fit_classifier(
    shapes: Mapping[str, tuple[int, ...]], labels: Sequence[str], hidden: int
) -> tuple[Classifier | None, list[Problem]]:
    """Return the head of an adapter of the task SEQ_CLS, and what is wrong with it.

    shapes  of the tensors for which `is_classifier_tensor` holds; others are not looked at
    labels  those that the config names; none: they are LABEL_0, LABEL_1, …
    """
    found = [name for name in shapes if is_classifier_tensor(name)]
    if not found:
        message = f"it is missing, and the config's task is {TASK}: save the adapter again"
        return None, [Problem(FILE, NAMES[0], message)]
    if len(found) > 1 or found[0] not in NAMES:
        message = f"the head is one matrix, {' or '.join(NAMES)}: remove what is beside it"
        return None, [Problem(FILE, shown(next(n for n in found if n != NAMES[0])), message)]
    [name], shape = found, shapes[found[0]]
    most = len(labels) or MAX_LABELS
    least = len(labels) or 1
    if len(shape) != 2 or shape[1] != hidden or not least <= shape[0] <= most:
        number = f"{least} to {most}" if least < most else str(least)
        message = f"its shape is {list(shape)}; the head needs [labels, {hidden}], labels {number}"
        return None, [Problem(FILE, name, message)]
    names = tuple(labels) or tuple(f"LABEL_{i}" for i in range(shape[0]))
    return Classifier(name=name, labels=names), []
