"""Makes the wheel of one library: python3 make_wheel.py SPEC.json OUT.whl

Metadata comes from libs/<name>/pyproject.toml, which `pip install ./libs/<name>` reads too; libraries of this repository become exact
requirements (align-tokenizer==0.1.0). What pyproject.toml declares must be what BUILD declares. Nothing but the inputs reaches the
bytes: files are sorted, stored without compression (zlib differs between machines) and dated 1980-01-01.
Wheel format: packaging.python.org/specifications/binary-distribution-format, metadata: …/core-metadata, version 2.4.
"""

import base64
import hashlib
import json
import re
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

CLASSIFIERS = [
    "Operating System :: POSIX :: Linux",
    "Programming Language :: Python :: 3.11",
    "Programming Language :: Python :: 3.12",
    "Programming Language :: Python :: 3.13",
    "Typing :: Typed",
]


class WheelError(ValueError):
    """The library's pyproject.toml does not describe the library; the message says what to write."""

    exit_code = 2


def make(spec: dict[str, Any], out: Path) -> None:
    """Writes the wheel of `spec` (wheel.bzl says what is in it) to `out`. Raises WheelError."""
    name = spec["library"]
    texts = {arc: Path(path).read_bytes() for arc, path in spec["files"].items()}
    if "pyproject.toml" not in texts:
        raise WheelError(f"libs/{name}/pyproject.toml is missing; copy that of a small library (libs/guard)")
    project = tomllib.loads(texts["pyproject.toml"].decode())["project"]
    if project["name"] != f"align-{name}" or project["version"] != spec["version"]:
        said = f"{project['name']} {project['version']}"
        raise WheelError(f"libs/{name}/pyproject.toml says {said}; it is align-{name} {spec['version']} (libraries.bzl)")
    members = {arc: data for arc, data in texts.items() if arc.startswith(f"align/{name}/")}
    if f"align/{name}/py.typed" not in members:
        raise WheelError(f"libs/{name}/align/{name}/py.typed is missing; add the empty file, and to data in BUILD")
    info = f"align_{name}-{spec['version']}.dist-info"
    members[f"{info}/METADATA"] = metadata(spec, project, texts.get("README.md", b"").decode()).encode()
    members[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: align tools/wheel\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    members[f"{info}/licenses/LICENSE"] = Path(spec["license"]).read_bytes()
    record = "".join(f"{arc},{digest(data)},{len(data)}\n" for arc, data in sorted(members.items()))
    members[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as file:
        for arc in sorted(members, key=lambda arc: (".dist-info/" in arc, arc)):  # the specification wants the metadata last
            entry = zipfile.ZipInfo(arc, (1980, 1, 1, 0, 0, 0))
            entry.create_system = 3  # Unix, whatever makes it
            entry.external_attr = 0o100644 << 16
            file.writestr(entry, members[arc])


def digest(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def metadata(spec: dict[str, Any], project: dict[str, Any], readme: str) -> str:
    """METADATA, with the requirements that BUILD and pyproject.toml agree on."""
    name, extras = spec["library"], project.get("optional-dependencies", {})
    lines = [
        "Metadata-Version: 2.4",
        f"Name: align-{name}",
        f"Version: {spec['version']}",
        f"Summary: {project['description']}",
        f"License-Expression: {project['license']}",
        "License-File: LICENSE",
        *(f"Classifier: {classifier}" for classifier in CLASSIFIERS),
        f"Requires-Python: {project['requires-python']}",
        *(f"Requires-Dist: {requirement}" for requirement in sorted(exact(spec, project["dependencies"]))),
    ]
    for extra in sorted(extras):
        lines += [f"Provides-Extra: {extra}"]
        lines += [f'Requires-Dist: {requirement}; extra == "{extra}"' for requirement in sorted(exact(spec, extras[extra]))]
    compare(spec, [*project["dependencies"], *(requirement for extra in extras.values() for requirement in extra)])
    return "\n".join([*lines, "Description-Content-Type: text/markdown", "", readme])


def exact(spec: dict[str, Any], requirements: list[str]) -> list[str]:
    return [f"{line}=={spec['version']}" if line.startswith("align-") else line for line in requirements]


def compare(spec: dict[str, Any], requirements: list[str]) -> None:
    """Raises WheelError where pyproject.toml and BUILD disagree."""
    declared = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in requirements}  # type: ignore[index]
    libraries = {"align_" + label.rpartition(":")[2] for label in spec["direct"] if label.startswith("libs/")}
    packages = {label.rpartition(":")[2] for label in spec["direct"] if label.startswith("third_party/")}
    missing = sorted((libraries | packages) - declared)
    # A package that a package needs without saying so (safetensors.torch: numpy) may be declared, and no library beside the direct ones.
    idle = sorted(declared - libraries - set(spec["packages"]))
    if missing or idle:
        where = f"libs/{spec['library']}/pyproject.toml: dependencies are not those of BUILD"
        raise WheelError(f"{where}; add {', '.join(missing) or 'nothing'}, remove {', '.join(idle) or 'nothing'}")


if __name__ == "__main__":
    try:
        make(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
    except WheelError as error:
        sys.exit(str(error))
