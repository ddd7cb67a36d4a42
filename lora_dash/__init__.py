"""DashEngine and DashConfig under the name by which the idea is known: one base, many adapters.

    from lora_dash import DashConfig, DashEngine

Nothing is here but these names; `engine` has what they are.
"""

from engine import DashConfig, DashEngine

__all__ = ["DashConfig", "DashEngine"]
