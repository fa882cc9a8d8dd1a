"""Benchmarks of the operations against what people use otherwise. CPU: `make bench`. See README.md here."""
