"""tokenizer.json's parts: each `…_from` turns one JSON object into a component, or raises with its JSON path."""

from collections.abc import Iterator
from typing import Any, NoReturn

from align.tokenizer import _decode as D
from align.tokenizer import _normalise as N
from align.tokenizer import _pretokenise as P
from align.tokenizer import _unicode as U
from align.tokenizer._added import AddedToken
from align.tokenizer._errors import TokenizerError
from align.tokenizer._forms import Form, Lowercase
from align.tokenizer._regex import Finder, digits_first, literal, parse

BEHAVIOURS = ("Isolated", "Removed", "Contiguous", "MergedWithPrevious", "MergedWithNext")
FORMS = {"NFC": (False, True), "NFD": (False, False), "NFKC": (True, True), "NFKD": (True, False)}  # compatible, compose
_MISSING = object()


class Node:
    """A JSON value and its path, for errors that name the place."""

    def __init__(self, value: Any, path: str) -> None:
        self.value, self.path = value, path

    def fail(self, what: str) -> NoReturn:
        raise TokenizerError(f"{self.path}: {what if len(what) <= 500 else what[:500] + '…'}")

    def get(self, key: str, kind: Any, default: Any = _MISSING) -> Any:
        """The field, of type `kind` (or a tuple of types); `default` where it is absent or null."""
        value = self.value.get(key) if isinstance(self.value, dict) else self.fail("should be an object")
        if value is None and default is not _MISSING:
            return default
        # bool is an int in Python, not in JSON
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            wanted = "a number" if isinstance(kind, tuple) else kind.__name__
            self.fail(f"{key!r} should be {wanted}, not {short(value)}" + ("" if key in self.value else " (it is missing)"))
        if isinstance(value, str) and not is_text(value):
            self.fail(f"{key!r} holds a lone surrogate, which is no text")
        return value

    def child(self, key: str) -> "Node":
        value = self.value.get(key) if isinstance(self.value, dict) else self.fail("should be an object")
        return Node(value, f"{self.path}.{key}")

    def items(self, key: str) -> list["Node"]:
        return [Node(v, f"{self.path}.{key}[{i}]") for i, v in enumerate(self.get(key, list))]

    def type(self) -> str:
        return str(self.get("type", str))

    def unsupported(self) -> NoReturn:
        self.fail(f"type {short(self.type())} is not supported")

    def char(self, key: str, default: Any = _MISSING) -> str:
        value: str = self.get(key, str, default)
        if len(value) != 1:
            self.fail(f"{key!r} should be one character, not {short(value)}")
        return value


def is_text(value: str) -> bool:
    """Whether a string has a UTF-8 form."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _pattern(node: Node) -> tuple[Finder, str | None]:
    """The finder of a {"String": …} or {"Regex": …} pattern, and the string where it is one."""
    pattern = node.child("pattern")
    if not isinstance(pattern.value, dict) or len(pattern.value) != 1:
        pattern.fail('should be {"String": …} or {"Regex": …}')
    if "String" in pattern.value:
        text = pattern.get("String", str)
        if not text:
            pattern.fail("an empty String pattern is not supported")
        return Finder(literal(text), pattern.path), text
    return Finder(parse(pattern.get("Regex", str), f"{pattern.path}.Regex"), pattern.path), None


# --- normalisers


def normaliser_from(node: Node) -> Any:
    if node.value is None:
        return None
    kind = node.type()
    if kind == "Sequence":
        parts = [part for part in map(normaliser_from, node.items("normalizers")) if part]
        return N.Sequence(parts) if len(parts) != 1 else parts[0]
    if kind in FORMS:
        return Form(*FORMS[kind])
    if kind == "Lowercase":
        return Lowercase()
    if kind == "Prepend":
        return N.Prepend(node.get("prepend", str))
    if kind == "Replace":
        return N.Replace(*_pattern(node), node.get("content", str))
    if kind == "Strip":
        return N.Strip(node.get("strip_left", bool), node.get("strip_right", bool))
    return node.unsupported()


# --- pre-tokenizers


def pretokenizer_from(node: Node) -> tuple[P.PreTokenizer, bool]:
    """The pre-tokenizer, and whether it ends in ByteLevel."""
    stages, byte_level = _stages(node) if node.value is not None else ([], False)
    return P.PreTokenizer(stages), byte_level


def _stages(node: Node) -> tuple[list[Any], bool]:
    kind = node.type()
    if kind != "Sequence":
        return _stage(node, kind)
    stages: list[Any] = []
    byte_level = False
    digits = None
    for part in node.items("pretokenizers"):
        if byte_level:
            part.fail("a pre-tokenizer after ByteLevel is not supported")
        more, byte_level = _stages(part)
        if part.type() == "ByteLevel" and digits is not None and [type(s) for s in more] == [P.Split]:
            stages.pop()
            more = [P.Split(Finder(digits_first(parse(P.GPT2_PATTERN, part.path), digits), part.path))]
        own_digits = part.type() == "Digits" and part.get("individual_digits", bool, False)
        digits = U.property_set("rust_is_numeric") if own_digits else None
        stages += more
    return stages, byte_level


def _stage(node: Node, kind: str) -> tuple[list[Any], bool]:
    if kind == "ByteLevel":
        stages: list[Any] = [P.PrefixSpace()] if node.get("add_prefix_space", bool) else []
        if node.get("use_regex", bool, True):
            stages.append(P.Split(Finder(parse(P.GPT2_PATTERN, node.path), node.path)))
        return stages, True
    if kind == "Split":
        finder, _ = _pattern(node)
        behaviour = node.get("behavior", str)
        if behaviour not in BEHAVIOURS:
            node.fail(f"behavior {short(behaviour)} is none of {', '.join(BEHAVIOURS)}")
        return [P.Split(finder, behaviour, node.get("invert", bool, False))], False
    if kind == "Metaspace":
        replacement, scheme = node.char("replacement", "\u2581"), prepend_scheme(node)
        splitter = P.Split(P.one_of(U.from_ranges([(ord(replacement),) * 2])), "MergedWithNext") if node.get("split", bool, True) else None
        return [P.Metaspace(replacement, scheme, splitter)], False
    if kind == "Digits":
        individual = node.get("individual_digits", bool, False)
        return [P.Split(P.one_of(U.property_set("rust_is_numeric")), "Isolated" if individual else "Contiguous")], False
    if kind == "CharDelimiterSplit":
        return [P.Split(P.one_of(U.from_ranges([(ord(node.char("delimiter")),) * 2])), "Removed")], False
    if kind == "WhitespaceSplit":
        return [P.Split(P.one_of(U.property_set("s")), "Removed")], False
    if kind == "Whitespace":
        word = U.property_set("rust_w")
        other = U.invert(U.union(word, U.property_set("s")))
        return [P.Split(Finder([word, "+", "|", other, "+"], node.path), "Removed", invert=True)], False
    if kind == "Punctuation":
        behaviour = node.get("behavior", str, "Isolated")
        if behaviour not in BEHAVIOURS:
            node.fail(f"behavior {short(behaviour)} is none of {', '.join(BEHAVIOURS)}")
        return [P.Split(P.one_of(U.property_set("rust_is_punctuation")), behaviour)], False
    return node.unsupported()


def prepend_scheme(node: Node) -> str:
    """The scheme, also from the older `add_prefix_space`."""
    scheme: str = node.get("prepend_scheme", str, "always")
    if scheme not in ("always", "first", "never"):
        node.fail(f"prepend_scheme {short(scheme)} is none of always, first, never")
    if node.get("add_prefix_space", bool, True) is False and scheme != "never":
        if node.value.get("prepend_scheme") is not None:
            node.fail("add_prefix_space does not match prepend_scheme")
        return "never"
    return scheme


# --- decoders


def decoder_from(node: Node) -> D.Chain:
    if node.value is None:
        return D.Chain(joiner=" ")
    parts = list(_flat(node))
    kinds = [part.type() for part in parts]
    if kinds == ["ByteLevel"]:
        return D.Chain(byte_level=True)
    per_token: list[Any] = []
    after: list[Any] = []
    byte_fallback = fused = False
    for part, kind in zip(parts, kinds, strict=False):
        if kind == "Fuse":
            fused = True
        elif kind == "ByteFallback" and not byte_fallback and not fused:
            byte_fallback = True
        elif kind in ("Replace", "Strip", "Metaspace") and (fused or not byte_fallback):
            (after if fused else per_token).append(_decoder_step(part, kind))
        elif kind in ("ByteLevel", "ByteFallback", "Replace", "Strip", "Metaspace"):
            part.fail(f"{kind} at this place of a decoder is not supported")
        else:
            part.unsupported()
    return D.Chain(per_token=per_token, byte_fallback=byte_fallback, after=after)


def _flat(node: Node) -> Iterator[Any]:
    if node.type() == "Sequence":
        for part in node.items("decoders"):
            yield from _flat(part)
    else:
        yield node


def _decoder_step(node: Node, kind: str) -> Any:
    if kind == "Replace":
        return D.ReplaceAll(*_pattern(node), node.get("content", str))
    if kind == "Strip":
        return D.StripStart(node.char("content"), node.get("start", int), node.get("stop", int))
    return D.MetaspacePiece(node.char("replacement", "\u2581"), prepend_scheme(node) != "never")


# --- post-processors


class PostProcessor:
    """What add_special_tokens puts around the ids, and how ByteLevel trims spaces off the offsets."""

    def __init__(self) -> None:
        self.before: list[int] = []
        self.after: list[int] = []
        self.trims: list[bool] = []  # add_prefix_space of each ByteLevel that trims
        self.templates = 0


def postprocessor_from(node: Node) -> PostProcessor:
    out = PostProcessor()
    if node.value is not None:
        _post(node, out)
    return out


def _post(node: Node, out: PostProcessor) -> None:
    kind = node.type()
    if kind == "Sequence":
        for part in node.items("processors"):
            _post(part, out)
    elif kind == "ByteLevel":
        add_prefix_space = node.get("add_prefix_space", bool)
        if node.get("trim_offsets", bool):
            out.trims.append(add_prefix_space)
    elif kind == "TemplateProcessing":
        if out.templates:
            node.fail("a second TemplateProcessing is not supported: the reference takes what the first one gives for a pair of texts")
        out.templates += 1
        out.before, out.after = _template(node)
    else:
        node.unsupported()


def _template(node: Node) -> tuple[list[int], list[int]]:
    special = node.get("special_tokens", dict)
    sides: list[list[int]] = [[], []]
    seen = 0
    for part in node.items("single"):
        if isinstance(part.value, dict) and "Sequence" in part.value:
            seen += 1
            if part.child("Sequence").get("id", str) != "A":
                part.fail("a single template holds sequence A alone")
            continue
        name = part.child("SpecialToken").get("id", str)
        if name not in special:
            part.fail(f"special token {short(name)} is not in special_tokens")
        ids = Node(special[name], f"{node.path}.special_tokens[{name!r}]").get("ids", list)
        if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 1 << 32 for i in ids):
            part.fail(f"the ids of {short(name)} are not all numbers")
        sides[bool(seen)] += ids
    if seen != 1:
        node.fail("the single template should hold sequence A once")
    return sides[0], sides[1]


# --- added tokens


def added_from(node: Node) -> list[AddedToken]:
    out: list[AddedToken] = []
    for part in node.items("added_tokens"):
        content = part.get("content", str)
        if not content:
            part.fail("an added token without content")
        flags = [part.get(flag, bool, default) for flag, default in _FLAGS]
        token_id = part.get("id", int)
        if not 0 <= token_id < 1 << 32:
            part.fail(f"id {token_id} is out of range")
        out.append(AddedToken(token_id, content, *flags))
    return out


_FLAGS = (("single_word", False), ("lstrip", False), ("rstrip", False), ("normalized", True), ("special", False))
