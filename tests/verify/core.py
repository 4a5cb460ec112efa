"""The core of the suite: every op, what PyTorch sees of it, the modules and buffers made of it, and its errors."""

# What calls the compiled library and compiles nothing itself: a sanitizer has to be in the process from its start.
COMPILED = [
    "tests/test_add_rms_norm.py",
    "tests/test_buffers.py",
    "tests/test_capture_hidden.py",
    "tests/test_context_kv.py",
    "tests/test_dispatch.py",
    "tests/test_eagle3_qkv_projection.py",
    "tests/test_layers.py",
    "tests/test_memory_bandwidth.py",
    "tests/test_mtp_projection.py",
    "tests/test_mtp_streams.py",
    "tests/test_norm_concat.py",
    "tests/test_norm_concat_linear.py",
    "tests/test_norm_concat_linear_quantized.py",
    "tests/test_primitives.py",
    "tests/test_quantized_weight.py",
    "tests/test_store_context_kv.py",
    "tests/test_vocab_parallel_embedding.py",
    "tests/test_worded_errors.py",
]
CORE = [
    *COMPILED,
    "tests/interpreter/test_add_rms_norm.py",
    "tests/interpreter/test_capture_hidden.py",
    "tests/test_errors.py",
    "tests/test_import.py",
    "tests/test_registration.py",
    "tests/test_vocab_shard.py",
]
