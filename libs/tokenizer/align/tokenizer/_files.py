"""Tokenizer files in a directory: loading, saving, the vendored copy."""

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from align.tokenizer._collection import no_collection
from align.tokenizer._errors import TokenizerError, VendoredWarning
from align.tokenizer._unicode import ASSETS

if TYPE_CHECKING:
    from align.tokenizer._tokenizer import Tokenizer

NAMES = (
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "added_tokens.json",
)
_SOURCES = ("tokenizer.json", "tokenizer.json.gz", "tekken.json", "tekken.json.gz", "tokenizer.model")
VENDORED = {"mistral-7b-v0.3": ("mistralai/Mistral-7B-v0.3", "mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-instruct-v0.3")}


def _read(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
        if path.suffix != ".gz":
            return raw
        import gzip  # here and below: what few callers need does not slow down the import

        return gzip.decompress(raw)
    except OSError as error:
        raise TokenizerError(f"{path}: cannot be read: {error}") from None
    except Exception as error:  # zlib.error and EOFError: a broken file
        raise TokenizerError(f"{path}: cannot be read: {error}") from None


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        if isinstance(error, TokenizerError):
            raise
        raise TokenizerError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: should be a JSON object")
    return value


def _config(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json, the special tokens map where the former is silent, and chat_template.jinja over both."""
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (directory / name).is_file():
            config.update({k: v for k, v in _json(directory / name).items() if v is not None})
    template = directory / "chat_template.jinja"
    if template.is_file():
        config["chat_template"] = _read(template).decode("utf-8", "replace")
    return config


def load(cls: "type[Tokenizer]", path: Path) -> "Tokenizer":
    if path.is_dir():
        found = next((p for p in (path / name for name in _SOURCES) if p.is_file()), None)
        if found is None:
            raise TokenizerError(f"{path}: no tokenizer.json in this directory (nor tekken.json, nor tokenizer.model)")
    elif path.is_file():
        found = path
    else:
        raise TokenizerError(f"{path}: no such file or directory; give a model directory or a tokenizer.json")
    with no_collection():
        return cls(_data(found), _config(found.parent), where=str(found), files=_present(found.parent, found))


def _data(path: Path) -> dict[str, Any]:
    """The file as tokenizer.json data: itself, or converted from tekken.json or SentencePiece's .model."""
    from align.tokenizer._sources import from_sentencepiece, from_tekken

    if path.suffix == ".model":
        return from_sentencepiece(_read(path), str(path))
    data = _json(path)
    if "model" not in data and isinstance(data.get("vocab"), list):
        return from_tekken(data, str(path))
    return data


def _present(directory: Path, main: Path) -> list[Path]:
    return [main, *(p for p in (directory / name for name in NAMES) if p.is_file() and p != main)]


def save(tokenizer: "Tokenizer", directory: Path) -> list[Path]:
    try:
        return _saved(tokenizer, directory)
    except OSError as error:
        raise TokenizerError(f"{directory}: the tokenizer's files cannot be written: {error}") from None


def _saved(tokenizer: "Tokenizer", directory: Path) -> list[Path]:
    import shutil

    directory.mkdir(parents=True, exist_ok=True)
    out = []
    for source in tokenizer.files:
        target = directory / source.name
        if target.exists() and target.samefile(source):
            out.append(target)
            continue
        out.append(Path(shutil.copyfile(source, target)))
    if not out:
        for name, value in (("tokenizer.json", tokenizer._data), ("tokenizer_config.json", tokenizer._config)):
            if value:
                out.append(directory / name)
                out[-1].write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", "utf-8")
    return out


def vendored_dir(name: str = "mistral-7b-v0.3") -> Path:
    """The directory of a tokenizer whose files are part of the library. Raises TokenizerError: no such name."""
    if name not in VENDORED:
        raise TokenizerError(f"no vendored tokenizer {name!r}; there is {', '.join(VENDORED)}")
    return ASSETS / name


def vendored(name: str = "mistral-7b-v0.3") -> "Tokenizer":
    """The tokenizer whose files are part of the library (assets/<name>/PROVENANCE.md): `mistral-7b-v0.3`."""
    from align.tokenizer._tokenizer import Tokenizer

    return Tokenizer.load(vendored_dir(name))


def resolve_tokenizer(path_or_name: "str | Path") -> "Tokenizer":
    """A model directory's own tokenizer when its files are whole; else the vendored copy, with a VendoredWarning that says why.

    path_or_name: a directory, a tokenizer.json, or a name (`mistral-7b-v0.3`, `mistralai/Mistral-7B-v0.3`, …). A directory without a
    tokenizer falls back only where its name or its config.json says that it is a Mistral-7B-v0.3; anything else raises TokenizerError.
    """
    from align.tokenizer._tokenizer import Tokenizer

    path = Path(path_or_name)
    name = _vendored_name(str(path_or_name))
    if not path.exists():
        if name:
            return vendored(name)
        raise TokenizerError(f"{path_or_name}: neither a directory, nor a tokenizer.json, nor a vendored tokenizer ({', '.join(VENDORED)})")
    try:
        return Tokenizer.load(path)
    except TokenizerError as error:
        name = name or _vendored_name(path.resolve().as_posix()) or (_by_config(path) if path.is_dir() else None)
        if not name:
            raise
        warnings.warn(f"{path} has no usable tokenizer ({error}); using the vendored {name}", VendoredWarning, stacklevel=2)
        return vendored(name)


def _vendored_name(text: str) -> str | None:
    text = text.lower().replace("--", "/")
    for name, others in VENDORED.items():
        if any(part.lower() in text for part in (name, *others)):
            return name
    return None


def _by_config(directory: Path) -> str | None:
    """Mistral-7B-v0.3 by its config.json: model_type mistral and the 32,768 entries that only v0.3 has."""
    try:
        config = _json(directory / "config.json")
    except TokenizerError:
        return None
    return "mistral-7b-v0.3" if config.get("model_type") == "mistral" and config.get("vocab_size") == 32768 else None
