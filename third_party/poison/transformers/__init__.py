raise ImportError("transformers is banned in align (docs/DEPENDENCY_POLICY.md); use align.model, align.tokenizer")
