"""The API of LoRAX, for clients that speak it: no tables, no state, only words."""
