"""Installs each library's wheel in a bare venv of its own and runs the stranger's test there: python3 reuse/wheel/run.py [library …]

`pip install --no-index --no-deps` takes the wheel and those it requires; beside them lie the packages that its metadata declares, at the
pinned versions, as the build installed them (a .pth line each, so no gigabytes are copied), and nothing else. A need that no wheel declares
is a test that fails. Last, one venv holds all wheels, and `pip check` finds every requirement met.
With --own-tests the library's own test files run too, against the installed wheels (minutes).
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ["numpy", "pyarrow", "safetensors", "torch", "triton"]


class Wheels:
    """The wheels that Bazel made, what each requires, and where the pinned packages lie."""

    def __init__(self, bazel: list[str]) -> None:
        flags = ["--noshow_progress", "--curses=no", "--symlink_prefix=/"]
        sites = [f"//third_party/python:{name}" for name in (*PACKAGES, "pytest", "hypothesis")]
        subprocess.run([ROOT / "bazelw", *bazel, "build", *flags, "//tools/wheel:all", *sites], cwd=ROOT, check=True)
        asked = [[ROOT / "bazelw", *bazel, "info", key] for key in ("bazel-bin", "output_base")]
        told = [subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip() for command in asked]
        out, self.base = map(Path, told)
        self.files = {path.name.split("-")[0].removeprefix("align_"): path for path in sorted((out / "tools/wheel").glob("align_*.whl"))}
        self.python = (self.base / "external/align_python/venv/bin/python3").resolve()
        needs = (ROOT / "third_party/python/needs.bzl").read_text(encoding="utf-8")
        self.needs = {name: re.findall(r'"([\w]+)"', line) for name, line in re.findall(r'^    "(\w+)": \[(.*)\]', needs, re.MULTILINE)}

    def required(self, name: str) -> tuple[list[str], list[str]]:
        """(libraries, packages) that the wheel requires, those of the required wheels included; extras too, for they are tested."""
        with zipfile.ZipFile(self.files[name]) as file:
            said = file.read(next(arc for arc in file.namelist() if arc.endswith("/METADATA"))).decode().partition("\n\n")[0]
        libraries, packages = [name], []
        for need in re.findall(r"^Requires-Dist: ([\w-]+)", said, re.MULTILINE):
            if need.startswith("align-"):
                more = self.required(need.removeprefix("align-").replace("-", "_"))
                libraries, packages = libraries + more[0], packages + more[1]
            else:
                packages.append(need)
        return sorted(set(libraries)), sorted(set(packages))

    def venv(self, folder: Path, libraries: list[str], packages: list[str]) -> Path:
        """A venv with those wheels installed and those packages, with what they need themselves, in reach. Its python."""
        subprocess.run([self.python, "-m", "venv", "--without-pip", folder], check=True)
        python = folder / "bin/python"
        command = [self.python, "-m", "pip", f"--python={python}", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
        subprocess.run([*command, *(self.files[library] for library in libraries)], check=True)
        sites = [self.base / f"external/align_pip_{part}/site" for name in packages for part in (name, *self.needs.get(name, []))]
        (site,) = folder.glob("lib/python3.*/site-packages")
        (site / "pinned.pth").write_text("".join(f"{path}\n" for path in sites))
        return python


def ran(python: Path, *words: str | Path, folder: str) -> subprocess.CompletedProcess[str]:
    """A process that finds nothing but what the venv holds."""
    environment = {"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([python, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout[-4000:], done.stderr[-4000:], sep="\n")
    return done


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="reuse/wheel/run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bazel", action="append", default=[], help="startup option of Bazel, such as --output_base=DIR")
    parser.add_argument("--own-tests", action="store_true", help="the libraries' own test files too")
    parser.add_argument("libraries", nargs="*", help="default: all")
    arguments = parser.parse_args(argv)
    started = time.monotonic()
    wheels = Wheels(arguments.bazel)
    failed = []
    names = arguments.libraries or list(wheels.files)
    for name in names:
        with tempfile.TemporaryDirectory(prefix="align-wheel-") as folder:
            libraries, packages = wheels.required(name)
            python = wheels.venv(Path(folder, "venv"), libraries, packages)
            code = ran(python, "-I", ROOT / f"reuse/bazel/{name}_test.py", folder=folder).returncode
            beside = f"{len(libraries) - 1} other wheels, {', '.join(packages) or 'no package'}"
            print(f"  {'FAILED' if code else 'passed'}  align-{name}: {beside}", flush=True)
            failed += [name] if code else []
    with tempfile.TemporaryDirectory(prefix="align-wheel-") as folder:
        python = wheels.venv(Path(folder, "venv"), list(wheels.files), PACKAGES + (["pytest", "hypothesis"] if arguments.own_tests else []))
        check = ran(wheels.python, "-m", "pip", f"--python={python}", "check", folder=folder)
        print(f"  pip check, all wheels in one venv: {check.stdout.strip()}")
        failed += ["pip check"] if check.returncode else []
        for name in names if arguments.own_tests else []:
            helpers = "pythonpath=third_party/poison tools/py " + " ".join(f"libs/{other}/tests" for other in wheels.files)
            command = ["-m", "pytest", "-q", f"--rootdir={ROOT}", f"--config-file={ROOT}/pyproject.toml", f"--override-ini={helpers}"]
            done = ran(python, *command, "-p", "no:cacheprovider", ROOT / f"libs/{name}/tests", folder=folder)
            print(f"  own tests of align-{name}, on the wheels: {done.stdout.strip().splitlines()[-1]}", flush=True)
            failed += [f"own tests of {name}"] if done.returncode else []
    print(f"reuse: {len(names)} wheels, {len(failed)} failures, {time.monotonic() - started:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
