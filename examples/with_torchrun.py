"""Evaluate in several processes, on one machine or many; killed, it goes on where it was. Alone it works, too.

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

rows = unstride.evaluate(loaded, "sample", budgets=(1, 4), limit=64, out=out)

if int(os.environ.get("RANK", 0)) == 0:
    for row in rows:
        gain = "" if row.plain else f", gain {row.gain['low']:+.3f} to {row.gain['high']:+.3f}: {row.verdict}"
        print(f"budget {row.budget}: top-1 {row.metrics['top1']:.3f} at {row.macs:.1f}x the MACs{gain}")
