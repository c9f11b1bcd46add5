"""docs/architecture.md against the graph of the build, and the comparison itself on planted graphs."""

from pathlib import Path

import pytest
import requires
from layers import DRAWING, compare, drawing, read_graph, read_table

HERE = Path(__file__).parents[1]
TEXT = (HERE.parent / "docs/architecture.md").read_text(encoding="utf-8")
TABLE = """
## Layers
| layer | libraries | may use |
|---|---|---|
| 0 | `low` `text` | the standard library |
| 1 | `array` (numpy) | layer 0 |
| 1 | `reader` | layer 0, `array` |
| 2 | `top` (torch, numpy) | layers 0–1 |

## Next
"""
DOT = """digraph mygraph {
  node [shape=box];
  "//libs/top:top"
  "//libs/top:top" -> "//libs/reader:reader"
  "//libs/top:top" -> "//libs/low:low"
  "//libs/top:top" -> "//third_party/python:torch"
  "//libs/top:top" -> "//third_party/python:numpy"
  "//third_party/python:torch"
  "//libs/reader:reader"
  "//libs/reader:reader" -> "//libs/array:array"
  "//libs/array:array"
  "//libs/array:array" -> "//libs/low:low"
  "//libs/array:array" -> "//third_party/python:numpy"
  "//libs/low:low"
  "//libs/text:text"
}
"""
TEXT_ALONE = '  "//libs/text:text"\n'


def graph() -> dict[str, set[str]]:
    file = HERE / "libraries.graph"
    if not file.exists():
        requires.bazel()
    return read_graph(file.read_text(encoding="utf-8"))


def test_the_layer_table_is_the_graph():
    assert compare(graph(), read_table(TEXT)) == [], "docs/architecture.md, section Layers"


def test_the_drawing_is_the_graph():
    found = DRAWING.search(TEXT)
    assert found is not None
    assert found[0] == drawing(graph(), read_table(TEXT)), "docs/architecture.md: firewall/update_goldens.sh draws it anew"


def test_a_graph_that_keeps_to_its_table():
    assert compare(read_graph(DOT), read_table(TABLE)) == []


@pytest.mark.parametrize(
    ("right", "wrong", "words"),
    [
        (TEXT_ALONE, TEXT_ALONE + '  "//libs/text:text" -> "//libs/top:top"\n', "text (layer 0) looks up to top (layer 2)"),
        (TEXT_ALONE, TEXT_ALONE + '  "//libs/text:text" -> "//libs/low:low"\n', "text uses low, which its row does not"),
        ('"//libs/array:array" -> "//libs/low:low"', '"//libs/array:array" -> "//libs/reader:reader"', "array uses reader, which its row"),
        ('  "//libs/array:array" -> "//third_party/python:numpy"\n', "", "array imports no package, the table says numpy"),
        (TEXT_ALONE, TEXT_ALONE + '  "//libs/new:new"\n', "new is in no row of the table"),
        (TEXT_ALONE, "", "text is in the table and no library"),
    ],
)  # fmt: skip
def test_each_difference_is_told(right: str, wrong: str, words: str):
    assert right in DOT
    assert any(words in line for line in compare(read_graph(DOT.replace(right, wrong)), read_table(TABLE)))


def test_the_drawing_leaves_out_what_another_arrow_says():
    drawn = drawing(read_graph(DOT), read_table(TABLE)).splitlines()
    arrows = [line.strip() for line in drawn if "-->" in line]
    assert arrows == ["array --> low", "reader --> array", "top --> reader"]
    assert '        top["top<br/>numpy, torch"]' in drawn
    assert drawn.index("    subgraph layer2 [layer 2]") < drawn.index("    subgraph layer0 [layer 0]")
