"""Benchmarks: each prints one table and can write one JSON line per row."""
