"""Trace of a pass, and the plan made from it. Pure data; nothing here moves a byte."""
