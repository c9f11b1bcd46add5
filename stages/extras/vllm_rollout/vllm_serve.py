"""vLLM behind the rollout protocol, in the venv of requirements.lock:

    venv/bin/python vllm_serve.py --model DIRECTORY --listen unix:PATH [vLLM's own engine arguments]

PYTHONPATH names libs/rollout_protocol. //stages:grpo with rollout.sampler=vllm starts it so.
"""

import sys

import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.llm_engine import LLMEngine
from vllm_engine import VllmEngine

from align.rollout_protocol import Server, listen, stop_with_parent


def main(argv: list[str]) -> int:
    parser = FlexibleArgumentParser(prog="vllm_serve", description=__doc__)
    parser.add_argument("--listen", required=True, help="unix:PATH or tcp:HOST:PORT")
    parser.add_argument("--lifeline", action="store_true", help="end when standard input does: with the trainer that holds it")
    arguments = EngineArgs.add_cli_args(parser).parse_args(argv)
    options = EngineArgs.from_cli_args(arguments)
    options.logprobs_mode = "processed_logprobs"
    directory = str(options.model)
    engine = LLMEngine.from_engine_args(options)
    server = Server(
        VllmEngine(
            engine, SamplingParams, RequestOutputKind.FINAL_ONLY, name=f"vllm {vllm.__version__}", directory=directory,
            window=engine.model_config.max_model_len,
        )
    )  # fmt: skip
    if arguments.lifeline:
        stop_with_parent(server)
    server.accept(listen(arguments.listen))
    server.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
