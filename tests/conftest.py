"""One thread per test process: the tensors are tiny, and threads on a busy machine wait for each other."""

import torch

torch.set_num_threads(1)
