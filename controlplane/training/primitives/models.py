"""Training clients, and the states that they saved."""

from __future__ import annotations

from django.db import models

from controlplane.adapters.models import AdapterVersion, BaseModel
from controlplane.tenancy.scoping import TenantModel


class TrainingClient(TenantModel):
    """An adapter that its owner's loop trains call by call.

    Its newest state is in the memory of the trainer named by `trainer`; else under `state_key` in
    the store; with neither it is PEFT's initial adapter of its seed, or, if `is_lost`, gone.
    """

    MODEL_FIELD = "adapter_name"

    #: The client's own name of it: `SESSION:train:NUMBER`.
    model_id = models.CharField(max_length=100)
    base_model = models.ForeignKey(BaseModel, on_delete=models.CASCADE, related_name="+")
    #: The adapter that `save_weights_for_sampler` adds versions to.
    adapter_name = models.CharField(max_length=63)
    #: rank, alpha, seed, target_modules, as `worker.primitives` takes them.
    settings = models.JSONField()
    trainer = models.CharField(max_length=32, blank=True, default="")
    state_key = models.CharField(max_length=200, blank=True, default="")
    state_bytes = models.BigIntegerField(default=0)
    is_lost = models.BooleanField(default=False)
    #: Number of its rows of usage.
    num_usages = models.PositiveIntegerField(default=0)
    used_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["tenant", "model_id"], name="training_client_once"),
        ]
        indexes = [models.Index(fields=["used_at"], name="training_clients_by_use")]

    def __str__(self) -> str:
        return self.model_id


class ClientState(TenantModel):
    """A state that a client saved: to train on from (`weights`), or to sample from (a version)."""

    MODEL_FIELD = "client__adapter_name"

    class Kind(models.TextChoices):
        WEIGHTS = "weights"
        SAMPLER = "sampler_weights"

    client = models.ForeignKey(TrainingClient, on_delete=models.CASCADE, related_name="states")
    kind = models.CharField(max_length=16, choices=Kind)
    name = models.CharField(max_length=128)
    #: The key of the store; empty: it is a version.
    key = models.CharField(max_length=200, blank=True, default="")
    num_bytes = models.BigIntegerField(default=0)
    version = models.ForeignKey(
        AdapterVersion, null=True, on_delete=models.CASCADE, related_name="+"
    )
    #: None: it is kept until it is deleted.
    expires_at = models.DateTimeField(null=True, db_index=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["client", "kind", "name"], name="training_client_state_once"
            ),
        ]

    def __str__(self) -> str:
        return self.path

    @property
    def path(self) -> str:
        """Return its name for clients."""
        return f"tinker://{self.client.model_id}/{self.kind}/{self.name}"
