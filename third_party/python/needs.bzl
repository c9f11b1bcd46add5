"""What a package needs itself, which nobody else sees."""

NEEDS = {
    "torch": ["filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "setuptools", "sympy", "typing_extensions"],
    "pytest": ["iniconfig", "packaging", "pluggy", "pygments"],
    "hypothesis": ["sortedcontainers"],
}
