"""The commands of `ptm-accel`, each a function that typer reads."""
