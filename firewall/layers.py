"""The library graph that Bazel sees, against the layer table of docs/architecture.md, and as the drawing there.

    python3 firewall/layers.py GRAPH.dot    # writes the drawing anew; firewall/update_goldens.sh calls it

A library depends on lower layers, or inside its own on what its row names; the packages in brackets are those it imports itself.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

Edges = dict[str, set[str]]  # library to what it depends on: libraries by name, packages as "package:<name>"
DOCUMENT = Path(__file__).absolute().parents[1] / "docs/architecture.md"
DRAWING = re.compile(r"(?<=```mermaid\n).*?(?=```\n)", re.DOTALL)


@dataclass(frozen=True)
class Place:
    """Where the table puts a library."""

    layer: int
    packages: frozenset[str]
    layers: frozenset[int]  # that its row allows
    libraries: frozenset[str]  # that its row names


def read_graph(dot: str) -> Edges:
    """Edges of a genquery with --output=graph."""

    def name(label: str) -> str:
        short = label.rpartition(":")[2]
        return f"package:{short}" if label.startswith("//third_party/") else short

    edges: Edges = {name(label): set() for label in re.findall(r'^\s*"(//libs/[^"]+)"', dot, re.MULTILINE)}
    for source, target in re.findall(r'"(//libs/[^"]+)" -> "([^"]+)"', dot):
        edges[name(source)].add(name(target))
    return edges


def read_table(text: str) -> dict[str, Place]:
    """The rows of the table under "## Layers" that name libraries."""
    section = text.partition("\n## Layers\n")[2].partition("\n## ")[0]
    places = {}
    for layer, libraries, uses in re.findall(r"^\| (\d) \| (.*?) \| (.*?) \|$", section, re.MULTILINE):
        layers: set[int] = set()
        for first, last in re.findall(r"layers? (\d)(?:–(\d))?", uses):
            layers |= set(range(int(first), int(last or first) + 1))
        for name, packages in re.findall(r"`(\w+)`(?: \(([^)]*)\))?", libraries):
            listed = frozenset(filter(None, packages.split(", ")))
            places[name] = Place(int(layer), listed, frozenset(layers), frozenset(re.findall(r"`(\w+)`", uses)))
    return places


def compare(edges: Edges, places: dict[str, Place]) -> list[str]:
    """What the graph does and the table does not say, and the reverse."""
    found = [f"{name} is in no row of the table" for name in sorted(edges.keys() - places.keys())]
    found += [f"{name} is in the table and no library" for name in sorted(places.keys() - edges.keys())]
    for name in sorted(edges.keys() & places.keys()):
        place = places[name]
        packages = {each.partition(":")[2] for each in edges[name] if each.startswith("package:")}
        if packages != place.packages:
            found.append(
                f"{name} imports {', '.join(sorted(packages)) or 'no package'}, the table says {', '.join(sorted(place.packages))}"
            )
        for other in sorted(each for each in edges[name] if not each.startswith("package:")):
            above = places[other].layer if other in places else 0
            if above > place.layer:
                found.append(f"{name} (layer {place.layer}) looks up to {other} (layer {above})")
            elif other not in place.libraries and (above not in place.layers or above == place.layer):
                found.append(f"{name} uses {other}, which its row does not allow")
    return found


def drawing(edges: Edges, places: dict[str, Place]) -> str:
    """The graph in Mermaid's language: a box a library, its packages under its name, an arrow to each library that nothing between says."""
    libraries = {name: {each for each in uses if each in edges} for name, uses in edges.items()}
    reach: Edges = {}

    def reached(name: str) -> set[str]:
        if name not in reach:
            reach[name] = libraries[name].union(*(reached(each) for each in libraries[name]))
        return reach[name]

    lines = ["flowchart TD"]
    for layer in sorted({place.layer for place in places.values()}, reverse=True):
        lines.append(f"    subgraph layer{layer} [layer {layer}]")
        for name in sorted(name for name, place in places.items() if place.layer == layer and name in edges):
            packages = sorted(each.partition(":")[2] for each in edges[name] if each.startswith("package:"))
            lines.append(f'        {name}["{"<br/>".join([name, *([", ".join(packages)] if packages else [])])}"]')
        lines.append("    end")
    for name in sorted(libraries):
        direct = {each for each in libraries[name] if not any(each in reached(other) for other in libraries[name])}
        lines += [f"    {name} --> {each}" for each in sorted(direct)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    document = DOCUMENT.read_text(encoding="utf-8")
    drawn = drawing(read_graph(Path(sys.argv[1]).read_text(encoding="utf-8")), read_table(document))
    DOCUMENT.write_text(DRAWING.sub(lambda _: drawn, document), encoding="utf-8")
