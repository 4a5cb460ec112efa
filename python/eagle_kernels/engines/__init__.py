"""Hooks into serving engines and model libraries, one module or package each; nothing here is imported by default."""
