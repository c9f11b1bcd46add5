raise ImportError("math_verify is banned in align (docs/DEPENDENCY_POLICY.md); use align.verify")
