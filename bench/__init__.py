"""The `eagle-kernels` command, a module per subcommand. It imports the package; nothing in the package imports it."""
