"""Evaluate in several processes, on one machine or many. A killed run resumes. It also runs alone.

    torchrun --nproc-per-node 2 --max-restarts 3 examples/with_torchrun.py runs/example
    torchrun --nnodes 2 --nproc-per-node 4 --max-restarts 3 --rdzv-backend c10d --rdzv-id example \
        --rdzv-endpoint HOST:29500 examples/with_torchrun.py SHARED_FOLDER
"""

import os
import sys

import torch

import unstride

out = sys.argv[1] if len(sys.argv) > 1 else "runs/example"
loaded = unstride.models.load("sample")
if torch.cuda.is_available():
    loaded.model.to(f"cuda:{os.environ.get('LOCAL_RANK', 0)}")

rows = unstride.evaluate(loaded, "sample", recipe="paper", budgets=(1, 4), limit=64, out=out, progress=False)

if int(os.environ.get("RANK", 0)) == 0:
    for row in rows:
        print(row)
