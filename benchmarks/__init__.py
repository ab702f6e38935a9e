"""Benchmarks of the design's promises. ``python -m benchmarks`` runs all of them; see README.md in this folder."""
