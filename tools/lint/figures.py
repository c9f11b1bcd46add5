"""A measured figure names the command that made it: in its section, or in one above it."""

import re

RATE = r"[MGT]B/s|tok/s|tokens? (?:a|per) second|(?:CPU-)?m?s a \w+|[µn]s|ms|TFLOP/s"
MEASURED = re.compile(rf"\d[\d.,]*\s?(?:{RATE})\b|\d\.\d+\s?×(?= )")
PROGRAM = r"(?:[A-Z_]+=\S+ )*(?:(?:\./)?bazelw?|python3?|\.ci/run|(?:tools|firewall|reuse)/[\w/.]+)"
# In a span, at the head of a line of code (fenced, or indented by four), or in the dated document of benchmarks/ that the text points to.
COMMAND = re.compile(rf"`{PROGRAM}[ `]|^(?: {{4}})?(?:\$ )?{PROGRAM}(?: |$)|`benchmarks/[\w.-]+\.md`", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def check(path: str, text: str) -> list[str]:
    """Returns complaints about one Markdown file, at most one a section."""
    found, commands, start = [], [False] * 7, 1
    for section in re.split(r"(?m)^(?=#{1,6} )", FENCE.sub(_without_headings, text)):
        depth = len(section) - len(section.lstrip("#"))
        commands[depth:] = [bool(COMMAND.search(section))] * (7 - depth)
        figure = MEASURED.search(FENCE.sub("", section))
        if figure and not any(commands[: depth + 1]):
            line = start + section.count("\n", 0, section.find(figure[0]))
            found.append(f"{path}:{line}: {figure[0].strip()}: no command in this section makes it; name the one that does")
        start += section.count("\n")
    return found


def _without_headings(block: re.Match[str]) -> str:
    """A comment in a code block is no heading."""
    return re.sub(r"(?m)^#", " ", block[0])
