raise ImportError("trl is banned in align (docs/DEPENDENCY_POLICY.md); use align.rl")
