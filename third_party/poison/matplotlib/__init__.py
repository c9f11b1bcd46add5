raise ImportError("matplotlib is banned in align (docs/DEPENDENCY_POLICY.md); use align.tracking")
