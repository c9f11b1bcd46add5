"""The libraries: one version, and one list for the aliases, the firewall, the wheels and the reuse tests. tools/py/scan.py compares it with libs/*."""

VERSION = "0.1.0"

LIBRARIES = [
    "checkpoint",
    "config",
    "data",
    "evals",
    "guard",
    "ingest",
    "kernels",
    "lean",
    "model",
    "objectives",
    "optim8bit",
    "rl",
    "rollout",
    "rollout_protocol",
    "tokenizer",
    "tracking",
    "train",
    "verify",
]
