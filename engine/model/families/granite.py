"""Granite 3 and 4, dense: multipliers of embeddings, residuals, scores and logits."""

from __future__ import annotations

from engine.model.fields import Fields
from engine.model.plan import Plan


def read_plan(fields: Fields) -> Plan:
    """Read the plan; the sums of the residual are kept divided by its multiplier.

    So nothing is multiplied in a layer: a norm of x / m is that of x if its eps is divided by m^2.
    """
    multiplier = fields.number("residual_multiplier", 1.0)
    return Plan(
        eps=fields.epsilon() / multiplier**2,
        rotations=fields.rotations(),
        embedding_scale=fields.number("embedding_multiplier", 1.0) / multiplier,
        attention_scale=fields.number("attention_multiplier", 1.0),
        logit_scale=1 / fields.number("logits_scaling", 1.0),
    )
