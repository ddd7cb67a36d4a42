"""DashEngine and DashConfig, the offline API of `engine`: one base model, many adapters.

    from lora_dash import DashConfig, DashEngine

This package only gives these names; the code is in `engine.dash`.
"""

from engine import DashConfig, DashEngine

__all__ = ["DashConfig", "DashEngine"]
