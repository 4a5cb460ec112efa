"""How the ops get into serving engines and model libraries, one file each; nothing here is imported by default."""
