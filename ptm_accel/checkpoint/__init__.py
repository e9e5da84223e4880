"""Resumable training state, and directories that are complete or absent."""
