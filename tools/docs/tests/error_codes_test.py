"""docs/errors.md is what the code says, and every class in it has a sentence."""

from pathlib import Path

import error_codes

ROOT = Path(__file__).absolute().parents[3]


def test_the_page_is_current():
    assert (ROOT / "docs/errors.md").read_text(encoding="utf-8") == error_codes.page(ROOT), (
        "docs/errors.md is old: ./bazelw run //tools/docs:error_codes -- --write"
    )


def test_codes_are_inherited_and_others_left_out(tmp_path):
    folder = tmp_path / "libs/one/align/one"
    folder.mkdir(parents=True)
    bad = 'class Bad(ValueError):\n    """Bad input,\n    plainly.\n\n    More."""\n\n    exit_code = 2\n'
    others = 'class Worse(Bad):\n    """Worse."""\n\nclass Fine(ValueError):\n    """Fine."""\n\nclass Loop(Loop):\n    """Loop."""\n'
    (folder / "_a.py").write_text(f"{bad}\n{others}")
    text = error_codes.page(tmp_path)
    assert "| `Bad` | 2 | `libs/one` | ValueError | Bad input, plainly. |" in text
    assert "| `Worse` | 2 | `libs/one` | Bad | Worse. |" in text and "Fine" not in text and "Loop" not in text


def test_every_class_says_what_it_is_and_has_a_known_code():
    for line in error_codes.page(ROOT).splitlines():
        if line.startswith("| `"):
            name, number, _, _, doc = (cell.strip() for cell in line.strip("|").split("|"))
            assert doc and int(number) in error_codes.CODES, name
