"""Aliases: names that callers use, and what stands behind them."""
