"""A dataclass from a TOML file and `key=value` words, checked to the last field, and written back so that it loads equal."""

from align.config._cli import Invocation, caller_path, help_text, parse_cli, workspace_root
from align.config._load import load
from align.config._schema import ConfigError
from align.config._toml import dumps

__all__ = ["ConfigError", "Invocation", "caller_path", "dumps", "help_text", "load", "parse_cli", "workspace_root"]
