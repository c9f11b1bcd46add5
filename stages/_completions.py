"""Requests in the form of OpenAI's completions, answered by the native sampler; log-probabilities from one forward over the whole text."""

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from align.evals import encode_prompt
from align.model import Decoder
from align.rollout import NativeSampler, RolloutError, Sample
from align.tokenizer import ChatError, Tokenizer
from align.tokenizer import Decoder as TextDecoder

MOST_LOGPROBS = 20
# Fields that change nothing at these values; at any other they are refused.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0, None), "frequency_penalty": (0, None), "logit_bias": (None, {}), "suffix": (None, ""), "best_of": (None,),
    "tools": (None, []), "response_format": (None, {"type": "text"}),
}  # fmt: skip
IGNORED = {"user", "model", "store", "metadata", "stream_options"}


class RequestError(ValueError):
    """A request that cannot be answered as it stands."""


@dataclass(frozen=True)
class Ask:
    """A checked request."""

    prompts: list[list[int]]
    chat: bool
    n: int
    max_tokens: int
    logprobs: int | None
    echo: bool
    seed: int
    sampling: dict[str, Any]


class Completer:
    """One model behind the protocol."""

    def __init__(self, model: Decoder, tokenizer: Tokenizer, *, name: str, batch: int, seed: int):
        self.name, self._model, self._tokenizer, self._seed = name, model, tokenizer, seed
        self._sampler = NativeSampler(model, eos_ids=[tokenizer.eos_id] if tokenizer.eos_id is not None else [], max_batch=batch)

    def answer(self, body: dict[str, Any], *, chat: bool) -> dict[str, Any]:
        """The whole answer. Raises RequestError."""
        ask = self._checked(body, chat=chat)
        samples = self._sample(ask)
        choices = [self._choice(index, sample, ask) for index, sample in enumerate(samples)]
        asked, made = sum(map(len, ask.prompts)), sum(len(sample.ids) for sample in samples)
        usage = {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made}
        return {**self._head(chat, stream=False), "choices": choices, "usage": usage}

    def check_stream(self, body: dict[str, Any], *, chat: bool) -> Ask:
        """A request that can be streamed: one prompt, one answer, no log-probabilities."""
        ask = self._checked(body, chat=chat)
        if len(ask.prompts) != 1 or ask.n != 1 or ask.logprobs is not None or ask.echo:
            raise RequestError("stream is for one prompt and one answer without logprobs or echo; leave stream out")
        return ask

    def stream(self, ask: Ask, send: Callable[[dict[str, Any]], None]) -> None:
        """Sends the answer piece by piece, then its finish_reason."""
        head, stops = self._head(ask.chat, stream=True), ask.sampling["stop_strings"]
        decoder = TextDecoder(self._tokenizer, skip_special=True, prefix=ask.prompts[0])
        said, shown, keep = "", 0, max(map(len, stops), default=1) - 1  # what may be the beginning of a stop text waits
        ended = False  # by a stop text; of its token there may be a part of a character left, which is no more of the answer than the text

        def piece(text: str, reason: str | None = None) -> None:
            nonlocal said, shown, ended
            whole = said if ended else said + text
            said = cut(whole, stops)
            ended = ended or said != whole
            end = len(said) if reason else max(shown, len(said) - keep)
            new, shown = said[shown:end], end
            if new or reason:
                part = {"delta": {"content": new} if new else {}} if ask.chat else {"text": new}
                send({**head, "choices": [{"index": 0, **part, "finish_reason": reason}]})

        samples = self._sample(ask, on_token=lambda _, token: piece(decoder.push(token)))
        piece(decoder.finish(), samples[0].finish_reason)

    def _head(self, chat: bool, *, stream: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if stream else "chat.completion") if chat else "text_completion"
        return {"id": f"cmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": self.name}

    def _sample(self, ask: Ask, on_token: Callable[[int, int], None] | None = None) -> list[Sample]:
        if ask.max_tokens == 0:
            return [Sample(prompt, [], [], [], "length", 0) for prompt in ask.prompts for _ in range(ask.n)]
        seeds = [ask.seed + index for index in range(len(ask.prompts))]
        options = {"max_new_tokens": ask.max_tokens, "tokenizer": self._tokenizer, "seeds": seeds, "on_token": on_token}
        try:
            return self._sampler.generate(ask.prompts, n=ask.n, **options, **ask.sampling)
        except RolloutError as error:
            raise RequestError(str(error)) from None

    def _choice(self, index: int, sample: Sample, ask: Ask) -> dict[str, Any]:
        decoder = TextDecoder(self._tokenizer, skip_special=True, prefix=sample.prompt_ids)
        text = cut("".join(decoder.push(token) for token in sample.ids) + decoder.finish(), ask.sampling["stop_strings"])
        if ask.echo:
            text = self._tokenizer.decode(sample.prompt_ids, skip_special=True) + text
        part = {"message": {"role": "assistant", "content": text}} if ask.chat else {"text": text}
        logprobs = self._logprobs(sample, ask) if ask.logprobs is not None else None
        return {"index": index, **part, "logprobs": logprobs, "finish_reason": sample.finish_reason}

    @torch.inference_mode()
    def _logprobs(self, sample: Sample, ask: Ask) -> dict[str, Any]:
        """At temperature 1, of every token shown; the first token of a text has none."""
        ids, begin = [*sample.prompt_ids, *sample.ids], 0 if ask.echo else len(sample.prompt_ids)
        device = self._model.output_weight.device
        logits = self._model.lm_head(self._model(torch.tensor([ids], device=device))[0, max(0, begin - 1) : len(ids) - 1]).float()
        table = torch.log_softmax(logits, -1)  # (positions, V)
        wanted = torch.tensor(ids[max(1, begin) :], device=device)
        values: list[float | None] = table.gather(1, wanted[:, None]).flatten().tolist() if len(wanted) else []
        best = table.topk(min(ask.logprobs or 1, table.shape[-1]), -1) if len(wanted) else None
        tops: list[dict[str, float] | None] = []
        for row in range(len(wanted) if ask.logprobs else 0):
            pairs = zip(best.indices[row].tolist(), best.values[row].tolist(), strict=True) if best else []
            tops.append({self._name(token): value for token, value in pairs})
        if begin == 0:
            values, tops = [None, *values], [None, *tops]
        names = [self._name(token) for token in ids[begin:]]
        offsets, at = [], 0
        for name in names:
            offsets.append(at)
            at += len(name)
        return {"tokens": names, "token_logprobs": values, "top_logprobs": tops if ask.logprobs else None, "text_offset": offsets}

    def _name(self, token: int) -> str:
        return self._tokenizer.decode([token])

    def _checked(self, body: dict[str, Any], *, chat: bool) -> Ask:
        known = {"prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "n", "stop", "seed",
                 "logprobs", "echo", "stream", *NEUTRAL, *IGNORED}  # fmt: skip
        for key, value in body.items():
            if key not in known:
                raise RequestError(f"{key} is not supported; leave it out")
            if key in NEUTRAL and value not in NEUTRAL[key] and not (key == "best_of" and value == body.get("n", 1)):
                raise RequestError(f"{key}={value!r} is not supported; leave it out")
        if chat and (body.get("logprobs") or body.get("echo")):
            raise RequestError("logprobs and echo are for /v1/completions")
        _boolean(body, "stream")
        stop = body.get("stop") or []
        most = body.get("max_completion_tokens") if body.get("max_tokens") is None else body["max_tokens"]
        logprobs = body.get("logprobs")
        if logprobs is True:
            logprobs = 1
        ask = Ask(
            prompts=self._prompts(body, chat=chat),
            chat=chat,
            n=_integer(body, "n", 1, 1, 1024),
            max_tokens=_integer({"max_tokens": most}, "max_tokens", 16 if not chat else 512, 0, 1 << 20),
            logprobs=None if logprobs is None or logprobs is False else _integer({"logprobs": logprobs}, "logprobs", 0, 0, MOST_LOGPROBS),
            echo=_boolean(body, "echo"),
            seed=_integer(body, "seed", self._seed, -(1 << 63), (1 << 63) - 1),
            sampling={
                "temperature": _number(body, "temperature", 1.0), "top_p": _number(body, "top_p", 1.0),
                "min_p": _number(body, "min_p", 0.0), "top_k": _integer(body, "top_k", 0, 0, 1 << 31),
                "stop_strings": [stop] if isinstance(stop, str) else stop,
            },
        )  # fmt: skip
        if not isinstance(ask.sampling["stop_strings"], list) or not all(isinstance(s, str) and s for s in ask.sampling["stop_strings"]):
            raise RequestError(f"stop={stop!r}; expected is a text or a list of texts")
        if ask.sampling["temperature"] == 0 and ask.n > 1:
            raise RequestError(f"n={ask.n} answers at temperature 0 would all be alike; take n=1 or a temperature above 0")
        return ask

    def _prompts(self, body: dict[str, Any], *, chat: bool) -> list[list[int]]:
        if chat:
            messages = body.get("messages")
            if self._tokenizer.chat_template is None:
                raise RequestError("this model has no chat template; POST /v1/completions")
            try:
                return [encode_prompt(self._tokenizer, {"messages": messages})]
            except ChatError as error:
                raise RequestError(str(error)) from None
        prompt = body.get("prompt")
        many = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
        out = []
        for one in many:
            if isinstance(one, str):
                out.append(encode_prompt(self._tokenizer, {"prompt": one}))
            elif isinstance(one, list) and one and all(type(token) is int and 0 <= token < self._tokenizer.vocab_size for token in one):
                out.append(one)
            else:
                raise RequestError(f"prompt={str(one)[:60]!r}; expected is a text, a list of token ids, or a list of either")
        return out


def cut(text: str, stops: list[str]) -> str:
    """The text before the first stop text: as the protocol has it, that is no part of the answer."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(places)] if places else text


def _integer(body: dict[str, Any], key: str, default: int, low: int, high: int) -> int:
    value = body.get(key)
    if value is None:
        return default
    if type(value) is not int or not low <= value <= high:
        raise RequestError(f"{key}={value!r}; expected is an integer from {low} to {high}")
    return value


def _number(body: dict[str, Any], key: str, default: float) -> float:
    value = body.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"{key}={value!r}; expected is a number")
    try:
        return float(value)
    except OverflowError:
        raise RequestError(f"{key} is an integer of {len(str(abs(value)))} digits; expected is a number that a float can hold") from None


def _boolean(body: dict[str, Any], key: str) -> bool:
    value = body.get(key)
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"{key}={value!r}; expected is true or false")
    return bool(value)
