"""Talks to a checkpoint on a terminal: the answer appears as it is made. /reset begins anew, /system TEXT sets the system message,
/retry answers again, /quit ends.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, TextIO

import _entry
from _common import (
    ModelSection,
    Sampling,
    build_model,
    check_sampling,
    check_template,
    check_vocabulary,
    load_tokenizer,
    model_config_of,
    model_directory,
    pick_device,
    say,
    use_threads,
)

from align.config import ConfigError, Invocation
from align.evals import encode_prompt
from align.rollout import NativeSampler, RolloutError
from align.tokenizer import ChatError, Decoder, Tokenizer, TokenizerError

REFUSED = (ChatError, RolloutError, TokenizerError)  # a message that cannot be answered; the conversation goes on
HELP = (
    "/reset forgets the conversation, /system TEXT sets the system message, /retry answers again, /quit or Ctrl-D ends; "
    "Ctrl-C stops an answer"
)


@dataclass(frozen=True, kw_only=True)
class ChatModel(ModelSection):
    """Which checkpoint answers."""

    path: Annotated[Path, "checkpoint in HF layout, or a run directory: then its newest checkpoint"] = Path("stages/assets/arithmetic_sft")


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """All of the stage's configuration; the defaults talk to the checkpoint of the default SFT run."""

    seed: Annotated[int, "of the sampling; the same conversation with the same seed gives the same answers"] = 0
    threads: Annotated[int, "CPU threads of torch; 0 leaves torch's own choice"] = 0
    model: ChatModel = field(default_factory=ChatModel)
    sampling: Sampling = field(default_factory=Sampling)
    template: Annotated[
        bool | None, "use the chat template; none: where the model has one. Without it every line is a prompt of its own"
    ] = None
    system: Annotated[str | None, "system message"] = None


class Conversation:
    """What was said, and the sampler that goes on from it."""

    def __init__(self, sampler: NativeSampler, tokenizer: Tokenizer, config: ChatConfig, *, templated: bool):
        self.sampler, self.tokenizer, self.config, self.templated = sampler, tokenizer, config, templated
        self.system, self.messages, self.answers = config.system, list[dict[str, Any]](), 0
        self.asked: str | None = None
        self.answered = False  # whether what was asked last is among the messages

    def ask(self, text: str, show: Callable[[str], None]) -> str:
        """Sends one message; `show` gets the answer piece by piece. On an interrupt what was made so far is the answer."""
        self.asked, self.answered = text, False
        self.messages = [*self.messages, {"role": "user", "content": text}] if self.templated else []
        opening = [{"role": "system", "content": self.system}] if self.system is not None else []
        row = {"messages": [*opening, *self.messages]} if self.templated else {"prompt": text}
        try:
            ids = encode_prompt(self.tokenizer, row)
            answer = self._answer(ids, show)
        except REFUSED:
            self.messages = self.messages[:-1]
            raise
        self.messages = [*self.messages, {"role": "assistant", "content": answer}] if self.templated else []
        self.answered = True
        return answer

    def _answer(self, ids: list[int], show: Callable[[str], None]) -> str:
        decoder, said = Decoder(self.tokenizer, skip_special=True, prefix=ids), list[str]()

        def token(_: int, token_id: int) -> None:
            piece = decoder.push(token_id)
            said.append(piece)
            show(piece)

        how = self.config.sampling
        self.answers += 1
        options = {"temperature": how.temperature, "top_p": how.top_p, "top_k": how.top_k, "min_p": how.min_p}
        stops = {"stop_strings": how.stop, "tokenizer": self.tokenizer}
        seed = self.config.seed + self.answers - 1
        try:
            self.sampler.generate([ids], max_new_tokens=how.max_new_tokens, seeds=[seed], on_token=token, **options, **stops)
        except KeyboardInterrupt:
            show(" [stopped]")
        piece = decoder.finish()
        show(piece)
        return "".join([*said, piece])

    def forget_last(self) -> str | None:
        """Takes back the last exchange, if there was an answer; returns what was asked."""
        self.messages = self.messages[:-2] if self.answered else self.messages
        return self.asked


def chat(call: Invocation[ChatConfig]) -> int:
    config = call.config
    if call.resume or call.allow_change:
        raise ConfigError("chat has nothing to resume; start it anew")
    check_sampling(config.sampling)
    use_threads(config.threads)
    directory = model_directory(config.model.path)
    model_config = model_config_of(directory)
    tokenizer = load_tokenizer(config.model, directory)
    check_vocabulary(tokenizer, model_config, config.model)
    templated = tokenizer.chat_template is not None if config.template is None else config.template
    if templated:
        check_template(tokenizer, "template=true", directory)
    if config.system is not None and not templated:
        raise ConfigError(f"system is set, but {directory} is asked without a chat template, which has no place for it")
    say(f"model    {directory}, {'chat template' if templated else 'no chat template: each line is a prompt of its own'}")
    if call.dry_run:
        say("dry run: nothing was asked")
        return 0
    model = build_model(config.model, directory, model_config, config.seed, pick_device(config.model, model_config)).eval()
    eos = [tokenizer.eos_id] if tokenizer.eos_id is not None else []
    talk = Conversation(NativeSampler(model, eos_ids=eos, max_batch=1), tokenizer, config, templated=templated)
    say(HELP)
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # what is no text is refused by the tokenizer, and the conversation goes on
    converse(talk, sys.stdin, sys.stdout)
    return 0


def converse(talk: Conversation, source: TextIO, out: TextIO) -> None:
    """Reads lines until the end, a line that ends in a backslash goes on in the next."""
    prompt, waiting = "> " if source.isatty() else "", ""

    def show(piece: str) -> None:
        try:
            out.write(piece)
            out.flush()
        except OSError as error:
            raise _entry.OutputLost(error) from None

    while True:
        show(prompt)
        try:
            line = source.readline()
        except KeyboardInterrupt:
            line = ""
        if not line and not waiting:
            show("\n" if prompt else "")
            return
        ended = not line  # after a line that would have gone on: it is asked as it is
        line = waiting[:-1] if ended else waiting + line.rstrip("\n")
        if line.endswith("\\") and not ended:
            waiting = line[:-1] + "\n"
            continue
        waiting = ""
        command, rest = [*line.strip().split(None, 1), "", ""][:2]
        if command in ("/quit", "/exit"):
            return
        if not command:
            continue
        if command == "/retry":
            asked = talk.forget_last()
            if asked is None:
                show("nothing to answer again\n")
                continue
            line = asked
        elif command.startswith("/"):
            show(ruled(talk, command, rest) + "\n")
            continue
        try:
            talk.ask(line, show)
        except REFUSED as error:
            show(f"chat: {error}")
        show("\n")


def ruled(talk: Conversation, command: str, rest: str) -> str:
    """Does what a /command says; returns what to show."""
    if command == "/reset":
        talk.messages, talk.asked = [], None
        return "the conversation begins anew"
    if command == "/system" and not talk.templated:
        return "this model has no chat template, so there is no place for a system message"
    if command == "/system":
        talk.system, talk.messages, talk.asked = rest or None, [], None
        return f"the system message is {'set' if rest else 'gone'}; the conversation begins anew"
    return HELP if command == "/help" else f"{command} is no command. {HELP}"


if __name__ == "__main__":
    sys.exit(_entry.run_stage("chat", ChatConfig, chat, __doc__ or "", sys.argv[1:]))
