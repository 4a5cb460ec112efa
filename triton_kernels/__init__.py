"""Triton kernels and their launchers, one file per op. Imported by the ops when a call goes there, never before."""
