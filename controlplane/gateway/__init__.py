"""/v1 and LoRAX's addresses: HTTP in, HTTP out."""
