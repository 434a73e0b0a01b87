"""Check the invariants on every architecture that can be built: `python -m benchmarks.coverage`.

Writes docs/results/coverage.md and coverage.csv.

Random weights, small images, one process per model. A failure is a row, not a crash; rows are kept in a JSON cache, so
a sweep that was interrupted goes on, and rows made by other code than today's are made again (`--keep` keeps them).
Rows of the CSV that the cache does not have stay there, as rows of older code.
"""

import argparse
import contextlib
import csv
import hashlib
import json
import os
import re
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import unstride  # noqa: F401  (before torchvision and timm)

ROOT = Path(__file__).parent.parent
ORACLE = ROOT / "tests" / "oracle.py"
sys.path.insert(0, str(ROOT / "tests"))

import checks  # noqa: E402
import oracle  # noqa: E402
import task_nets  # noqa: E402
import timm  # noqa: E402
import torch  # noqa: E402
import torchvision  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from benchmarks import other_axes  # noqa: E402
from unstride.errors import CaptureError, UnstrideError  # noqa: E402
from unstride.geometry.grids import by  # noqa: E402
from unstride.geometry.states import State  # noqa: E402
from unstride.models.tasks import check_kind  # noqa: E402

OTHER = ("video", "monai", "nnunet", "signal")
CORE = ("graph", "geometry", "engine")  # the packages whose code a row depends on
SMALL = ["test", "atto", "femto", "pico", "nano", "xxs", "xxt", "xt", "xs", "tiny", "mini", "ti", "t", "small"]
SMALL += ["s0", "s1", "s", "m0", "m1", "b0", "a0", "d0"]
DECODERS = ["Unet", "FPN", "DeepLabV3Plus", "UPerNet", "Segformer"]
ENCODERS = ["resnet18", "mobilenet_v2", "mit_b0", "tu-swin_tiny_patch4_window7_224", "tu-twins_svt_small"]
# One model per family that a name alone does not find: what the paper used, and the variants that method.md speaks of.
EXTRA = ["mobilenetv3_small_050", "deit_tiny_patch16_224", "convnextv2_atto", "twins_svt_small", "hiera_tiny_224"]


# What a name begins with, and the heading of its rows.
GROUPS = {
    "torchvision": "torchvision",
    "timm": "timm families",
    "smp": "segmentation_models_pytorch",
    "hf": "transformers",
    "video": "video (torchvision)",
    "monai": "MONAI",
    "nnunet": "nnU-Net (dynamic-network-architectures)",
    "signal": "signals",
    "tasks": "other tasks: embeddings, features, depth (transformers, timm, torchvision)",
}


# ---------------------------------------------------------------- which models
def specs() -> list[str]:
    out = [f"timm:{n}" for n in dict.fromkeys([*families().values(), *EXTRA])]
    out += [f"smp:{d}:{e}" for d in DECODERS for e in ENCODERS]
    out += ["hf:segformer", "hf:upernet-swin"]
    out += [f"torchvision:{n}" for n in torchvision.models.list_models(module=torchvision.models.segmentation)]
    out += [f"torchvision:{n}" for n in torchvision.models.list_models(module=torchvision.models)]
    return out + other_axes.specs() + task_nets.specs()


# Families whose smallest name is not the smallest model.
CHOSEN = {"samvit": "samvit_base_patch16_224", "aimv": "aimv2_large_patch14_224", "gmlp": "gmlp_ti16_224"}


def families() -> dict[tuple[str, str], str]:
    """(module, name) -> the smallest variant by its name: `("resnet", "resnetblur") -> "resnetblur18"`."""
    members: dict[tuple[str, str], list[str]] = {}
    for module in timm.list_modules():
        for name in timm.list_models(module=module):
            match = re.match(r"(?:test_)?(?:tf_)?([a-z]+)", name)
            assert match is not None
            members.setdefault((module, match[1]), []).append(name)
    first = dict(reversed(members))  # each module once, then the rest
    members = {f: members[f] for f in sorted(members, key=lambda f: first[f[0]] != f[1])}
    return {family: CHOSEN.get(family[1]) or min(names, key=_size_by_name) for family, names in members.items()}


def _size_by_name(name: str) -> tuple[Any, ...]:
    words = re.split(r"[_.]", name)
    small = min(
        (SMALL.index(w) for w in words if w in SMALL), default=len(SMALL) + ("base" in words) + 2 * ("large" in words)
    )
    huge = any(w in words for w in ("large", "huge", "giant", "gigantic", "enormous", "l", "xl", "h"))
    numbers = [int(v) for v in re.findall(r"\d+", name)]
    return huge, small, numbers, len(name), name


def build(spec: str) -> tuple[nn.Module, list[int] | list[tuple[int, ...]], int]:
    """The model, the image sizes to try and the channels."""
    if spec.split(":", 1)[0] in OTHER:
        return other_axes.build(spec)
    if spec.startswith("tasks:"):
        return task_nets.build(spec)
    model, sizes = _of_images(spec)
    return model, sizes, getattr(model, "pretrained_cfg", {}).get("input_size", (3,))[0]


def _of_images(spec: str) -> tuple[nn.Module, list[int]]:
    library, name = spec.split(":", 1)
    if library == "torchvision":
        options: dict[str, Any] = {"weights": None}
        if name in torchvision.models.list_models(module=torchvision.models.segmentation):
            options["weights_backbone"] = None
        if name in ("inception_v3", "googlenet"):
            options |= {"init_weights": False}
        sizes = [224] if name.startswith(("vit", "maxvit")) else [64, 96, 224]
        if name in ("efficientnet_b7", "efficientnet_v2_m", "efficientnet_v2_l"):  # at 64 px deep random nets explode
            sizes = [160]
        return torchvision.models.get_model(name, **options), sizes
    if library == "timm":
        model = _timm(name)
        config = model.pretrained_cfg
        size = config["input_size"][-1]
        return model, [size] if config.get("fixed_input_size") else sorted({min(64, size), min(128, size), size})
    if library == "smp":
        import segmentation_models_pytorch as smp

        arch, encoder = name.split(":")
        options = {"encoder_name": encoder, "encoder_weights": None, "classes": 4}
        size = 224 if "swin" in encoder else 64
        return getattr(smp, arch)(**options), [size, 128]
    return _transformers(name), [64]


def _timm(name: str) -> nn.Module:
    """With three blocks where the family takes a depth: more of the same block proves nothing more."""
    try:
        return timm.create_model(name, pretrained=False, depth=3)
    except Exception:
        return timm.create_model(name, pretrained=False)


def _transformers(name: str) -> nn.Module:
    import transformers as hf

    if name == "segformer":
        config = hf.SegformerConfig(
            depths=[1, 1, 1, 1], hidden_sizes=[16, 32, 40, 64], num_attention_heads=[1, 2, 5, 8], decoder_hidden_size=32
        )
        return hf.SegformerForSemanticSegmentation(config)
    backbone = hf.SwinConfig(
        image_size=64, embed_dim=16, depths=[1, 2, 1, 1], num_heads=[1, 2, 4, 8], window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = hf.UperNetConfig(backbone_config=backbone, hidden_size=32, use_auxiliary_head=False, num_labels=4)
    return hf.UperNetForSemanticSegmentation(config)


def stir(model: nn.Module) -> None:
    """Fresh networks hide errors behind zero gates, unit norms and tiny layer scales: let everything matter."""
    generator = torch.Generator().manual_seed(0)

    def noise(t: Tensor) -> Tensor:
        return torch.rand(t.shape, generator=generator).to(t)

    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point() and p.numel() > 1 and float(p.max() - p.min()) < 1e-4:
                p.copy_(noise(p) + 0.5 if p.ndim > 1 or float(p.mean()) > 1e-7 else (noise(p) - 0.5) * 0.2)


def settle(model: nn.Module, images: Tensor) -> None:
    """Batch norms learn the statistics of some images; otherwise deep random networks give a constant."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
    momenta = [m.momentum for m in norms]
    with contextlib.suppress(Exception), torch.no_grad():
        for m in norms:
            m.momentum = 1.0
            m.train()
        model(images)
        for m in norms:  # channels that hardly vary on noise would magnify rounding
            m.running_var.clamp_(min=0.1 * float(m.running_var.mean()))
    for m, momentum in zip(norms, momenta, strict=True):
        m.momentum = momentum
        m.eval()


# ---------------------------------------------------------------- one row
def row(spec: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    started = time.time()
    found: dict[str, Any] = {"spec": spec, "layers": 0, "verdict": "unusable", "reason": ""}
    found |= {"left_out": 0, "unknown": 0}
    try:
        model, images = ready(spec, found)
        try:
            judge(model, images, 3e-4, found)
        except (AssertionError, CaptureError):
            # Deep random networks magnify rounding: in float64 that shrinks by nine orders, a wrong answer does not.
            judge(model.double(), images.double(), 1e-7, found)
            found["reason"] = found["reason"] or "in float64: these random weights magnify float32 rounding"
    except Unbuilt as error:
        found["reason"] = str(error)
    except oracle.NoOracle as error:  # raised last, when all else held
        found |= {"verdict": "no oracle", "reason": str(error)}
    except Exception as error:
        found["reason"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if isinstance(error, AssertionError):
            found["verdict"] = "differs"
        elif not isinstance(error, UnstrideError):
            found["verdict"] = "fails"
            found["trace"] = traceback.format_exc()[-1500:]
    found["seconds"] = round(time.time() - started, 1)
    return found


class Unbuilt(Exception):
    """The library itself does not build or run this model."""


def ready(spec: str, found: dict[str, Any]) -> tuple[nn.Module, Tensor]:
    """The model with weights that matter, and two images of the first size that it takes."""
    try:
        model, sizes, channels = build(spec)
    except Exception as error:
        raise Unbuilt(f"the library does not build it: {_brief(error)}") from error
    check_kind(model)
    stir(model.eval())
    errors = []
    for size in sizes:
        images = torch.randn(2, channels, *((size, size) if isinstance(size, int) else size))
        try:
            with torch.no_grad():
                model(images[:1])
        except Exception as error:
            errors.append(f"{size} px: {_brief(error)}")
            continue
        found["size"] = size if isinstance(size, int) else by(size)
        settle(model, images)
        return model, images
    raise Unbuilt(f"the model itself raises: {'; '.join(errors)[:300]}")


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"


def chaos(net: checks.Net, image: Tensor, state: State) -> float:
    """How far the last digits of the image change what the referee says: some random networks explode at a state."""
    near = image * (1 + 4 * torch.finfo(image.dtype).eps)
    pairs = zip(net.referee(near, state), net.referee(image, state), strict=True)
    return max(checks.gap(a, b) for a, b in pairs)


def judge(model: nn.Module, images: Tensor, tol: float, found: dict[str, Any]) -> None:
    net = checks.Net.of(model, images[:1])
    analysis = net.found
    found["layers"] = len(analysis.layers)
    found["rates"] = [list(layer.rate) for layer in analysis.layers]
    found["ops"] = [[path for path, _ in layer.ops] for layer in analysis.layers]
    found["left_out"] = len(analysis.left_out)
    found["left"] = [f"{item.op}: {item.reason}" for item in analysis.left_out][:6]
    found["unknown"] = len(analysis.unknown)
    found["unknowns"] = list(analysis.unknown)[:6]
    if not analysis.layers:
        checks.check_identity(net, images, tol)
        analysis.require_layers()
    states = checks.some_states(analysis, 3)[1:]
    try:
        far, worst = checks.check_briefly(net, images, states, tol)
    except AssertionError:
        noise = max(chaos(net, images[i : i + 1], s) for i, s in enumerate(states))
        if images.dtype == torch.float64 and noise > tol:
            raise oracle.NoOracle(f"float64 rounding alone changes the re-run by {noise:.0e} (relative)") from None
        raise
    found["verdict"], found["worst"], found["far"] = "exact", worst, far
    if far <= 20 * worst:
        change = f"the state changes the output by {far:.0e} only (the re-run differs by {worst:.0e})"
        found["reason"] = f"{change}: weak evidence"


def isolated(spec: str, seconds: int) -> dict[str, Any]:
    """`row` in a process of its own, so that a crash or a hang costs one row."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # seconds of work, however busy the machine is
        with os.fdopen(write, "w") as pipe:
            pipe.write(json.dumps(row(spec)))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if text:
        return json.loads(text)  # type: ignore[no-any-return]
    why = (
        f"no answer within {seconds} s of work"
        if os.WTERMSIG(status) == signal.SIGPROF
        else f"the process died (status {status})"
    )
    return {"spec": spec, "layers": 0, "verdict": "fails", "reason": why, "left_out": 0, "unknown": 0}


# ---------------------------------------------------------------- the table
def fingerprint() -> str:
    digest = hashlib.sha256()
    for path in [*(p for package in CORE for p in sorted((ROOT / "src/unstride" / package).rglob("*.py"))), ORACLE]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


COLUMNS = ("spec", "size", "layers", "rates", "verdict", "reason", "code")
KINDS = ("exact", "no oracle", "unusable", "differs", "fails")


def page(rows: list[dict[str, Any]], wanted: int) -> str:
    """One answer, one table, and the models that are not exact."""
    fresh = sum(r["code"] == fingerprint() for r in rows)
    count = Counter(r["verdict"] for r in rows)
    lines = [
        "# Coverage of architectures",
        "",
        f"**{count['exact']} of {len(rows)} architectures give exactly what the eager model gives, state by state.** "
        f"{count['no oracle']} more pass every check that needs no second run of the model. {count['unusable']} cannot "
        f"be used with states and raise one clear error. {count['differs'] + count['fails']} differ or fail.",
        "",
        "Command: `python -m benchmarks.coverage`. Random weights, small images, two images, each in another state. "
        "*Exact*: identity, independence, budget and sharing hold against an independent run of the eager model "
        "(`tests/oracle.py`). All rows: [coverage.csv](coverage.csv).",
        f"{len(rows)} of {wanted} models are listed; {fresh} rows were made by the current code of the engine.",
        "",
        "| group | models | exact | no oracle | unusable | differs | fails |",
        "|---|---|---|---|---|---|---|",
    ]
    for group in GROUPS.values():
        own = [r for r in rows if _group(r) == group]
        counts = [sum(r["verdict"] == kind for r in own) for kind in KINDS]
        lines.append(f"| {group} | {len(own)} | " + " | ".join(map(str, counts)) + " |")
    lines += ["", "## Not exact", "", "| model | verdict | reason |", "|---|---|---|"]
    for r in rows:
        if r["verdict"] != "exact":
            lines.append(f"| {r['spec']} | {r['verdict']} | {r['reason'].replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def _group(row: dict[str, Any]) -> str:
    return GROUPS[row["spec"].partition(":")[0]]


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        table.writeheader()
        for r in rows:
            rates = " ".join(by(rate if len({*rate}) > 1 else rate[:1]) for rate in r.get("rates", []))
            table.writerow({**r, "rates": rates})


def read_csv(path: Path) -> dict[str, dict[str, Any]]:
    """The committed rows, so that what is swept in parts, or on several machines, makes one page."""
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for r in rows:
        r["rates"] = [[int(n) for n in rate.split("x")] for rate in r["rates"].split()]
        r["layers"] = int(r["layers"])
    return {r["spec"]: r for r in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="regular expression: sweep the models that match, again")
    parser.add_argument("--keep", action="store_true", help="keep rows that older code made")
    parser.add_argument("--seconds", type=int, default=600, help="limit of processor time per model")
    parser.add_argument("--cache", type=Path, default=ROOT / "build/coverage.json")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results/coverage.md")
    options = parser.parse_args()
    cache: dict[str, Any] = json.loads(options.cache.read_text()) if options.cache.exists() else {}
    options.cache.parent.mkdir(parents=True, exist_ok=True)
    code, wanted = fingerprint(), specs()
    for i, spec in enumerate(wanted, 1):
        old = cache.get(spec)
        current = old is not None and (options.keep or old["code"] == code)
        if not (re.search(options.only, spec) if options.only else not current):
            continue
        new = {**isolated(spec, options.seconds), "code": code}
        latest = json.loads(options.cache.read_text()) if options.cache.exists() else {}
        cache = {**latest, spec: new}
        options.cache.write_text(json.dumps(cache, indent=1))
        print(f"[{i}/{len(wanted)}] {spec}: {new['layers']} layers, {new['verdict']} {new['reason'][:160]}", flush=True)
    rows_file = options.out.with_suffix(".csv")
    known = {**read_csv(rows_file), **cache}
    rows = [known[s] for s in wanted if s in known]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_csv(rows_file, rows)
    options.out.write_text(page(rows, len(wanted)))


if __name__ == "__main__":
    main()
