"""The Tokenizer: text to ids and back."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from align.tokenizer._added import AddedToken, Matcher, Skip
from align.tokenizer._cuts import Cutter, chunk_pattern, segmenter
from align.tokenizer._errors import TokenizerError
from align.tokenizer._json_parts import Node, added_from, decoder_from, normaliser_from, postprocessor_from, pretokenizer_from
from align.tokenizer._model import fingerprint, model_from
from align.tokenizer._normalise import Sequence as NormaliserSequence
from align.tokenizer._offsets import Offsets, Places, Walk
from align.tokenizer._pretokenise import Metaspace, PreTokenizer
from align.tokenizer._units import Ids

if TYPE_CHECKING:
    from align.tokenizer._chat import Chat
    from align.tokenizer._report import Drift, LossReport

SPECIAL_MODES = ("token", "text", "literal", "refuse")


class Encoding(NamedTuple):
    """`ids` and, for each of them, the (start, end) of the text it comes from; (0, 0) for ids that add_special_tokens put in."""

    ids: list[int]
    offsets: Offsets


class Tokenizer:
    """A BPE tokenizer read from a tokenizer.json, exact to the id with Hugging Face tokenizers 0.23.

    Make one with `Tokenizer.load(path)`, `Tokenizer.from_dict(json, config)`, `vendored(name)` or `resolve_tokenizer(path_or_name)`. It
    can be shared between threads, and pickled. What a file has that would make other ids raises TokenizerError.
    """

    def __init__(
        self, data: dict[str, Any], config: dict[str, Any] | None = None, *, where: str = "tokenizer.json", files: Sequence[Path] = ()
    ) -> None:
        root = Node(data, where)
        for field in ("truncation", "padding"):
            if root.get(field, dict, None) is not None:
                root.fail(f"{field!r} is set; it would change ids behind the caller's back: set it to null")
        self._data, self._where = data, where
        if not isinstance(config or {}, dict):
            raise TokenizerError(f"{where}: the configuration should be a JSON object, not {type(config).__name__}")
        self._config = config or {}
        self.files: list[Path] = list(files)
        try:
            self._read(root)
        except RecursionError:
            root.fail("the parts are nested too deeply")
        self._places: Places | None = None  # made when offsets are first asked for
        self._fingerprint: str | None = None
        for name in ("bos", "eos", "pad", "unk"):
            self._config_token(name)  # a config that names what is no token fails here, not in a run

    def _read(self, root: Node) -> None:
        self._normaliser = normaliser_from(root.child("normalizer"))
        self._pretokenizer, byte_level = pretokenizer_from(root.child("pre_tokenizer"))
        self._bpe, merges = model_from(root.child("model"), byte_level)
        self._post = postprocessor_from(root.child("post_processor"))
        self._load_added(root)
        self._simplify()
        self._cut(merges)
        self._chain = decoder_from(root.child("decoder"))

    def _load_added(self, root: Node) -> None:
        vocab = self._bpe.vocab
        self._token_of: dict[int, str] = dict(zip(vocab.values(), vocab, strict=False))
        self._text_of = dict(self._token_of)  # what decoding sees
        self.added_tokens: dict[str, AddedToken] = {}
        for i, token in enumerate(added_from(root) if root.value.get("added_tokens") is not None else []):
            known = vocab.get(token.content, self._token_of.get(token.id, token.content))
            if known not in (token.id, token.content):
                root.fail(f"added_tokens[{i}]: {token.content!r} and id {token.id} belong to different tokens of the vocabulary")
            if token.normalized and not self._normal(token.content):
                root.fail(f"added_tokens[{i}]: the normalizer leaves nothing of {token.content!r}, which is normalized; such a token would "
                          "be found between all characters")  # fmt: skip
            self.added_tokens[token.content] = token
            self._token_of[token.id] = token.content
            self._text_of[token.id] = self._normal(token.content) if token.normalized else token.content  # as the reference decodes it
        special = {t.content for t in self.added_tokens.values() if t.special}
        self._skipped = frozenset(t.id for t in self.added_tokens.values() if self._text_of[t.id] in special)
        raw = {t.content: t for t in self.added_tokens.values() if not t.normalized}
        normal: dict[str, AddedToken] = {}
        for token in self.added_tokens.values():
            if token.normalized and normal.setdefault(text := self._normal(token.content), token) is not token:
                root.fail(f"added_tokens: {normal[text].content!r} and {token.content!r} are the same once normalised; "
                          "which of them is meant is not defined")  # fmt: skip
        self._raw_matcher, self._normal_matcher = Matcher(raw), Matcher(normal)
        largest = max(self._text_of, default=-1)
        if self._post.before or self._post.after:
            largest = max(largest, *self._post.before, *self._post.after)
        self.vocab_size = largest + 1

    def _simplify(self) -> None:
        """The older spelling of a space mark, as a normaliser, is the same as Metaspace before every stretch, which is quicker."""
        mark = self._normaliser.space_mark() if isinstance(self._normaliser, NormaliserSequence) else None
        if mark and not self._pretokenizer.stages and not any(t.normalized for t in self.added_tokens.values()):
            self._normaliser = None
            self._pretokenizer = PreTokenizer([Metaspace(mark, "each", None)])

    def _cut(self, merges: list[str]) -> None:
        """Finds how texts can be cut for the caches: by segments or by chunks, where these are proved, else by words alone."""
        pre = self._pretokenizer
        if self._bpe.byte_level:
            pre.space = None  # a byte-level model reads a space as a space
        self._bpe.reads_spaces_as(pre.space or " ")
        self._segments = segmenter(self._bpe, merges)
        self._chunks: Cutter | None = None
        if pre.simple and pre.finder:
            pattern = chunk_pattern(pre.finder) if self._segments is None else None
            self._chunks = Cutter(pattern, pre.finder) if pattern else None
        elif pre.simple and self._segments:
            self._chunks = Cutter(self._segments.chunks, self._segments)
        self._ids = Ids(self._bpe, self._chunks)

    def _units(self, text: str, first: bool) -> list[str]:
        """What the caches hold, one by one: chunks, or words where there are none."""
        if self._pretokenizer.simple:
            return self._units_of(self._pretokenizer.prefixed(text, first))
        words = self._pretokenizer.words(text, first)
        return list(chain.from_iterable(map(self._segments.words, words))) if self._segments else words

    def _units_of(self, prefixed: str) -> list[str]:
        """The same for a simple pre-tokenizer, of a text that has its prefix."""
        if self._chunks is not None:
            return self._chunks.find(prefixed)
        words = self._pretokenizer.tile(prefixed)
        return list(chain.from_iterable(map(self._segments.words, words))) if self._segments else words

    def _changes(self, text: str) -> bool:
        """Whether the normaliser does something to the text."""
        if isinstance(self._normaliser, NormaliserSequence):
            return self._normaliser.changes(text)
        return self._normal(text) != text

    def _normal(self, text: str) -> str:
        return self._normaliser.text(text) if self._normaliser else text

    # --- construction and files

    @classmethod
    def load(cls, path: Any) -> "Tokenizer":
        """A model directory (tokenizer.json and, where there, tokenizer_config.json, special_tokens_map.json, chat_template.jinja) or
        a tokenizer.json itself; either may be gzip-compressed (.json.gz). Raises TokenizerError."""
        from align.tokenizer._files import load

        return load(cls, Path(path))

    @classmethod
    def from_dict(cls, data: dict[str, Any], config: dict[str, Any] | None = None) -> "Tokenizer":
        """From the parsed tokenizer.json, and the parsed tokenizer_config.json for the chat template and the names of bos, eos, pad."""
        return cls(data, config)

    def save(self, directory: Any) -> list[Path]:
        """Puts the tokenizer's files into a directory, byte for byte where it was loaded from files; the paths written."""
        from align.tokenizer._files import save

        return save(self, Path(directory))

    @property
    def fingerprint(self) -> str:
        """sha256 over vocabulary, merges, added tokens, normaliser, pre-tokenizer, post-processor, decoder and the Unicode tables."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self._data, self._bpe)
        return self._fingerprint

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self._data, self._config, self._where, self.files)

    # --- vocabulary

    def token_to_id(self, token: str) -> int | None:
        added = self.added_tokens.get(token)
        return added.id if added else self._bpe.vocab.get(token)

    def id_to_token(self, token_id: int) -> str | None:
        return self._token_of.get(token_id)

    def _config_token(self, name: str) -> str | None:
        value = self._config.get(f"{name}_token")
        value = value.get("content") if isinstance(value, dict) else value
        if value is not None and (not isinstance(value, str) or (self.token_to_id(value) is None and name in ("bos", "eos"))):
            raise TokenizerError(f"{self._where}: the configuration's {name}_token {value!r} is no token of the vocabulary")
        return value

    bos_token = property(lambda self: self._config_token("bos"), doc="The configuration's bos_token, or None.")
    eos_token = property(lambda self: self._config_token("eos"), doc="The configuration's eos_token, or None.")
    pad_token = property(lambda self: self._config_token("pad"), doc="The configuration's pad_token, or None.")
    unk_token = property(lambda self: self._config_token("unk"), doc="The configuration's unk_token, or None.")
    bos_id = property(lambda self: self._id_of("bos"), doc="Id of bos_token, or None.")
    eos_id = property(lambda self: self._id_of("eos"), doc="Id of eos_token, or None.")
    pad_id = property(lambda self: self._id_of("pad"), doc="Id of pad_token, or None.")

    def _id_of(self, name: str) -> int | None:
        token = self._config_token(name)
        return None if token is None else self.token_to_id(token)

    @property
    def chat_template(self) -> str | None:
        """The configuration's chat template (of several, the one named "default")."""
        template = self._config.get("chat_template")
        if isinstance(template, list):
            template = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}.get("default")
        return template if isinstance(template, str) else None

    # --- text to ids

    def encode(self, text: str, *, add_special_tokens: bool = False, special: str = "token") -> list[int]:
        """The ids of a text.

        add_special_tokens: also what the post-processor adds, such as bos.
        special: what the text of an added token means. "token": that token. "text": ordinary text where the token is marked special
        (control tokens; what Hugging Face calls split_special_tokens). "literal": ordinary text for every added token, also those
        that are not marked special, such as Qwen3's <think>. "refuse": TokenizerError.
        Raises TokenizerError for text that has no UTF-8 form (a lone surrogate).
        """
        skip = self._skipper(text, special)
        ids: list[int] = []
        if self._normaliser and self._pretokenizer.asks_first:
            ids = Walk(self, text, skip, "char").ids  # what begins the text can only be told with places
        else:
            for piece, token, first in self._stretches(text, skip):
                if token is not None:
                    ids.append(token)
                    continue
                found = self._ids.of(self._units(piece, first))
                if ids:
                    ids += found
                else:
                    ids = found
        if add_special_tokens:
            return [*self._post.before, *ids, *self._post.after]
        return ids

    def encode_with_offsets(self, text: str, *, add_special_tokens: bool = False, special: str = "token", unit: str = "char") -> Encoding:
        """Like `encode`, with where each id comes from. unit "char": (start, end) in characters, as the reference gives them (a character
        that takes several tokens is given to each of them). unit "byte": (start, end) in the UTF-8 bytes of the text."""
        if unit not in ("char", "byte"):
            raise TokenizerError(f"unit {unit!r} is neither 'char' nor 'byte'")
        skip = self._skipper(text, special)
        found = Walk(self, text, skip, unit)
        if not add_special_tokens:
            return Encoding(found.ids, found.offsets)
        before, after = self._post.before, self._post.after
        offsets = Offsets([(0, 0)] * len(before) + list(found.offsets) + [(0, 0)] * len(after))
        return Encoding([*before, *found.ids, *after], offsets)

    def encode_batch(
        self, texts: Sequence[str], *, processes: int = 1, add_special_tokens: bool = False, special: str = "token"
    ) -> list[list[int]]:
        """`encode` of every text, in order; over `processes` processes where that is more than 1."""
        from align.tokenizer._batch import encode_batch

        return encode_batch(self, texts, processes, add_special_tokens, special)

    def _skipper(self, text: str, special: str) -> Any:
        """Checks the text; says which matches of added tokens are left as text."""
        if not isinstance(text, str):
            raise TokenizerError(f"encode takes a str, not {type(text).__name__}")
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise TokenizerError(f"character {error.start} is the lone surrogate U+{ord(text[error.start]):04X}: no UTF-8 text; "
                                     "decode the source with errors='replace'") from None  # fmt: skip
        if special == "token":
            return _skip_none
        if special == "text":
            return _skip_special
        if special == "literal":
            return _skip_all
        if special == "refuse":
            return _refuse
        raise TokenizerError(f"special {special!r} is none of {', '.join(map(repr, SPECIAL_MODES))}")

    def _stretches(self, text: str, skip: Skip) -> Iterator[Any]:
        """(normalised text, None, starts at 0) and ("", id, …), in order."""
        at = 0
        for start, end, token in [*self._raw_matcher.matches(text, skip), (len(text), len(text), None)]:
            if start > at:
                yield from self._normal_stretches(text[at:start], at == 0, skip)
            if token is not None:
                yield "", token.id, False
            at = end

    def _normal_stretches(self, text: str, first: bool, skip: Skip) -> Iterator[Any]:
        text = self._normal(text)
        matches = self._normal_matcher.matches(text, skip)
        at = 0
        for start, end, token in matches:
            if start > at:
                yield text[at:start], None, first and at == 0
            yield "", token.id, False
            at = end
        if at < len(text):
            yield text[at:] if at else text, None, first and at == 0

    # --- ids to text

    def _token_text(self, token_id: int, skip_special: bool) -> str | None:
        token = self._text_of.get(token_id)
        if token is None:
            if not isinstance(token_id, int) or token_id < 0:
                raise TokenizerError(f"{token_id!r} is no token id")
            return None  # a padded vocabulary has ids without a token; like the reference, they decode to nothing
        return None if skip_special and token_id in self._skipped else token

    def _tokens(self, ids: Iterable[int], skip_special: bool) -> list[str]:
        try:
            tokens = list(map(self._text_of.__getitem__, ids))
        except (KeyError, TypeError):
            tokens = None
        if tokens is not None and not skip_special:
            return tokens
        return [t for t in (self._token_text(i, skip_special) for i in ids) if t is not None]

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """The text of the ids; bytes that are no UTF-8 become U+FFFD. skip_special leaves out tokens marked special.
        Ids without a token (a padded vocabulary) give nothing."""
        return self._chain.text(self._tokens(_listed(ids), skip_special))

    def decode_bytes(self, ids: Sequence[int], *, skip_special: bool = False) -> bytes:
        """Like `decode`, with the bytes as they are."""
        return self._chain.bytes(self._tokens(_listed(ids), skip_special))

    # --- reports

    def loss_report(self, text: str) -> "LossReport":
        """What a text loses on its way to ids and back; see `LossReport`."""
        from align.tokenizer._report import loss_report

        return loss_report(self, text)

    def drift(self, ids: Sequence[int]) -> "Drift":
        """Whether decoding and encoding again gives the same ids, and where not; see `Drift`."""
        from align.tokenizer._report import drift

        return drift(self, ids)

    def check_prefixes(
        self, messages: Any, *, tools: Any = None, template: str | None = None, variables: dict[str, Any] | None = None
    ) -> list[int]:
        """The turns k for which the ids of messages[:k] are no prefix of those of the longer conversation, each with a PrefixWarning."""
        from align.tokenizer._report import check_prefixes

        return check_prefixes(self, messages, {"tools": tools, "template": template, "variables": variables})

    # --- chat

    def render_chat(
        self,
        messages: Any,
        *,
        tools: Any = None,
        add_generation_prompt: bool = False,
        template: str | None = None,
        variables: dict[str, Any] | None = None,
        compat: bool = False,
    ) -> "Chat":
        """A conversation as text, ids and assistant mask; see `Chat`. Raises ChatError.

        messages: [{"role": …, "content": …}, …]. template: another than the tokenizer's own. variables: more names for the template.
        compat: exactly Hugging Face's text and ids, in which a user's text can forge control tokens and a template may drop a message.
        """
        from align.tokenizer._chat import render_chat

        return render_chat(self, messages, tools, add_generation_prompt, template, variables, compat)


def _rebuilt(data: Any, config: Any, where: Any, files: Any) -> Tokenizer:
    return Tokenizer(data, config, where=where, files=files)


def _listed(ids: Iterable[int]) -> Any:
    return ids if isinstance(ids, (list, tuple)) else list(ids)


def _skip_none(token: AddedToken, start: int, end: int) -> bool:
    return False


def _skip_special(token: AddedToken, start: int, end: int) -> bool:
    return token.special


def _skip_all(token: AddedToken, start: int, end: int) -> bool:
    return True


def _refuse(token: AddedToken, start: int, end: int) -> bool:
    raise TokenizerError(
        f"the text holds the token {token.content!r} near character {start}, and special is 'refuse'; special='text' encodes it as text"
    )
