"""vLLM as an engine of align.rollout_protocol: requests become its SamplingParams, its outputs samples. Nothing else of align is used."""

from typing import Any

from align.rollout_protocol import Drawn, Generate, tokenizer_sha256, weights_sha256

FEATURES = ["seed", "stop_strings", "raw_logprobs", "top_p", "top_k", "min_p", "cancel"]
_SEEDS = 2**62  # vLLM adds a sample's number to the seed of its request, in 64 bits


class VllmEngine:
    """Serves requests with an `LLMEngine` that was made with logprobs_mode "processed_logprobs".

    vLLM gives one kind of log-probabilities at a time. Where temperature and filters change nothing the two kinds that the protocol wants
    are the same; elsewhere each answer is read once more as a prompt, whose log-probabilities are at temperature 1 in this mode.
    """

    def __init__(self, engine: Any, params: Any, final: Any, *, name: str, directory: str, window: int) -> None:
        """engine: vllm.v1.engine.llm_engine.LLMEngine, on the model in `directory`. params, final: vLLM's SamplingParams and its
        RequestOutputKind.FINAL_ONLY. window: the engine's max_model_len.
        """
        self._engine, self._params, self._final, self._window = engine, params, final, window
        self.name, self.features = name, FEATURES
        self.tokenizer, self.weights = tokenizer_sha256(directory), weights_sha256(directory)
        self._requests: dict[str, Generate] = {}
        self._scoring: dict[str, tuple[list[Drawn], dict[int, list[float]]]] = {}  # a request's answers, and what is known of them

    def add(self, key: str, request: Generate) -> None:
        """Raises ValueError: the prompt fills the window, top_p is 0, or vLLM's own word."""
        room = self._window - len(request.prompt) - _filtered(request)
        if room < 1:
            raise ValueError(
                f"a prompt of {len(request.prompt)} tokens in a window of {self._window}; start vLLM with a larger --max-model-len"
            )
        try:
            self._engine.add_request(key, {"prompt_token_ids": request.prompt}, self._sampling(request, room))
        except Exception as error:  # vLLM's own errors have no class in common with ValueError
            raise ValueError(f"vLLM: {error}") from error
        self._requests[key] = request

    def _sampling(self, request: Generate, room: int) -> Any:
        """The request as SamplingParams, with at most `room` new tokens."""
        return self._params(
            n=request.n if request.temperature else 1, temperature=request.temperature, top_p=request.top_p, top_k=request.top_k,
            min_p=request.min_p, seed=request.seed % _SEEDS, max_tokens=min(request.max_new_tokens, room), stop_token_ids=request.stop_ids,
            stop=request.stop_strings, ignore_eos=True, logprobs=0, detokenize=bool(request.stop_strings), skip_special_tokens=False,
            output_kind=self._final,
        )  # fmt: skip

    def step(self) -> list[tuple[str, list[Drawn]]]:
        done = []
        for output in self._engine.step():
            key, _, part = output.request_id.partition("#")
            if not output.finished or key not in self._requests:
                continue
            if part:
                self._scoring[key][1][int(part)] = self._scores(key, int(part), output)
            else:
                self._drawn(key, output)
            found, scores = self._scoring[key]
            if len(scores) == len(found):
                self._forget(key)
                done.append((key, [Drawn(one.ids, one.logprobs, scores[at], one.finish_reason) for at, one in enumerate(found)]))
        return done

    def abort(self, key: str) -> None:
        if key in self._requests:
            parts = [f"{key}#{at}" for at in range(self._requests[key].n)]
            self._engine.abort_request([key, *parts])
            self._forget(key)

    def load(self, path: str) -> None:
        self._engine.collective_rpc("reload_weights", kwargs={"weights_path": path})
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM keeps its prefix cache, which is of the weights before")

    def _drawn(self, key: str, output: Any) -> None:
        """Notes the n answers of a request, and asks for their log-probabilities at temperature 1 where those are others."""
        request, found = self._requests[key], []
        for one in sorted(output.outputs, key=lambda each: each.index):
            ids = [int(token) for token in one.token_ids]
            logprobs = [float(at[token].logprob) for token, at in zip(ids, one.logprobs, strict=True)]
            reason = "length" if one.finish_reason == "length" else "stop"
            found.append(Drawn(ids, logprobs if request.temperature else [0.0] * len(ids), logprobs, reason))
        if not request.temperature:
            found *= request.n  # vLLM makes one greedy answer of a prompt; the others are the same
        self._scoring[key] = (found, {})
        for at, drawn in enumerate(found):
            if not _filtered(request):
                self._scoring[key][1][at] = drawn.raw_logprobs
                continue
            params = self._params(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, output_kind=self._final)
            self._engine.add_request(f"{key}#{at}", {"prompt_token_ids": [*request.prompt, *drawn.ids]}, params)

    def _scores(self, key: str, at: int, output: Any) -> list[float]:
        request, ids = self._requests[key], self._scoring[key][0][at].ids
        told = output.prompt_logprobs[len(request.prompt) :]
        return [float(each[token].logprob) for token, each in zip(ids, told, strict=True)]

    def _forget(self, key: str) -> None:
        self._requests.pop(key, None)
        self._scoring.pop(key, None)


def _filtered(request: Generate) -> bool:
    """Whether the distribution that is drawn from is not the model's own at temperature 1. At temperature 0 vLLM tells the latter."""
    return request.temperature not in (0.0, 1.0) or (
        request.temperature > 0 and (request.top_p < 1 or request.top_k > 0 or request.min_p > 0)
    )
