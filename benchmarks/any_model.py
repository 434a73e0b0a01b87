"""Views and gates on 40 models as their libraries give them, at least six of which no graph can capture.

    python -m benchmarks.any_model           # writes docs/results/any_model.md and any_model.csv

Random weights, small inputs, one process and one thread for each model. For each: does a flip work, does a gate work,
was anything captured, the CPU time to the first answer of a flip over that of two forward passes (the least of several
rounds each, imports not counted), and its memory over theirs. Of the models that are made to be hard to capture, also
whether a recipe with states works.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).parent.parent
ROUNDS = 7
BATCH = 4
SIDE = 64  # pixels
COLUMNS = ("library", "model", "flip", "gate", "states", "captures", "first answer", "memory", "reason")
HARD = "hard to capture"


# ---------------------------------------------------------------- models that no graph captures
class Branches(nn.Module):
    """Control flow that depends on pixel values."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) if float(x.mean()) > 0 else self.net(x.abs())


class ThroughNumpy(Branches):
    """numpy in the forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.from_numpy(x.detach().abs().amax((1, 2, 3)).numpy()).to(x)
        return self.net(x / scale[:, None, None, None])


class PerImage(Branches):
    """A Python loop over the images of a batch."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.net(one[None]) for one in x])


@torch.library.custom_op("unstride_bench::halve", mutates_args=())
def halve(x: Tensor) -> Tensor:
    """An op that no rule and no fake kernel knows."""
    return torch.from_numpy(nn.functional.avg_pool2d(x, 2).numpy().copy())


class CustomOp(Branches):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(halve(x))


def resnet() -> nn.Module:
    from torchvision.models import resnet18

    return resnet18(weights=None).eval()


def quantised() -> nn.Module:
    from torch.ao.quantization import quantize_dynamic

    return quantize_dynamic(nn.Sequential(resnet(), nn.ReLU(), nn.Linear(1000, 10)), {nn.Linear})


def scripted() -> nn.Module:
    return torch.jit.script(resnet())


def traced() -> nn.Module:
    return torch.jit.trace(resnet(), torch.randn(2, 3, 64, 64))


def fsdp() -> nn.Module:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = resnet()
    fully_shard(model)
    return model


HARD_TO_CAPTURE: dict[str, Callable[[], nn.Module]] = {
    "data-dependent branch": lambda: Branches(resnet()),
    "numpy in forward": lambda: ThroughNumpy(resnet()),
    "loop over images": lambda: PerImage(resnet()),
    "custom op without a fake kernel": lambda: CustomOp(resnet()),
    "dynamically quantised": quantised,
    "torch.jit.script": scripted,
    "torch.jit.trace": traced,
    "torch.compile": lambda: torch.compile(resnet(), backend="eager"),  # type: ignore[dict-item,return-value]
    "DataParallel": lambda: nn.DataParallel(resnet()),
    "FSDP": fsdp,
}


# ---------------------------------------------------------------- models of the libraries
TIMM = (
    *("resnet18", "mobilenetv2_100", "efficientnet_b0", "convnext_atto", "regnety_002", "repvgg_a0", "ghostnet_050"),
    *("mobilevit_xxs", "edgenext_xx_small", "tf_efficientnet_lite0", "densenet121", "dla34"),
)
VIT = ("vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "gcvit_xxtiny")
TORCHVISION = ("resnet50", "shufflenet_v2_x0_5", "mnasnet0_5", "googlenet", "squeezenet1_1")
SEGMENTERS = ("Unet", "FPN", "DeepLabV3Plus")
MONAI = ("UNet", "BasicUNet", "DenseNet121")


def specs() -> list[tuple[str, str]]:
    return [
        *((HARD, name) for name in HARD_TO_CAPTURE),
        *(("timm", name) for name in (*TIMM, *VIT)),
        *(("torchvision", name) for name in (*TORCHVISION, "lraspp_mobilenet_v3_large", "fcn_resnet50")),
        *(("smp", name) for name in SEGMENTERS),
        *(("transformers", name) for name in ("resnet", "segformer")),
        *(("MONAI", name) for name in MONAI),
    ]


def build(library: str, name: str) -> tuple[nn.Module, Tensor, str | None]:
    """The model, images, and the task where the model's library does not say it."""
    images = torch.randn(BATCH, 3, SIDE, SIDE)
    if library == HARD:
        return HARD_TO_CAPTURE[name](), images, "classification"
    if library == "timm":
        import timm

        size = 224 if name in VIT else SIDE
        return timm.create_model(name, pretrained=False), torch.randn(BATCH, 3, size, size), None
    if library == "torchvision":
        import torchvision

        maps = name.startswith(("lraspp", "fcn"))
        options: dict[str, Any] = {"weights_backbone": None} if maps else {}
        options |= {"init_weights": False} if name == "googlenet" else {}
        model = torchvision.models.get_model(name, weights=None, **options)
        return model, images, "segmentation" if maps else None
    if library == "smp":
        import segmentation_models_pytorch as smp

        return getattr(smp, name)("resnet18", encoder_weights=None, classes=4), images, "segmentation"
    if library == "transformers":
        return transformer(name), images, None
    return monai(name), images[:, :1], "classification" if name == "DenseNet121" else "segmentation"


def transformer(name: str) -> nn.Module:
    import transformers as hf

    if name == "resnet":
        return hf.ResNetForImageClassification(hf.ResNetConfig())
    return hf.SegformerForSemanticSegmentation(hf.SegformerConfig())


def monai(name: str) -> nn.Module:
    from monai.networks import nets

    if name == "UNet":
        return nets.UNet(2, 1, 3, channels=(16, 32, 64, 128, 256), strides=(2, 2, 2, 2), num_res_units=2)
    if name == "BasicUNet":
        return nets.BasicUNet(2, 1, 3)
    return nets.DenseNet121(2, 1, 5)


# ---------------------------------------------------------------- one row
def row(library: str, name: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, images, task = build(library, name)
    values: dict[str, Any] = {"library": library, "model": name, "flip": "no", "gate": "no"}
    try:
        values |= measured(model.eval(), images, task)
        if library == HARD:
            values |= states(model, images, task)
    except Exception as error:
        values["reason"] = short(error)
    return values


def short(error: Exception) -> str:
    words = " ".join(str(error).replace(f"{ROOT}/", "").split())
    return f"{type(error).__name__}: {words[:160]}"


def states(model: nn.Module, images: Tensor, task: str | None) -> dict[str, Any]:
    """Whether a recipe with states works, which needs a graph; else the reason."""
    import unstride
    from unstride.errors import UnstrideError

    try:
        unstride.enhance(model, recipe="paper", task=task, budget=2)(images[:1])
    except UnstrideError as error:
        return {"states": "no", "reason": short(error)}
    return {"states": "yes"}


def measured(model: nn.Module, images: Tensor, task: str | None) -> dict[str, Any]:
    import unstride
    from unstride.evaluation.timing import peak_bytes

    captures = 0
    original = torch.export.export

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal captures
        captures += 1
        return original(*args, **options)

    torch.export.export = counted  # type: ignore[assignment]
    with torch.no_grad():
        twice(model, images)  # warms up the libraries' kernels
        first, plain = [], []
        for _ in range(ROUNDS):
            plain.append(seconds(lambda: twice(model, images)))
            first.append(seconds(lambda: unstride.enhance(model, recipe="flip", task=task)(images)))
        better = unstride.enhance(model, recipe="flip", task=task)
        gated = unstride.Recipe(
            (unstride.Stage(), unstride.Stage(("flip",), gate=unstride.Gate(below=0.5))), task=better.task
        )
        gate = unstride.enhance(model, recipe=gated)
        gate(images)
        memory = peak_bytes(lambda: better(images)) / max(1, peak_bytes(lambda: twice(model, images)))
    return {
        "flip": "yes",
        "gate": "yes",
        "captures": captures,
        "first answer": f"{min(first) / min(plain):.2f}",
        "memory": f"{memory:.2f}",
    }


def twice(model: nn.Module, images: Tensor) -> tuple[Any, Any]:
    """What a user would write by hand: the model on the images, and on the flipped ones."""
    return model(images), model(images.flip(-1))


def seconds(call: Callable[[], Any]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def _send(pipe: Any, library: str, name: str) -> None:
    pipe.send(json.dumps(row(library, name)))


def isolated(library: str, name: str) -> dict[str, Any]:
    """`row` in a process of its own, so that a crash costs one row."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "unstride.enhanced", "unstride.evaluation.timing"])
    read, write = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(write, library, name))
    process.start()
    write.close()
    try:
        values: dict[str, Any] = json.loads(read.recv())
    except EOFError:
        values = {"library": library, "model": name, "flip": "no", "gate": "no", "reason": "the process died"}
    process.join()
    return values


# ---------------------------------------------------------------- the page
def page(rows: list[dict[str, Any]]) -> str:
    works = sum(r["flip"] == "yes" for r in rows)
    captured = sum(int(r.get("captures") or 0) > 0 for r in rows)
    without = sum(r.get("states") == "no" for r in rows)
    ratios = sorted(float(r["first answer"]) for r in rows if r.get("first answer"))
    middle = ratios[len(ratios) // 2] if ratios else float("nan")
    within = sum(r <= 1.1 for r in ratios)
    lines = [
        "# Any model",
        "",
        f"**A flip works on {works} of {len(rows)} models, {without} of which no graph captures.** {captured} of them "
        f"were captured on the way. The first answer of a flip takes {middle:.2f} times two forward passes in the "
        f"median; {within} of {len(ratios)} models stay within 1.1.",
        "",
        f"Command: `python -m benchmarks.any_model`. Random weights, batches of {BATCH}, {SIDE} to 224 pixels, one "
        "thread. `states`: whether the paper's search works, where that is in doubt. `first answer`: `enhance` and "
        f"the answer for a batch, CPU time over that of two forward passes by hand; the least of {ROUNDS} rounds each, "
        "imports not counted. `memory`: the most that is allocated at once, over that of the two passes. Reasons: "
        "[any_model.csv](any_model.csv).",
        "",
        "| library | model | flip | gate | states | first answer | memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        cells = (r.get(c) or "" for c in ("library", "model", "flip", "gate", "states", "first answer", "memory"))
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of a model's name")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results/any_model.md")
    options = parser.parse_args()
    rows = []
    for library, name in specs():
        if options.only in f"{library}:{name}":
            rows.append(isolated(library, name))
            print(*rows[-1].values(), flush=True)
    with options.out.with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        table.writerows(rows)
    options.out.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
