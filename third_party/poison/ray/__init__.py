raise ImportError("ray is banned in align (docs/DEPENDENCY_POLICY.md); use torch's own launcher")
