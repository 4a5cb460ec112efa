"""The `eagle-kernels` command: info, check and bench. It imports the package; nothing in the package imports it."""
