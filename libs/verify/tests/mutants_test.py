r"""Planted faults: each changes one place of the judge, and the questions of `verify_questions` must notice every one."""
# ruff: noqa: E501 (literals that are long)

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from align.verify import parse

PACKAGE = Path(parse.__code__.co_filename).parent
QUESTIONS = Path(__file__).parent / "verify_questions.py"

MUTANTS = [
    ("_decide.py", "return bool(x == y)", "return bool(abs(x - y) < 1e-6)"),
    ("_compare.py", "if decimal[2] >= 6 and", "if decimal[2] >= 1 and"),
    ("_compare.py", "room = decimal[3] / 2 if", "room = decimal[3] * 20 if"),
    ("_compare.py", "if units.conflict(a.unit, b.unit):\n            return False", "if units.conflict(a.unit, b.unit):\n            pass"),
    ("_compare.py", "a.unit.scale != b.unit.scale", "False"),
    ("_compare.py", "tree.rational(Fraction(1, 100))", "tree.rational(Fraction(1, 10))"),
    ("_compare.py", "if _is(a, unit) != _is(b, unit):", "if True:"),
    ("_compare.py", "_all([_cover(a, b), _cover(b, a)])", "_cover(a, b)"),
    ("_compare.py", "_all([_cover(a, b), _cover(b, a)])", "_cover(b, a)"),
    ("_compare.py", "if len(a) == len(b) else False", "if True else False"),
    ("_compare.py", "return _in_order(a.items, b.items) if a.info == b.info else False", "return _in_order(a.items, b.items)"),
    ("_compare.py", "if a.name and b.name and not _same_name(a.name, b.name):", "if False:"),
    ("_compare.py", "if not (_consistent(a) and _consistent(b)):", "if False:"),
    ("_compare.py", "return a.info[:2] == b.info[:2] and", "return a.info[:1] == b.info[:1] and"),
    ("_compare.py", "products = [same(", "products = [True or same("),
    ("_compare.py", "return a.sides == b.sides", "return True"),
    ("_compare.py", "members = _as_point(listed, other.name) if other.info == \"()\" else None", "members = listed.items"),
    ("_compare.py", "if a.kind == \"text\" or b.kind == \"text\":\n        return _text(a) == _text(b)", "if a.kind == \"text\" or b.kind == \"text\":\n        return sorted(_text(a)) == sorted(_text(b))"),
    ("_relations.py", "if apart is False:", "if True:"),
    ("_relations.py", "return all(tree.symbols(difference) for difference in differences)", "return False"),
    ("_relations.py", "if relation != other_relation:", "if False:"),
    ("_relations.py", "direction == 1 or", "direction or"),
    ("_relations.py", "left, right, relation = right, left, _FLIP[relation]", "relation = _FLIP[relation]"),
    ("_relations.py", "1 if slope > 0 else -1", "1"),
    ("_sets.py", "if closed != closed2 or shut != shut2 or", "if"),
    ("_sets.py", "if gap > 0 or (gap == 0 and (before[3] or closed)):", "if gap >= 0:"),
    ("_sets.py", "low, closed = piece[2], not piece[3]", "low, closed = piece[2], piece[3]"),
    ("_sets.py", "start = (low, closed) if order > 0 else (low2, closed2) if order < 0", "start = (low, closed) if order < 0 else (low2, closed2) if order > 0"),
    ("_sets.py", "if relation == \"!=\":", "if relation == \"?\":"),
    ("_modular.py", "return False if all(atom[0] == \"s\" for atom in point) else None", "return False"),
    ("_decide.py", "[[bool(mask >> k & 1) for k in range(count)] for mask in range(1 << count)]", "[[False] * count] * _TRIALS"),
    ("_decide.py", "if found and names:\n        found = _on_pieces", "if False:\n        found = _on_pieces"),
    ("_decide.py", "atom[1] not in _ONE_SIGN and tree.symbols(atom)}", "False}"),
    ("_decide.py", "(node[1] in (\"abs\", \"max\", \"min\") and _complex(node))", "False"),
    ("_pieces.py", "inner += [node for node in variables if node[0] == \"f\"]", "inner += []"),
    ("_read.py", "return side if factor == 1 else times(side, (\"q\", factor))", "return side"),
    ("_sets.py", "if domain.sides == (\"R\",):", "if True:"),
    ("_sets.py", "False, value.items[1].node, False) or None", "False, value.items[1].node, False)"),
    ("_pieces.py", "zeros.update(_zeros(", "zeros.update([] and ("),
    ("_pieces.py", "return [-g[0] / b] if b else []", "return []"),
    ("_normal.py", "(\"f\", \"floor\", _sorted(add(u, (\"q\", -whole)))), (\"q\", whole)", "(\"f\", \"floor\", _sorted(add(u, (\"q\", -whole)))), (\"q\", 0)"),
    ("_decide.py", "return not (_undefined(a) or _undefined(b))", "return True"),
    ("_decide.py", "if found is not None:\n                return found", "if found is not False:\n                return True"),
    ("_decide.py", "if \"inf\" in constants:\n        return False", "if \"inf\" in constants:\n        return True"),
    ("_decide.py", "if imaginary is None and low > 0:", "if imaginary is None and low >= -8:"),
    ("_decide.py", "if max(-low, high) <= limit:", "if min(-low, high) <= limit:"),
    ("_modular.py", "if evaluate(a, prime, point, noise) != evaluate(b, prime, point, noise):", "if False:"),
    ("_modular.py", "point[node] = noise.next() % (p - 2) + 2", "point[node] = 1"),
    ("_modular.py", "prime = noise.prime()", "prime = 2305843009213693951"),
    ("_ball.py", "return (degree - 1) * max(upper, 0.0) + max(lower, 0.0) + 2", "return 20.0"),
    ("_ball.py", "if a > 0 or b < 0 or", "if"),
    ("_ball.py", "return a - f, b - e, c + g, d + h, upper, lower", "return a + e, b + f, c + g, d + h, upper, lower"),
    ("_ball.py", "if a < 0 < b:\n            a, b = 0, max(-a, b)\n            return a, b, None, None, upper, lower\n        return *_absolute(a, b)", "return *(a, b)"),
    ("_normal.py", "half_i = mul(tree.rational(Fraction(-1, 2)), tree.I)", "half_i = mul(tree.rational(Fraction(1, 2)), tree.I)"),
    ("_normal.py", "r = 2 - r if r > 1 else r", "r = r - 1 if r > 1 else r"),
    ("_normal.py", "for k in range(1, shift + 1):", "for k in range(1, shift):"),
    ("_tree.py", "return UNDEF if b == 0 or base in (INF, NEG_INF) else ONE", "return ONE"),
    ("_tree.py", "return ZERO if n > 0 else UNDEF", "return ZERO"),
    ("_tree.py", "if infinite == -sign:\n                    return UNDEF", "if infinite == -sign:\n                    return ZERO"),
    ("_operate.py", "base = words.get(base_text.lower()) or (int(base_text) if base_text.isdigit() and len(base_text) < 3 else 0)", "base = 10"),
    ("_operate.py", "tail = Fraction(int(block), (10 ** len(block) - 1) * 10**places)", "tail = Fraction(int(block), 10 ** len(block) * 10**places)"),
    ("_numerals.py", "if 0 < a < b:", "if False:"),
    ("_grammar.py", "return operand if sign > 0 else op.negative(operand)", "return operand"),
    ("_units.py", "return (a.known and b.known and a.dimensions != b.dimensions) or", "return a.dimensions != b.dimensions or"),
    ("_extract.py", "if stop < 0:\n        return Extraction(None, \"boxed\"", "if stop < -9:\n        return Extraction(None, \"boxed\""),
    ("_extract.py", "if not all(parts):", "if not any(parts):"),
    ("_extract.py", "text = text[close + 8 :]", "pass"),
    ("_decide.py", "True if vanishes(difference) else None", "True"),
    ("_closed.py", "and _product_is_one(counts)", "and True"),
    ("_closed.py", "and _product_is_real(counts) and", "and True and"),
    ("_closed.py", "turn = tree.mul(tree.rational(sign if n > 0 else -sign), tree.I)", "turn = tree.mul(tree.rational(sign), tree.I)"),
    ("_solve.py", "direction, ends if direction > 0 else ends[::-1]", "direction, ends"),
    ("_solve.py", "return 1 if scale > 0 else -1, ends", "return 1, ends"),
    ("_solve.py", "return solved if solved and solved[1] else None", "return solved"),
    ("_solve.py", "if reach is None or reach < 0:", "if reach is None:"),
    ("_sets.py", "closed = relation == \">=\"", "closed = True"),
    ("_sets.py", "return _complement(_where(\"=\", direction, ends))", "return _where(\"=\", direction, ends)"),
    ("_compare.py", "if a == b or (a[0]", "if True or (a[0]"),
    ("_compare.py", "_ratio(Value(\"ratio\", items=parts), other)", "_in_order(parts, other.items)"),
    ("_compare.py", "if found is None or found.dimensions != wanted.dimensions or tree.symbols(number):", "if True:"),
    ("_units.py", "exponents.get(\"length\", 0) + power * count", "exponents.get(\"length\", 0) + 2 * count"),
    ("_matrix.py", "(\"q\", (-1) ** k)", "(\"q\", 1)"),
    ("_read.py", "if side.unit and side.unit.dimensions == units.PERCENT.dimensions else side.node", "if False else side.node"),
    ("_read.py", "and (worked_out or len(set(nodes)) > 1):", "and True:"),
    ("_read.py", "({','.join(map(tree.text, node[2:]))})", "()"),
    ("_grammar.py", "return self.peek(ahead).value == \"}\"", "return False"),
    ("_normal.py", "if len(logarithms) == 1 and tree.I not in parts:", "if False:"),
    ("_normal.py", "if apart:", "if False:"),
    ("_units.py", "if not _REFUSED.isdisjoint(spoken) or any(", "if any("),
    ("_units.py", "_NUMERALS.issuperset(word.split(\"-\"))", "False"),
    ("_units.py", "elif len(word) == 1:", "elif False:"),
    ("_units.py", ") or _opposed(a.words, b.words)", ")"),
    ("_numerals.py", "pairs if n % 2 == 0 else", "pairs if True else"),
    ("_grammar.py", "quotient = numerals.derivative(self) if", "quotient = None if"),
    ("_compare.py", "and {a.unit.dimensions, b.unit.dimensions} == units.ANGLES", "and False"),
    ("_compare.py", "(b.kind == \"set\" and b.info == \"finite\") else False", "(b.kind == \"set\" and b.info == \"finite\") else equal(a, b)"),
    ("_compare.py", "sorted(given, key=", "given or sorted(given, key="),
    ("_brackets.py", "raise Unreadable(\"an empty cell\")", "pass"),
    ("_extract.py", "if found and _HEDGE.search(", "if False and _HEDGE.search("),
    ("_read.py", "part.scale >= smallest", "False"),
]  # fmt: skip


def survives(mutant, directory: Path) -> bool:
    name, old, new = mutant
    package = directory / "align" / "verify"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    source = (package / name).read_text(encoding="utf-8")
    assert source.count(old) >= 1, f"{name} no longer holds {old!r}: bring the mutant up to date"
    (package / name).write_text(source.replace(old, new, 1), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(directory)}
    return not subprocess.run([sys.executable, str(QUESTIONS)], env=environment, capture_output=True, timeout=300, check=False).returncode


def test_the_judge_itself_answers_every_question(tmp_path):
    assert survives(("__init__.py", '"""', '"""'), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(MUTANTS)))
def test_every_mutant_is_killed(index, tmp_path):
    assert not survives(MUTANTS[index], tmp_path), MUTANTS[index]
