"""Operations beside what people use otherwise: `make bench` on a CPU, `make bench-gpu` on a GPU. See README.md here."""
