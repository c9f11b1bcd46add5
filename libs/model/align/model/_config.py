"""ModelConfig: what an HF config.json says about a dense decoder, read and written without loss."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from align.model._errors import ModelError

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",  # Llama 2 and 3, SmolLM2
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",  # Qwen2 and Qwen2.5
    "qwen3": "Qwen3ForCausalLM",
}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_ROPE_NUMBERS = ("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow")  # that a scaling may have

# What transformers assumes of a key that a config.json leaves out, where it is not what ModelConfig assumes.
_ABSENT: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    "mistral": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096},
}
# Fields that may be null in a config.json; any other null is a key left out.
_OPTIONAL = (
    "num_key_value_heads",
    "head_dim",
    "rope_scaling",
    "sliding_window",
    "layer_types",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "dtype",
)
# A config.json that lies is refused by name: by these sizes a model could still be laid out, and more layers would take for ever.
_MOST_OF_A_SIZE = 1 << 24
_MOST = {"num_hidden_layers": 1 << 12, "max_position_embeddings": 1 << 40, "sliding_window": 1 << 40}
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True)
class ModelConfig:
    """A dense decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU. Field names are those of HF's config.json.

    `num_key_value_heads` and `head_dim` are filled in when None. `rope_scaling` is None or a dict with `rope_type` (linear, llama3,
    yarn) and its parameters. `dtype` is the dtype that the weights are stored in, by name ("float32", "bfloat16", "float16").
    `extra` keeps every key of a config.json that is not a field, and `to_hf` writes them back.

    Raises:
        ModelError: a field that no such model can have; the message names it.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = None  # type: ignore[assignment]  # None is filled in: num_attention_heads
    head_dim: int = None  # type: ignore[assignment]  # None is filled in: hidden_size / num_attention_heads
    model_type: str = "mistral"
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    sliding_window: int | None = None
    use_sliding_window: bool = False
    max_window_layers: int = 28
    layer_types: tuple[str, ...] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    dtype: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.model_type not in tuple(ARCHITECTURES):  # a tuple's search takes lists and objects too
            raise ModelError(f"model_type {self.model_type!r} is not supported; supported are {', '.join(ARCHITECTURES)}")
        self._check_numbers(_REQUIRED + ("max_position_embeddings",), int)
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ModelError(
                    f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}; give head_dim"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        self._check_numbers(("num_key_value_heads", "head_dim") + (("sliding_window",) if self.sliding_window is not None else ()), int)
        self._check_numbers(("rms_norm_eps", "rope_theta"), float)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads {self.num_key_value_heads}"
            )
        if self.num_attention_heads * self.head_dim > _MOST_OF_A_SIZE:
            raise ModelError(
                f"num_attention_heads {self.num_attention_heads} of head_dim {self.head_dim} are more than {_MOST_OF_A_SIZE:g} wide"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim is {self.head_dim}; rotary positions want an even number")
        self._check_kinds()
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ModelError(f"layer_types has {len(self.layer_types)} entries for num_hidden_layers {self.num_hidden_layers}")
        for kind in self.layer_types or ():
            if kind not in ("full_attention", "sliding_attention"):
                raise ModelError(f"layer_types holds {kind!r}; supported are full_attention and sliding_attention")
        _check_rope_scaling(self.rope_scaling)

    def _check_kinds(self) -> None:
        def check(name: str, values: Iterable[Any], kind: Any, told: str) -> None:
            for value in values:
                if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                    raise ModelError(f"{name} is {getattr(self, name)!r}; it must be {told}")

        for name in ("use_sliding_window", "tie_word_embeddings", "attention_bias", "mlp_bias"):
            check(name, (getattr(self, name),), bool, "true or false")
        check("max_window_layers", (self.max_window_layers,), int, "an integer")
        check("initializer_range", (self.initializer_range,), int | float, "a number")
        check("layer_types", () if self.layer_types is None else (self.layer_types,), tuple, "a list or null")
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(self, name)
            many = value if isinstance(value, tuple) and name == "eos_token_id" else () if value is None else (value,)
            check(name, many, int, "an integer or null")

    def _check_numbers(self, names: tuple[str, ...], kind: type[int] | type[float]) -> None:
        for name in names:
            value: Any = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | kind) or not value > 0:
                raise ModelError(f"{name} is {value!r}; it must be a positive {'integer' if kind is int else 'number'}")
            most = 1e30 if kind is float else _MOST.get(name, _MOST_OF_A_SIZE)
            if value > most:
                raise ModelError(f"{name} is {value!r}; it must be at most {most:g}, beyond which no such model is")

    @property
    def max_length(self) -> int:
        """The longest sequence, in tokens: max_position_embeddings, stretched by the factor of linear and yarn scaling."""
        scaling = self.rope_scaling or {}
        factor = scaling.get("factor", 1.0)
        if scaling.get("rope_type") == "linear":
            return int(self.max_position_embeddings * factor)
        if scaling.get("rope_type") == "yarn":
            original = scaling.get("original_max_position_embeddings", self.max_position_embeddings)
            return max(self.max_position_embeddings, int(original * factor))
        return self.max_position_embeddings

    def window(self, layer: int) -> int | None:
        """How many positions a query of this layer sees, itself included; None: all before it."""
        if self.sliding_window is None or self.model_type == "llama":
            return None
        if self.model_type == "mistral":
            return self.sliding_window
        if not self.use_sliding_window:
            return None
        if self.layer_types is not None:
            return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None
        return self.sliding_window if layer >= self.max_window_layers else None

    @property
    def qkv_bias(self) -> bool:
        """Whether the query, key and value projections have a bias."""
        return self.model_type == "qwen2" or (self.attention_bias and self.model_type != "mistral")

    @property
    def output_bias(self) -> bool:
        """Whether the output projection of the attention has a bias."""
        return self.attention_bias and self.model_type in ("llama", "qwen3")

    @property
    def mlp_has_bias(self) -> bool:
        """Whether the three projections of the MLP have a bias."""
        return self.mlp_bias and self.model_type == "llama"

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised per head before the rotation (Qwen3)."""
        return self.model_type == "qwen3"

    def with_dtype(self, dtype: str) -> "ModelConfig":
        """The same configuration, stored in another dtype."""
        return replace(self, dtype=dtype)

    def with_rope_scaling(self, scaling: Mapping[str, Any]) -> "ModelConfig":
        """The same configuration with other rotary positions."""
        return replace(self, rope_scaling=scaling)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """Reads the object of a config.json, of transformers 4 (rope_theta, rope_scaling, torch_dtype) or 5 (rope_parameters, dtype).

        Raises:
            ModelError: an unsupported model_type, activation or rope type, a missing or impossible value; the message names it.
        """
        raw = dict(raw)
        kind = raw.get("model_type")
        if kind not in tuple(ARCHITECTURES):
            raise ModelError(f"model_type {kind!r} is not supported; supported are {', '.join(ARCHITECTURES)}")
        missing = [name for name in _REQUIRED if raw.get(name) is None]
        if missing:
            raise ModelError(f"config.json lacks {', '.join(missing)}")
        if raw.get("hidden_act", "silu") != "silu":
            raise ModelError(f"hidden_act {raw['hidden_act']!r} is not supported; {kind} models use 'silu'")
        values = {**_ABSENT[kind], **{f.name: raw.pop(f.name) for f in fields(cls) if f.name in raw and f.name != "extra"}}
        values["rope_theta"], values["rope_scaling"] = _read_rope(values, raw.pop("rope_parameters", None), raw)
        old_dtype = raw.pop("torch_dtype", None)
        values["dtype"] = _dtype_name(values.get("dtype") or old_dtype)
        for name in ("layer_types", "eos_token_id"):
            if isinstance(values.get(name), list):
                values[name] = tuple(values[name])
        values = {name: value for name, value in values.items() if value is not None or name in _OPTIONAL}
        return cls(**values, extra=raw)

    def to_hf(self) -> dict[str, Any]:
        """The object of a config.json that transformers 4 and 5 and vLLM read: both spellings of rope and dtype, `extra` as it was."""
        out: dict[str, Any] = {"architectures": [ARCHITECTURES[self.model_type]], **self.extra, "model_type": self.model_type}
        out.setdefault("hidden_act", "silu")
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "extra" or (item.name in _ONLY_SOME and self.model_type not in _ONLY_SOME[item.name]):
                continue
            if item.name == "layer_types" and value is None:
                continue
            out[item.name] = list(value) if isinstance(value, tuple) else value
        scaling = dict(self.rope_scaling) if self.rope_scaling else None
        out["rope_scaling"] = scaling
        out["rope_parameters"] = {**(scaling or {"rope_type": "default"}), "rope_theta": self.rope_theta}
        out["torch_dtype"] = self.dtype
        return out


# Fields that mean something to these model types alone.
_ONLY_SOME = {
    "sliding_window": ("mistral", "qwen2", "qwen3"),
    "use_sliding_window": ("qwen2", "qwen3"),
    "max_window_layers": ("qwen2", "qwen3"),
    "layer_types": ("qwen2", "qwen3"),
    "attention_bias": ("llama", "qwen3"),
    "mlp_bias": ("llama",),
}


def _dtype_name(value: Any) -> str | None:
    name = None if value is None else str(value).removeprefix("torch.")
    if name not in (None, "float32", "bfloat16", "float16"):
        raise ModelError(f"dtype {name!r} in config.json is not supported; supported are float32, bfloat16, float16")
    return name


def _read_rope(values: dict[str, Any], parameters: Any, raw: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Joins the two spellings; where both are there they must agree."""
    scaling = values.get("rope_scaling")
    for name, value in (("rope_scaling", scaling), ("rope_parameters", parameters)):
        if value is not None and not isinstance(value, Mapping):
            raise ModelError(f"{name} is {value!r}; it must be an object or null")
    factor = (parameters or {}).get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if factor not in (None, 1, 1.0):
        raise ModelError(f"partial_rotary_factor {factor} is not supported; only 1.0 is")
    old, new = dict(scaling or {}), dict(parameters or {})
    found = (values.get("rope_theta"), old.pop("rope_theta", None), new.pop("rope_theta", None))
    thetas = [theta for theta in found if theta is not None]
    if any(theta != thetas[0] for theta in thetas):
        raise ModelError(f"rope_theta has different values in config.json: {thetas}; remove one")
    new.pop("partial_rotary_factor", None)
    old, new = _normalised(old), _normalised(new)
    if scaling and parameters and old != new:
        raise ModelError(f"rope_scaling {old} and rope_parameters {new} differ in config.json; remove one")
    return thetas[0] if thetas else 10000.0, old or new or None


def _normalised(scaling: dict[str, Any]) -> dict[str, Any]:
    kind = scaling.pop("type", None)
    kind = scaling.pop("rope_type", kind)
    return {} if kind in (None, "default") else {"rope_type": kind, **scaling}


def _check_rope_scaling(scaling: Mapping[str, Any] | None) -> None:
    if scaling is None:
        return
    kind = scaling.get("rope_type")
    if kind not in ROPE_TYPES[1:]:
        raise ModelError(f"rope_type {kind!r} is not supported; supported are {', '.join(ROPE_TYPES)}")
    needed = {"linear": ("factor",), "yarn": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}[kind]
    for name in (*needed, *(name for name in _ROPE_NUMBERS if scaling.get(name) is not None)):
        value: Any = scaling.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MOST_OF_A_SIZE:
            raise ModelError(f"rope_scaling of type {kind} has {name} {value!r}; it must be a positive number, at most {_MOST_OF_A_SIZE:g}")
