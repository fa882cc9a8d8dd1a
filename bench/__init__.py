"""Benchmarks of the operations against what people use otherwise. CPU: `make bench`; GPU: `make bench-gpu`. See README.md here."""
