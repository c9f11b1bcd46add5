"""Checkpoints that are whole or not there: HF layout, safetensors and JSON, no pickle."""

from align.checkpoint._errors import CheckpointError, CheckpointWarning
from align.checkpoint._load import Checkpoint, load
from align.checkpoint._save import Adapter, Saver, save
from align.checkpoint._shelf import latest, newest

__all__ = ["Adapter", "Checkpoint", "CheckpointError", "CheckpointWarning", "Saver", "latest", "load", "newest", "save"]
