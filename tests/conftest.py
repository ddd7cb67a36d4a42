"""Set before any test imports Triton, which reads it when a kernel is defined."""

import os

# `make test-gpu` sets 0: there the kernels are compiled.
os.environ.setdefault("TRITON_INTERPRET", "1")
