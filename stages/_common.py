"""What the stages share besides the libraries: how a configuration names a model, rows and an evaluation, and how a stage ends."""

import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

import torch
from _entry import find as find
from _entry import run_stage as run_stage
from _entry import say as say
from _fields import ANSWERS, GENERATED, THREADS, TOKENS, check_most, of_field
from _life import LivingSampler

from align.checkpoint import CheckpointError, newest
from align.config import ConfigError, Invocation, caller_path, workspace_root
from align.data import Encoded, arithmetic_rows, bundled_rows, eval_batches, read_rows
from align.evals import Estimate, EvalResult, accuracy, encode_prompt
from align.guard import Projection, Refused, RunShape, preflight, project, read_host
from align.model import Decoder, ModelConfig, init, load, load_config
from align.rollout import NativeSampler
from align.tokenizer import ChatError, Tokenizer, TokenizerError, resolve_tokenizer
from align.train import LoraConfig, Ranks, TrainerConfig, TrainModule, finished, join, launch, started, to_device, validate

# What guard may propose: of the settings that save memory, those that there are.
SETTINGS = (
    "train.micro_batch",
    "optimizer.name",
    "train.checkpointing",
    "train.per_rank_optimizer_state",
    "checkpoint.mode",
    "launch.nproc",
)


ASKED_AT_ONCE = 256  # rows, by align.evals.accuracy
ANSWER_BYTES = 1000  # of an answer that is kept, beside its tokens
TOKEN_BYTES = 8  # of each token that an answer in the making may get: its noise's key


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """Which model."""

    path: Annotated[Path, "directory in HF layout: config.json, *.safetensors, tokenizer files"]
    tokenizer: Annotated[str | None, "directory or vendored name of the tokenizer, where path has none"] = None
    dtype: Annotated[Literal["float32", "bfloat16"], "of the weights in memory and in checkpoints"] = "float32"
    device: Annotated[Literal["auto", "cpu", "cuda"], "auto: cuda where there is one and the model is not tiny"] = "auto"


@dataclass(frozen=True, kw_only=True)
class JudgeSection:
    """Problems with answers, which the model is judged on by align.verify."""

    source: Annotated[str, "arithmetic (held-out problems), gsm8k_test, math500, or a JSONL file of {prompt, answer}"] = "arithmetic"
    problems: Annotated[int, "how many; arithmetic: in equal parts of 1, 2 and 3 operations; 0: none"] = 600
    samples: Annotated[int, "answers a problem"] = 1
    temperature: Annotated[float, "of the sampling; 0 is greedy"] = 0.0
    max_new_tokens: Annotated[int, "longest answer"] = 64
    batch: Annotated[int, "answers made at once"] = 256


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How an answer is drawn."""

    temperature: Annotated[float, "0: the most likely token each time"] = 0.7
    top_p: Annotated[float, "smallest set of tokens of this probability"] = 0.95
    top_k: Annotated[int, "so many likeliest tokens; 0: all"] = 0
    min_p: Annotated[float, "tokens of at least this share of the likeliest one's probability"] = 0.0
    max_new_tokens: Annotated[int, "longest answer"] = 512
    stop: Annotated[list[str], "texts that end an answer, beside the tokenizer's end token"] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class ForwardSection:
    """Forwards without training; named train, as where there is some."""

    micro_batch: Annotated[int, "rows a forward"] = 16
    threads: Annotated[int, "CPU threads of torch; 0 leaves torch's own choice"] = 1


@dataclass(frozen=True, kw_only=True)
class GuardSection:
    """What is checked before a run starts."""

    mem_floor_gb: Annotated[float | None, "host memory that must stay free, GiB; none: 20 % of it, at most 45"] = None
    ignore: Annotated[list[str], "checks that may fail: host_memory, device_memory, disk, load, disk_queue"] = field(default_factory=list)


def model_directory(path: Path, setting: str = "model.path") -> Path:
    """The directory of a model, or of the newest checkpoint when a run directory is named. Raises ConfigError saying what is expected, or
    which older checkpoint is whole where the newest one is not."""
    with of_field(setting):
        directory = find(path)
    if not (directory / "config.json").exists():
        try:
            checkpoint = newest(directory / "checkpoints", setting=setting)
        except CheckpointError as error:
            raise ConfigError(f"{setting} {path}: {error}") from None
        if checkpoint is not None:
            return checkpoint
    if not (directory / "config.json").is_file():
        raise ConfigError(
            f"{setting} {path}: there is no config.json in {directory}; expected is a directory in HF layout with config.json, "
            "*.safetensors and "
            "tokenizer.json, or a run directory with checkpoints. Real weights: ./bazelw run //tools:fetch_weights -- smollm2-135m-instruct"
        )
    return directory


def start_model(section: Any, *, planning: bool) -> tuple[Path | None, ModelConfig]:
    """model.path's directory and what its config.json says; in a plan, where there is no such path, None and model.plan_config's."""
    if planning and section.plan_config is not None:
        with of_field("model.path"):
            planning = not find(section.path).exists()
        if planning:
            with of_field("model.plan_config"):
                return None, load_config(find(section.plan_config))
    directory = model_directory(section.path)
    return directory, model_config_of(directory)


def on_ranks(program: str, stage: Callable[[Invocation[Any]], int]) -> Callable[[Invocation[Any]], int]:
    """The stage, on launch.nproc processes where more than one is asked for; `program` is the stage's own file."""

    def start(call: Invocation[Any]) -> int:
        validate(call.config)
        if isinstance(section := getattr(call.config, "eval", None), JudgeSection):
            check_judged(section)
        if not call.dry_run and (code := launch(call.config.launch, program, sys.argv[1:])) is not None:
            return code
        started()
        return finished(stage(call))

    return start


def join_ranks(call: Invocation[Any], device: torch.device) -> tuple[Ranks, torch.device]:
    """This process among the run's, and its own device. A dry run is one process."""
    if call.dry_run:
        return Ranks(), device
    ranks = join(device.type)
    return ranks, torch.device("cuda", ranks.local_rank) if device.type == "cuda" else device


def run_directory(run_dir: Path | None, stage: str, ranks: Ranks) -> Path:
    """The configured one, relative to the caller, or runs/<stage>-<time> in the workspace; the same on every rank.

    Raises ConfigError: it holds another stage's run, whose records a --resume would cut."""
    with of_field("run_dir"):
        path = caller_path(run_dir) if run_dir else workspace_root() / "runs" / time.strftime(f"{stage}-%Y%m%d-%H%M%S")
    for name in ("stage_result.json", "env.json"):  # the latter of a run that was killed
        try:
            other = json.loads((path / name).read_bytes()).get("stage", stage)
        except (OSError, ValueError, AttributeError, RecursionError):  # none, or none that can be read
            continue
        if other != stage:
            raise ConfigError(f"run_dir {path} holds a run of //stages:{other}; choose another for //stages:{stage}")
    agreed: Path = ranks.agree(path)
    return agreed


def load_tokenizer(section: ModelSection, directory: Path | None) -> Tokenizer:
    """The section's own choice, else the directory's (None: where section.path would be). Raises ConfigError naming the field."""
    if section.tokenizer is None:
        with of_field("model.path"):
            return resolve_tokenizer(directory or find(section.path))
    with of_field("model.tokenizer"):
        own = find(section.tokenizer)
        return resolve_tokenizer(own if own.exists() else section.tokenizer)


def check_vocabulary(tokenizer: Tokenizer, config: ModelConfig, section: ModelSection) -> None:
    """Raises ConfigError when the tokenizer has ids that the model has no row for."""
    if tokenizer.vocab_size > config.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model {section.path} a vocabulary of {config.vocab_size}; "
            "they do not belong together: set model.tokenizer to the model's own"
        )


def pick_device(section: ModelSection, config: ModelConfig, *, planning: bool = False) -> torch.device:
    """A plan may be for another machine's device."""
    if section.device == "cuda" and not torch.cuda.is_available() and not planning:
        raise ConfigError("model.device is cuda, but torch sees no CUDA device here; use model.device=cpu")
    if section.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() and config.hidden_size >= 256 else "cpu")
    return torch.device(section.device)


def build_model(
    section: ModelSection, directory: Path | None, config: ModelConfig, seed: int, device: torch.device, setting: str = "model.path"
) -> Decoder:
    """The directory's weights; without a directory new ones, made from the seed. Raises ConfigError naming `setting`, the directory's."""
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[section.dtype]
    if directory is None:
        return init(config, seed, dtype).to(device)
    with of_field(setting):
        return load(directory, dtype=dtype, device=str(device))


def model_config_of(directory: Path, setting: str = "model.path") -> ModelConfig:
    """What config.json says. Raises ConfigError naming the field."""
    with of_field(setting):
        return load_config(directory)


def project_run(config: ModelConfig, *, device: torch.device, weight_bytes: int, **run: Any) -> Projection:
    """The memory that a run would take; `run` are fields of RunShape. Builds no weights."""
    with torch.device("meta"):
        model = Decoder(config)
    shapes = [tuple(parameter.shape) for parameter in model.parameters()]
    adapter = adapter_elements(model, run.pop("lora", None))
    return project(RunShape.of(
        shapes, adapter=adapter, layers=config.num_hidden_layers, hidden=config.hidden_size, intermediate=config.intermediate_size,
        heads=config.num_attention_heads, kv_heads=config.num_key_value_heads, head_dim=config.head_dim, vocabulary=config.vocab_size,
        tied=config.tie_word_embeddings, device=device.type, weight_bytes=weight_bytes, **run,
    ))  # fmt: skip


def adapter_elements(model: Decoder, lora: LoraConfig | None) -> int:
    """Elements of the adapter that `lora` describes: rank × (in + out) of every layer that it names."""
    if lora is None or not lora.rank:
        return 0
    layers = [layer for name, layer in model.named_modules() if name.rpartition(".")[2] in lora.targets]
    return sum(lora.rank * (layer.in_features + layer.out_features) for layer in layers if isinstance(layer, torch.nn.Linear))


def run_shape(config: TrainerConfig) -> dict[str, Any]:
    """The fields of RunShape that a training configuration decides."""
    train, ranks = config.train, config.launch.nproc
    return {
        "optimizer": config.optimizer.name,
        "pinned_staging_gb": config.optimizer.pinned_staging_gb if config.optimizer.name == "offload_adamw" else 0.0,
        "in_backward": config.optimizer.in_backward,
        "ranks": ranks,
        "micro_batch": train.micro_batch,
        "accumulation": max(train.global_batch // (train.micro_batch * ranks * config.launch.nnodes), 1),
        "checkpointing": train.checkpointing,
        "compiled": train.compile or train.kernels,
        "per_rank_optimizer_state": train.per_rank_optimizer_state,
        "save_mode": config.checkpoint.mode,
        "snapshot_weights": True,
        "gather_copies": 1,
        "checkpoints_kept": config.checkpoint.keep,
        "lora": config.lora,
    }


def held_out_loss(module: TrainModule, held: Encoded, *, max_length: int, packing: bool, ranks: Ranks, micro_batch: int = 1) -> float:
    """Mean negative log-likelihood of the held-out trained tokens, in nats; each rank takes its share."""
    device = next(module.model.parameters()).device
    total = weight = 0.0
    for batch in eval_batches(
        held, micro_batch=micro_batch, max_length=max_length, packing=packing, rank=ranks.rank, world=ranks.world
    ):  # fmt: skip
        loss, count, _ = module.loss(to_device(batch, device))
        total, weight = total + float(loss), weight + float(count)
    total, weight = ranks.sums([total, weight])
    return total / weight


def check_fit(projection: Projection, section: GuardSection, folder: Path) -> list[str]:
    """Compares a projection with this machine; returns the checks that failed and were let pass. Raises align.guard.Refused."""
    with of_field("run_dir"):
        host = read_host(folder)
    on_device = projection.shape.device == "cuda" and torch.cuda.is_available()
    device = torch.cuda.mem_get_info()[0] / 2**30 if on_device else None
    small = projection.peak_gb < host.total_host_gb / 4  # such a run disturbs nobody, and a busy machine only slows it down
    try:
        return preflight(
            projection, available_host_gb=host.available_host_gb, total_host_gb=host.total_host_gb, free_disk_gb=host.free_disk_gb,
            available_device_gb=device, mem_floor_gb=section.mem_floor_gb, load=None if small else host.load, cores=host.cores,
            disk_queue=None if small else host.disk_queue,
            settings=SETTINGS, ignore=section.ignore,
        )  # fmt: skip
    except Refused as refusal:
        raise Refused(refusal.check, f"{refusal} (guard.ignore={refusal.check} goes on all the same)") from None


def use_threads(threads: int, name: str = "threads") -> None:
    """Sets torch's CPU threads; 0 leaves torch's own choice. Raises ConfigError naming the field."""
    if threads < 0:
        raise ConfigError(f"{name} is {threads}; it must be at least 0 (0 leaves torch's own choice)")
    check_most(name, threads, THREADS)
    if threads:
        torch.set_num_threads(threads)


def check_sampling(section: Sampling) -> None:
    """Raises ConfigError, naming the field, for values that nothing can be sampled with."""
    check_numbers("sampling", section, {"max_new_tokens": 1, "top_k": 0})
    if not 0 < section.top_p <= 1:
        raise ConfigError(f"sampling.top_p is {section.top_p}; it must be above 0 and at most 1 (1: all tokens)")
    if not 0 <= section.min_p <= 1:
        raise ConfigError(f"sampling.min_p is {section.min_p}; it must be from 0 (all tokens) to 1")
    if "" in section.stop:
        raise ConfigError("sampling.stop holds an empty text, which every answer contains; remove it")


def check_judged(section: JudgeSection) -> None:
    """Raises ConfigError, naming the field, for values that nothing can be judged with."""
    check_numbers("eval", section, {"problems": 0, "samples": 1, "max_new_tokens": 1, "batch": 1, "show": 0})
    if section.source == "arithmetic":
        check_most("eval.problems", section.problems, GENERATED)
    if section.temperature == 0 and section.samples > 1 and section.problems:
        raise ConfigError(
            f"eval.samples={section.samples} at eval.temperature=0 would all be alike; add eval.temperature=1, or eval.samples=1"
        )


def check_numbers(name: str, section: Any, least: Mapping[str, int]) -> None:
    """Raises ConfigError, naming the field: one of these below its least value (those a section lacks aside) or beyond any use, or no
    temperature."""
    for field_, low in least.items():
        if (value := getattr(section, field_, low)) < low:
            raise ConfigError(f"{name}.{field_} is {value}; it must be at least {low}")
        if (most := {"samples": ANSWERS, "max_length": TOKENS}.get(field_)) is not None:
            check_most(f"{name}.{field_}", value, most)
    if not 0 <= (temperature := getattr(section, "temperature", 0.0)) < math.inf:
        raise ConfigError(f"{name}.temperature is {temperature}; it must be a finite number from 0 (0: the likeliest token each time)")


def check_template(tokenizer: Tokenizer, setting: str, directory: Path) -> None:
    """Raises ConfigError: what is asked through a chat template has none."""
    if tokenizer.chat_template is None:
        raise ConfigError(f"{setting}, but {directory} has no chat template; ask with bare prompts, or take a model that has one")


def prompt_ids(tokenizer: Tokenizer, row: Mapping[str, Any], place: str, window: int) -> list[int]:
    """`encode_prompt` for a model of this window. Raises ConfigError, naming the place: no text, no conversation, or too long."""
    try:
        ids = encode_prompt(tokenizer, dict(row))
    except (ChatError, TokenizerError) as error:
        raise ConfigError(f"{place}: {error}") from None
    if not ids:
        raise ConfigError(f"{place}: the prompt is empty, and the tokenizer puts nothing in front of it; write one, or remove the row")
    if len(ids) >= window:
        raise ConfigError(f"{place}: the prompt has {len(ids)} tokens, and the model's window is {window}; shorten it, or remove the row")
    return ids


def check_prompts(rows: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, config: ModelConfig, section: JudgeSection) -> None:
    """Raises ConfigError, naming the row, before anything is sampled: a prompt that the model cannot be asked with; or more answers than
    memory holds."""
    for number, row in enumerate(rows, 1):
        shown = row.get("prompt", row.get("messages"))
        prompt_ids(tokenizer, row, f"eval.source {section.source}: row {number}, {str(shown)[:40]!r}", config.max_length)
    longest = min(section.max_new_tokens, config.max_length)
    check_answers("eval.samples", section.samples, prompts=len(rows), at_once=ASKED_AT_ONCE, tokens=longest)


def check_answers(name: str, samples: int, *, prompts: int, at_once: int, tokens: int) -> None:
    """Raises ConfigError: the answers are more than this machine's memory holds.

    Args:
        name: the field that says how many answers a prompt gets.
        prompts, at_once: that are answered in all, all answers being kept, and in one call of the sampler.
        tokens: of the longest answer.
    """
    wanted = samples * (min(prompts, at_once) * tokens * TOKEN_BYTES + prompts * ANSWER_BYTES) / 2**30
    there = read_host(Path.cwd()).total_host_gb
    if wanted > there:
        raise ConfigError(
            f"{name} is {samples}: so many answers of up to {tokens} tokens to {prompts} prompts take {wanted:,.0f} GiB of host memory, "
            f"and there are {there:.0f}; take at most {max(int(samples * there / wanted), 1)}, or fewer prompts"
        )


def judged_rows(section: JudgeSection, *, chat: bool, system: str | None) -> list[dict[str, Any]]:
    """Rows {"prompt", "answer", ...}, those of a file in their order, the first `problems`; with chat also "messages"."""
    if section.source == "arithmetic":
        with of_field("eval.problems"):
            rows = arithmetic_rows(section.problems, seed=1, held_out=True)
    elif section.source in ("gsm8k_test", "math500"):
        rows = bundled_rows(section.source).rows[: section.problems]
    else:
        with of_field("eval.source"):
            rows = read_rows(caller_path(section.source), kind="answer").rows[: section.problems]
    if not chat:
        return rows
    opening = [{"role": "system", "content": system}] if system is not None else []
    return [{**row, "messages": [*opening, {"role": "user", "content": row["prompt"]}]} for row in rows]


def judge(
    model: Decoder, tokenizer: Tokenizer, rows: Sequence[dict[str, Any]], section: JudgeSection, *, seed: int,
    alive: Callable[[], None] = lambda: None, progress: Callable[[int, int], None] | None = None, **more: Any,
) -> EvalResult:  # fmt: skip
    """Samples an answer (or several) to each row and has align.verify judge them; `by_group` counts by a row's level, where it has one.

    alive: called with every token. `more`: done, keep and judge of `align.evals.accuracy`.
    """
    eos = [tokenizer.eos_id] if tokenizer.eos_id is not None else []
    sampler = LivingSampler(NativeSampler(model, eos_ids=eos, max_batch=section.batch), alive)
    return accuracy(
        sampler,
        tokenizer,
        rows,
        samples=section.samples,
        temperature=section.temperature,
        max_new_tokens=section.max_new_tokens,
        seed=seed,
        mode="marked",
        progress=progress,
        **more,
    )


def weights_digest(directory: Path) -> str:
    """sha256 of the weight files."""
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in (config if isinstance(config, dict) else asdict(config)).items():
        made |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return made


def write_through(file: TextIO, rows: Iterable[Mapping[str, Any]]) -> None:
    """Appends rows to an open JSONL file, and sees them on the disk. Raises ConfigError when the disk refuses them."""
    try:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())
    except OSError as error:
        with suppress(OSError):
            file.close()  # what is still in its buffer goes with it
        raise ConfigError(f"{file.name}: cannot be written ({error.strerror}); free space there, and go on with --resume") from None


def accuracies(judged: EvalResult) -> dict[str, float]:
    """The groups' accuracies as accuracy_1, accuracy_2, …, or one `accuracy` where the rows have no groups; with their intervals."""
    return with_intervals({f"accuracy_{name}": value for name, value in judged.group_intervals.items()} or {"accuracy": judged.interval})


def with_intervals(estimates: Mapping[str, Estimate]) -> dict[str, float]:
    """Each as three numbers, x, x_low and x_high, as align.tracking and the report know an interval."""
    return {
        f"{name}{end}": number
        for name, value in estimates.items()
        for end, number in (("", value.value), ("_low", value.low), ("_high", value.high))
    }


def changes(before: Mapping[str, float], after: Mapping[str, float]) -> list[str]:
    """The table of numbers before and after, a line each; intervals stand behind their number."""
    lines = []
    for name in after:
        if name.endswith(("_low", "_high")) and name.rpartition("_")[0] in after:
            continue
        interval = f"   [{after[f'{name}_low']:.3f}, {after[f'{name}_high']:.3f}]" if f"{name}_low" in after else ""
        lines.append(f"  {name:<22} {before.get(name, float('nan')):8.3f}  ->  {after[name]:8.3f}{interval}")
    return lines
