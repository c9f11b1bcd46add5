raise ImportError("vllm is banned in align (docs/DEPENDENCY_POLICY.md); use align.rollout_protocol")
