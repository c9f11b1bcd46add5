"""The names that the grammar knows."""

FUNCTIONS = frozenset(
    [
        "sin",
        "cos",
        "tan",
        "cot",
        "sec",
        "csc",
        "asin",
        "acos",
        "atan",
        "acot",
        "asec",
        "acsc",
        "sinh",
        "cosh",
        "tanh",
        "coth",
        "sech",
        "csch",
        "asinh",
        "acosh",
        "atanh",
        "arsinh",
        "arcosh",
        "artanh",
        "ln",
        "log",
        "lg",
        "exp",
        "sqrt",
        "cbrt",
        "abs",
        "floor",
        "ceil",
        "gcd",
        "lcm",
        "max",
        "min",
        "det",
        "arg",
        "Re",
        "Im",
        "sgn",
        "sign",
    ]
)
WORD_FUNCTIONS = {
    "arcsin": "asin",
    "arccos": "acos",
    "arctan": "atan",
    "arccot": "acot",
    "arcsec": "asec",
    "arccsc": "acsc",
    "ceiling": "ceil",
}
INVERSE = {
    "sin": "asin", "cos": "acos", "tan": "atan", "cot": "acot", "sec": "asec", "csc": "acsc", "sinh": "asinh", "cosh": "acosh",
    "tanh": "atanh",
}  # fmt: skip
GREEK = frozenset(
    [
        "alpha",
        "beta",
        "gamma",
        "delta",
        "epsilon",
        "zeta",
        "eta",
        "theta",
        "iota",
        "kappa",
        "lambda",
        "mu",
        "nu",
        "xi",
        "rho",
        "sigma",
        "tau",
        "upsilon",
        "phi",
        "chi",
        "psi",
        "omega",
        "Gamma",
        "Delta",
        "Theta",
        "Lambda",
        "Xi",
        "Pi",
        "Sigma",
        "Upsilon",
        "Phi",
        "Psi",
        "Omega",
        "hbar",
        "ell",
        "odot",
        "oplus",
        "star",
        "prime",
        "aleph",
        "nabla",
        "partial",
        "vartheta",
        "varpi",
        "varrho",
        "imath",
        "jmath",
    ]
)
RELATIONS = {
    "=": "=", "<": "<", ">": ">", "<=": "<=", ">=": ">=", "!=": "!=", "le": "<=", "ge": ">=", "ne": "!=", "approx": "~", "in": "in",
    "neq": "!=", "nless": ">=", "ngtr": "<=", "notin": "notin",
}  # fmt: skip
JOINERS = frozenset(["and", "or", ", and", ", or", "and/or", ",", ";"])
BREAKS = frozenset(["in", "for", "where", "when", "if", "is"])
LEADS = (
    "the final answer is", "the answer is", "final answer is", "final answer",
    "answer is", "answer", "approximately", "about", "exactly", "thus",
    "so",
    "therefore", "is", "the", "total", "only", "solution", "solutions", "the solution is",
)  # fmt: skip
STYLES = frozenset(
    [
        "vec",
        "hat",
        "tilde",
        "overrightarrow",
        "overline",
        "widehat",
        "dot",
        "ddot",
        "mathbb",
        "mathfrak",
        "overleftarrow",
        "underbrace",
        "overbrace",
        "widetilde",
        "check",
        "breve",
        "acute",
        "grave",
    ]
)
MATRICES = frozenset(["pmatrix", "bmatrix", "matrix", "array", "smallmatrix", "Bmatrix", "vmatrix"])
NUMBER_SETS = frozenset(["R", "Z", "N", "Q", "C"])
APPLIED = frozenset(["f", "g", "h", "F", "G", "H", "phi", "Phi", "psi", "Psi"])
"""Letters that, before a bracket, are taken for functions and not for factors."""


def counted(word: str, spaced: bool) -> bool:
    """A word that stands apart, in lower case, and names no function or letter: what is counted, or prose."""
    known = word in FUNCTIONS or word in WORD_FUNCTIONS or word in GREEK or word in ("pi", "infinity", "infty")
    return spaced and len(word) > 2 and word.islower() and not known
