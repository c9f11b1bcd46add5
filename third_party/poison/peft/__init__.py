raise ImportError("peft is banned in align (docs/DEPENDENCY_POLICY.md); use align.train")
