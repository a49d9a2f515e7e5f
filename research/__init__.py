"""Measurements of the engine, experiments of papers, and training. Not in the wheel."""
