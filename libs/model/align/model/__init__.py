"""Dense decoders (Mistral, Llama 2 and 3, Qwen2, Qwen2.5, Qwen3, SmolLM2) from an HF directory, and back into one."""

from align.model._attention import FORWARD_IMPLS, pick_forward_impl
from align.model._cache import KVCache
from align.model._config import ModelConfig
from align.model._decoder import Decoder, init
from align.model._directory import load, load_config, save
from align.model._errors import ModelError
from align.model._fused import lay_side_by_side, side_by_side
from align.model._gguf_convert import convert_gguf
from align.model._gguf_export import export_gguf
from align.model._step import Stepper

__all__ = [
    "FORWARD_IMPLS",
    "Decoder",
    "KVCache",
    "ModelConfig",
    "ModelError",
    "Stepper",
    "convert_gguf",
    "export_gguf",
    "init",
    "lay_side_by_side",
    "load",
    "load_config",
    "pick_forward_impl",
    "save",
    "side_by_side",
]
