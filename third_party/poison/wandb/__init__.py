raise ImportError("wandb is banned in align (docs/DEPENDENCY_POLICY.md); use align.tracking")
