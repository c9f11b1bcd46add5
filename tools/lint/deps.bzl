"""What lint needs, for this workspace alone."""

load("//third_party/python:pip.bzl", "parse_lock", "pip_distribution")
load(":lock.bzl", "LINT_LOCK")

def lint_dependencies():
    for name, requirements in parse_lock(LINT_LOCK).items():
        pip_distribution(name = "align_lint_" + name.replace("-", "_"), keep_programs = True, requirements = requirements)
