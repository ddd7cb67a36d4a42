"""LoRA of many adapters in one batch: a shrink into rank space, an expand out of it."""
