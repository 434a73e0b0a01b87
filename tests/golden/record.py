"""Record the golden files from the code as it is: `PYTHONPATH=tests python -m golden.record`.

It refuses a case whose passes, gates or reasons change when the pixels change by 3e-5, or when the network runs
without rewrites: then rounding would decide, not the method.
"""

import sys
import warnings
from typing import Any

import torch
from golden import adapter, store
from golden.cases import CASES

NEAREST = 1e-4  # least distance of a confidence from its gate's threshold


def unstable(case: adapter.Case, result: store.Result) -> list[str]:
    """Why the case is no golden one."""
    found = []
    variants: list[dict[str, Any]] = [{"noise": seed} for seed in range(3)] + [{"optimise": False}]
    for variant in variants:
        lists = adapter.replay(case, **variant)[1]
        found += [f"{name} changes with {variant}" for name in lists if lists[name] != result[1][name]]
    if "stages" in case["recipe"]:
        gates = [stage["gate"] for stage in case["recipe"]["stages"] if "gate" in stage]
        for number, gate in enumerate(gates, 1):
            apart = (result[0][f"gate {number} confidence"] - gate["below"]).abs().nan_to_num(1.0)
            if float(apart.min()) < NEAREST:
                found.append(f"gate {number}: a confidence is {float(apart.min()):.1g} from its threshold")
        passed = torch.tensor(result[1]["passed"][0]) if gates else torch.tensor([0, 1])
        if passed.all() or not passed.any():
            found.append("the first gate does not split the images")
    return found


def main() -> int:
    warnings.simplefilter("ignore")
    results, bad = {}, 0
    for case in CASES:
        results[case["name"]] = adapter.replay(case)
        for reason in unstable(case, results[case["name"]]):
            bad += 1
            print(f"{case['name']}: {reason}")
    if bad:
        return 1
    store.write(results)
    size = store.TENSORS.stat().st_size + store.LISTS.stat().st_size
    print(f"{len(results)} cases, {size / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
