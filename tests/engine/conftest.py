"""Without a GPU, Triton's kernels run in its interpreter. It reads that as it is imported, which several tests and
transformers' modules do: so it is set before any of them."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
