"""Configuration: TOML file, mapping or object to a checked :class:`Config`."""

from __future__ import annotations

from kvstore.config.effective import Setting, effective
from kvstore.config.loader import ENVIRONMENT_VARIABLE, ConfigSource, load_config
from kvstore.config.model import Config
from kvstore.config.sections import DefaultsConfig, GateConfig, L1Config, TierConfig
from kvstore.config.template import render_template

__all__ = [
    "ENVIRONMENT_VARIABLE",
    "Config",
    "ConfigSource",
    "DefaultsConfig",
    "GateConfig",
    "L1Config",
    "Setting",
    "TierConfig",
    "effective",
    "load_config",
    "render_template",
]
