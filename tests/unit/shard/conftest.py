"""One thread for tiny tensors: two that spin for each other's end are far slower on a busy machine."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
