"""A byte-level Gemma 3 target and its trained EAGLE-3 drafter: what `eagle-kernels demo` decodes with."""
