raise ImportError("datasets is banned in align (docs/DEPENDENCY_POLICY.md); use align.data")
