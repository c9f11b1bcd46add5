"""Conversations: rendered text, ids in which users cannot forge control tokens, and the exact assistant mask."""

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from align.tokenizer import _values as V
from align.tokenizer._errors import ChatError
from align.tokenizer._offsets import Walk

if TYPE_CHECKING:
    from align.tokenizer._added import AddedToken
    from align.tokenizer._tokenizer import Tokenizer


class Segment(NamedTuple):
    """A stretch of the rendered text. `message` and `field` say which message wrote it; None, None: the template did. Tool
    descriptions have message None and field "tools"."""

    text: str
    message: int | None
    field: str | None


class Chat(NamedTuple):
    """A rendered conversation.

    text: what the template makes of the messages, equal to Hugging Face's.
    ids: its tokens. Control tokens are recognised in the template's own text alone, unless `compat` was asked for.
    assistant_mask: one bool per id, True where the model itself would have sampled the token: an assistant message's content and
    tool calls, with the end-of-turn token; never the role header, the line break after the end of turn, or an empty
    thinking block that the template put in.
    segments: the text cut by who wrote it.
    """

    text: str
    ids: list[int]
    assistant_mask: list[bool]
    segments: list[Segment]


def render_chat(
    tokenizer: "Tokenizer",
    messages: Any,
    tools: Any,
    add_generation_prompt: bool,
    template: str | None,
    variables: dict[str, Any] | None,
    compat: bool,
) -> Chat:
    source = template if template is not None else tokenizer.chat_template
    if source is None:
        raise ChatError("this tokenizer has no chat template; pass template=…")
    if not isinstance(source, str):
        raise ChatError(f"template should be a str, not {type(source).__name__}")
    if not isinstance(variables or {}, dict):
        raise ChatError(f"variables should be a dict of names, not {type(variables).__name__}")
    from align.tokenizer._template import parse_template

    tree = parse_template(source)
    messages = checked(messages)
    names = _variables(tokenizer, messages, tools, variables)
    text = _render(tree, names, add_generation_prompt)
    if not compat:
        _refuse_dropped(messages, text)
    regions = _regions(tokenizer, tree, names, messages, text)
    ids, offsets = _encode(tokenizer, text, [start for start, _ in regions], compat)
    mask = _mask(offsets, regions)
    return Chat(str(text), ids, mask, _segments(text))


def checked(messages: Any) -> list[dict[str, Any]]:
    import json

    if not isinstance(messages, (list, tuple)):
        raise ChatError(f"messages should be a list, not {type(messages).__name__}")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ChatError(f"messages[{i}] should be an object with a role, not {str(message)[:60]}")
        try:
            json.dumps(message, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ChatError(f"messages[{i}] holds a lone surrogate: no UTF-8 text") from None
        except (TypeError, ValueError, RecursionError) as error:
            raise ChatError(f"messages[{i}] is not plain JSON data: {error}") from None
    return list(messages)


def _variables(tokenizer: "Tokenizer", messages: Any, tools: Any, variables: dict[str, Any] | None) -> dict[str, Any]:
    names: dict[str, Any] = {"tools": V.wrap(tools, ("tools", None)), "documents": None}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = getattr(tokenizer, name)
        if value is not None:
            names[name] = value
    names["messages"] = [{V.wrap(k, (i, k)): V.wrap(v, (i, k)) for k, v in m.items()} for i, m in enumerate(messages)]
    names.update(variables or {})
    return names


def _render(tree: Any, names: dict[str, Any], add_generation_prompt: bool) -> str:
    from align.tokenizer._evaluate import Renderer  # loaded with the first chat

    return Renderer(tree, {**names, "add_generation_prompt": add_generation_prompt}).render()


def _runs(text: str) -> Iterator[Any]:
    """(start, end, origin), in order, empty ones included."""
    at = 0
    for length, origin in V.runs_of(text):
        yield at, at + length, origin
        at += length


def _segments(text: str) -> list[Segment]:
    out: list[Segment] = []
    for start, end, origin in _runs(text):
        message, field = (None, None) if origin is None else (None, "tools") if origin[0] == "tools" else origin
        if end > start:
            if out and out[-1][1:] == (message, field):
                out[-1] = Segment(out[-1].text + str(text)[start:end], message, field)
            else:
                out.append(Segment(str(text)[start:end], message, field))
    return out


def _refuse_dropped(messages: list[dict[str, Any]], text: str) -> None:
    """A message of which nothing is left in the text is an error: nobody would see that it was never trained on."""
    fields = {origin for start, end, origin in _runs(text) if origin and origin[1] != "role" and end > start}
    seen = {message for message, _ in fields}
    for i, message in enumerate(messages):
        content = message.get("content")
        said = content.strip() if isinstance(content, str) else content
        if (said and i not in seen) or (message.get("tool_calls") and (i, "tool_calls") not in fields):
            raise ChatError(
                f"the template leaves out messages[{i}] (role {message['role']!r}); put its text into another message, such as the first "
                "user turn, or pass compat=True to accept the loss"
            )


# --- what the model samples


def _regions(tokenizer: "Tokenizer", tree: Any, names: Any, messages: Any, text: str) -> list[tuple[int, int]]:
    """(start, end) of the text that the model would sample, one per assistant message that left a trace."""
    runs = list(_runs(text))
    plain = str(text)
    headers = None
    out = []
    for i, message in enumerate(messages):
        if message["role"] not in ("assistant", "model"):
            continue
        own = [(a, b) for a, b, origin in runs if origin and origin[0] == i and origin[1] != "role"]
        if not own:
            continue
        first, last = own[0][0], max(b for _, b in own)
        if headers is None:
            headers = _headers(tree, names, text)
        before = max((b for a, b, origin in runs if origin and origin[0] != i and b <= first and b > a), default=0)
        after = min((a for a, b, origin in runs if origin and origin[0] != i and a >= last and b > a), default=len(plain))
        out.append((_start(tokenizer, plain, before, first, headers), _end(tokenizer, plain, last, after)))
    return out


def _headers(tree: Any, names: Any, text: str) -> list[str]:
    """The generation prompts that the template can put, the longest first: with its defaults, and with thinking switched off."""
    found = set()
    for extra in ({}, {"enable_thinking": False}):
        try:
            without, with_prompt = (str(_render(tree, {**names, **extra}, flag)) for flag in (False, True))
        except ChatError:
            continue
        if with_prompt.startswith(without) and len(with_prompt) > len(without):
            found.add(with_prompt[len(without) :])
    return sorted(found, key=len, reverse=True)


def _start(tokenizer: "Tokenizer", text: str, before: int, first: int, headers: list[str]) -> int:
    """Where sampling begins: after the generation prompt, if one stands before the content; else after the last control token when
    only white space follows it; else at the content."""
    for header in headers:
        at = text.rfind(header, before, first - 1 + len(header))  # one that begins before the content
        if at >= 0:
            return at + len(header)
    for header in headers:  # the prompt may say more than the template repeats: DeepSeek's opens <think>
        opening = next((header[:end] for _, end, token in _control(tokenizer, header) if token.special), None)
        at = text.rfind(opening, before, first - 1 + len(opening)) if opening else -1
        if at >= 0:
            same = [a == b for a, b in zip(header, text[at:first], strict=False)] + [False]
            end = at + same.index(False)
            inside = [a for a, b, _ in _control(tokenizer, text[at : first + 64]) if at + a < end < at + b]
            return at + inside[0] if inside else end
    lead = text[before:first]
    ends = [end for _, end, token in _control(tokenizer, lead) if token.special]
    if ends and not lead[ends[-1] :].strip():
        return before + ends[-1]
    return first


def _end(tokenizer: "Tokenizer", text: str, last: int, after: int) -> int:
    """After the end-of-turn token: eos where it follows, else the first control token; else the end of the content."""
    found = [(last + end, token) for _, end, token in _control(tokenizer, text[last:after]) if token.special]
    for end, token in found:
        if token.content == tokenizer.eos_token:
            return end
    return found[0][0] if found else last


def _control(tokenizer: "Tokenizer", text: str) -> "list[tuple[int, int, AddedToken]]":
    return sorted(tokenizer._raw_matcher.matches(text, _keep) + tokenizer._normal_matcher.matches(text, _keep))


def _keep(token: "AddedToken", start: int, end: int) -> bool:
    return False


def _encode(tokenizer: "Tokenizer", text: str, starts: list[int], compat: bool) -> Any:
    """Ids and character offsets. Unless `compat`, a control token counts only where all its characters are the template's, and
    sampled text is encoded apart from the prompt before it, as it is when the model samples it. (Where the prompt ends in a control
    token, as SentencePiece-style models' do, that is so anyway.)"""
    plain = str(text)
    if compat:
        return tokenizer.encode_with_offsets(plain)
    theirs = [(a, b) for a, b, origin in _runs(text) if origin is not None and b > a]
    cuts = sorted({0, len(plain), *(starts if tokenizer._pretokenizer.cuts_anywhere and tokenizer._bpe.byte_level else ())})
    ids, offsets = [], []
    for a, b in itertools.pairwise(cuts):
        more_ids, more_offsets = _safe(tokenizer, plain, theirs, a, b)
        ids += more_ids
        offsets += more_offsets
    return ids, offsets


def _safe(tokenizer: "Tokenizer", text: str, theirs: list[tuple[int, int]], start: int, end: int) -> Any:
    marks = bytearray(end - start)
    for a, b in theirs:
        for i in range(max(a, start), min(b, end)):
            marks[i - start] = 1

    def skip(token: "AddedToken", a: Any, b: Any) -> Any:
        return any(marks[a:b])

    found = Walk(tokenizer, text[start:end], skip, "char")
    return found.ids, [(a + start, b + start) for a, b in found.offsets]


def _mask(offsets: Any, regions: Any) -> list[bool]:
    mask = [False] * len(offsets)
    k = 0
    for i, (a, b) in enumerate(offsets):
        while k < len(regions) and regions[k][1] <= a:
            k += 1
        if k < len(regions):
            start, end = regions[k]
            mask[i] = a < end and b > start
    return mask
