"""A quarter of an hour on a rented GPU, from a checkout: bench/gpu_session.sh. Not in the wheel."""
