"""Settings, one dataclass per concern: a field is declared once, with its type, default, limits and help.

The field's name is the keyword of `LLM(...)`, and the flag, `SKIM_*` variable and TOML key are made from it;
fields of `PrefillConfig` and `DecodeConfig` are per-request options of the server too. `declare.py` says how.
"""

from skim.config.declare import parse_bytes
from skim.config.engine import (
    AUTO_MASS,
    AUTO_RATIO,
    BUDGETS,
    DEFAULT_MODEL,
    DecodeConfig,
    EngineConfig,
    MemoryConfig,
    ModelConfig,
    PrefillConfig,
    ResidencyConfig,
    SchedulerConfig,
)
from skim.config.server import ServerConfig

__all__ = [
    "AUTO_MASS",
    "AUTO_RATIO",
    "BUDGETS",
    "DEFAULT_MODEL",
    "DecodeConfig",
    "EngineConfig",
    "MemoryConfig",
    "ModelConfig",
    "PrefillConfig",
    "ResidencyConfig",
    "SchedulerConfig",
    "ServerConfig",
    "parse_bytes",
]
