raise ImportError("bitsandbytes is banned in align (docs/DEPENDENCY_POLICY.md); use align.optim8bit")
