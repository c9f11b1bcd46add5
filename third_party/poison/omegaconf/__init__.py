raise ImportError("omegaconf is banned in align (docs/DEPENDENCY_POLICY.md); use align.config")
