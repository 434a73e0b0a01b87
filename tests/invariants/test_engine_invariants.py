"""Invariants 3 to 8 on networks written by hand: sharing, independence, budget, geometry, innocence, same out as in."""

import random
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from checks import Net, check_budget, check_identity, check_independence, check_sharing, gap, in_chunks, some_states
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from unstride.engine.engine import Engine
from unstride.errors import CaptureError, LessAtOnce, OptionError, UnstrideError
from unstride.geometry.find import find_layers
from unstride.geometry.states import State
from unstride.graph.capture import capture
from unstride.graph.verify import tolerance


class Residual(nn.Module):
    """Conv, pool, a residual stage with a strided shortcut, a head: four layers with the stem."""

    def __init__(self, c: int = 4, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, c, 3, 2, 1), nn.BatchNorm2d(c), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        self.body, self.short = nn.Conv2d(c, c, 3, 2, 1), nn.Conv2d(c, c, 1, 2)
        self.head = nn.Linear(c, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = F.relu(self.body(x) + self.short(x), inplace=True)
        return self.head(x.mean((2, 3)))


class Unet(nn.Module):
    def __init__(self, c: int = 4) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, c, 3, 2, 1), nn.Conv2d(c, c, 3, 2, 1), nn.Conv2d(c, c, 3, 2, 1)
        self.up, self.out = nn.Conv2d(2 * c, c, 3, 1, 1), nn.Conv2d(2 * c, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(a)
        c = F.interpolate(self.c(b), scale_factor=2)
        b = F.interpolate(self.up(torch.cat([b, c], 1)), scale_factor=2)
        return self.out(torch.cat([a, b], 1))


def net_of(
    model: nn.Module, size: tuple[int, int] = (32, 32), dtype: torch.dtype = torch.float64
) -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    model = model.to(dtype).eval()
    images = torch.randn(3, 3, *size).to(dtype)
    return Net.of(model, images[:1]), images


@pytest.mark.parametrize("size", [(32, 32), (33, 31), (37, 24), (17, 19)])
def test_all_invariants_at_odd_sizes(size: tuple[int, int]) -> None:
    net, images = net_of(Residual(), size)
    states = some_states(net.found, 6)
    check_identity(net, images)
    check_sharing(net, images, states)
    check_independence(net, images, states)
    check_budget(net, images, states[1:])


def test_layers_of_a_residual_network() -> None:
    net, _ = net_of(Residual())
    assert [[path for path, _ in layer.ops] for layer in net.found.layers] == [
        ["stem.0"],
        ["stem.3"],
        ["body", "short"],
    ]
    assert [layer.stride for layer in net.found.layers] == [(2, 2), (4, 4), (8, 8)]


def test_skips_of_a_unet_move_along() -> None:
    net, images = net_of(Unet())
    assert len(net.found.layers) == 3
    states = some_states(net.found, 6)
    check_sharing(net, images, states)
    check_budget(net, images, states[1:])


@pytest.mark.parametrize("model", [Residual, Unet])
def test_any_order_of_requests_and_any_kept_levels(model: type[nn.Module]) -> None:
    """Images ask for different states in random steps; prefixes are forgotten and made again; nothing changes."""
    net, images = net_of(model())
    states = some_states(net.found, 12)
    wanted = {(i, s): net.referee(images, s)[0][i] for i in range(3) for s in states}
    rng = random.Random(3)
    for keep in (None, (), (1,), (2,), (1, 2)):
        run = in_chunks(net.engine(), rng.choice([1, 10_000, 1 << 30])).start(images)
        requests = list(wanted)
        rng.shuffle(requests)
        while requests:
            part = [requests.pop() for _ in range(min(len(requests), rng.randint(1, 7)))]
            (out,) = run.add(part, keep=keep)
            for row, request in zip(out, part, strict=True):
                assert gap(row, wanted[request]) < 1e-9


def test_a_level_that_later_levels_read_is_kept_too() -> None:
    """A U-Net's last level reads all the others: going on from level 2 must not make level 1 again."""
    net, images = net_of(Unet())
    engine = net.engine()
    run = engine.start(images[:1])
    first = State(((1, 0), (0, 1), (0, 0)))
    second = first.at(3, (1, 1))
    run.add([(0, first)], keep=[2])
    run.add([(0, second)], keep=[2])
    assert run.macs == [engine.trie_macs([net.found.space.zero, first, second])]


def test_asking_again_costs_nothing_while_it_is_kept() -> None:
    net, images = net_of(Residual())
    run = net.engine().start(images)
    state = some_states(net.found, 3)[-1]
    (first,) = run.add([(1, state)])
    spent = list(run.macs)
    (again,) = run.add([(1, state), (1, state)])
    assert run.macs == spent
    assert torch.equal(again, first.expand_as(again))


def test_requests_outside_the_run_are_refused() -> None:
    net, images = net_of(Residual())
    run = net.engine().start(images)
    with pytest.raises(OptionError, match="3 images"):
        run.add([(3, net.found.space.zero)])
    with pytest.raises(OptionError, match="rate"):
        run.add([(0, net.found.space.zero.at(1, (2, 0)))])


# ---------------------------------------------------------------- memory, dtypes, modes
def test_when_memory_runs_out_the_chunk_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    net, images = net_of(Residual())
    states = some_states(net.found, 9)
    requests = [(i, s) for i in range(3) for s in states]
    (wanted,) = net.engine().start(images).add(requests)
    engine, tried = net.engine(), []
    run = engine.start(images)
    real = type(run)._chunk

    def scarce(self, keys, states, segment):
        tried.append(len(keys))
        if len(keys) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return real(self, keys, states, segment)

    monkeypatch.setattr(type(run), "_chunk", scarce)
    with pytest.warns(LessAtOnce, match="goes on with fewer") as caught:
        (got,) = run.add(requests)
    assert len(caught) == 1 and max(tried) > 2 >= tried[-1]
    assert gap(got, wanted) < 1e-12
    tried.clear()
    run.add([(0, s) for s in some_states(net.found, 12)])
    assert tried and max(tried) <= 2  # from then on


def test_memory_that_runs_out_for_one_row_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    net, images = net_of(Residual())
    run = net.engine().start(images)

    def never(*_):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(type(run), "_chunk", never)
    with pytest.raises(RuntimeError, match="allocate"):
        run.add([(0, some_states(net.found, 2)[1])])


def test_other_errors_are_not_taken_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    net, images = net_of(Residual())
    run, calls = net.engine().start(images), []

    def broken(*_):
        calls.append(1)
        raise RuntimeError("shape mismatch")

    monkeypatch.setattr(type(run), "_chunk", broken)
    with pytest.raises(RuntimeError, match="shape mismatch"):
        run.add([(i, s) for i in range(3) for s in some_states(net.found, 4)])
    assert calls == [1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_float(dtype: torch.dtype) -> None:
    net, images = net_of(Residual(), dtype=dtype)
    states = some_states(net.found, 4)
    check_identity(net, images)
    check_sharing(net, images, states, tol=tolerance(dtype))
    (out,) = net.engine().start(images).add([(0, states[-1])])
    assert out.dtype == dtype


def test_channels_last() -> None:
    torch.manual_seed(0)
    model = Residual().eval().to(memory_format=torch.channels_last)
    images = torch.randn(2, 3, 33, 32).to(memory_format=torch.channels_last)
    net = Net.of(model, images[:1])
    check_identity(net, images)
    check_sharing(net, images, some_states(net.found, 5))


@pytest.mark.parametrize("grad", [True, False])
def test_frozen_or_not_no_gradient_is_kept(grad: bool) -> None:
    model = Residual().double().eval().requires_grad_(grad)
    net = Net.of(model, torch.randn(1, 3, 32, 32, dtype=torch.float64))
    (out,) = net.engine().start(torch.randn(2, 3, 32, 32, dtype=torch.float64)).add([(0, some_states(net.found, 2)[1])])
    assert not out.requires_grad
    assert all(p.requires_grad is grad and p.grad is None for p in model.parameters())


def test_a_model_in_training_mode_runs_as_in_evaluation() -> None:
    """Dropout off, batch statistics frozen, and the mode of each module as it was."""
    torch.manual_seed(0)
    model = nn.Sequential(Residual(), nn.Dropout(0.5)).double().train()
    model[0].stem[1].eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    net = Net.of(model, images[:1])
    got = net.engine().start(images).plain[net.outputs[0]]
    assert model.training and model[1].training and not model[0].stem[1].training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert gap(got, model.eval()(images)) < 1e-12


def test_weights_are_shared_not_copied() -> None:
    net, _ = net_of(Residual())
    engine = net.engine()
    held = {t.data_ptr() for t in engine.cutter.root.buffers()}
    assert net.model.body.weight.data_ptr() in held


# ---------------------------------------------------------------- geometry
class Averages(nn.Module):
    """Means without padding in the way: what comes out of a ramp is where each cell is centred."""

    def __init__(self, strides: list[tuple[int, int]]) -> None:
        super().__init__()
        self.pools = nn.ModuleList(nn.AvgPool2d(s, s) for s in strides)

    def forward(self, x: Tensor) -> Tensor:
        for pool in self.pools:
            x = pool(x)
        return x


@pytest.mark.parametrize(
    "strides", [[(2, 2), (2, 2), (2, 2)], [(4, 4), (2, 2)], [(3, 2), (2, 3)], [(2, 1), (1, 2), (2, 2)]]
)
def test_a_ramp_shows_the_displacement(strides: list[tuple[int, int]]) -> None:
    h = w = 48
    rows, columns = torch.meshgrid(torch.arange(h).double(), torch.arange(w).double(), indexing="ij")
    x = torch.stack([rows, columns, rows + columns])[None]
    net = Net.of(Averages(strides).double().eval(), x)
    plain = net.engine().start(x).plain[net.outputs[0]]
    for s in some_states(net.found, 12):
        dy, dx = net.found.space.displacement(s)
        (moved,) = net.engine().start(x).add([(0, s)])
        shift = (moved - plain)[0, :2, 1:-2, 1:-2]  # away from the far border
        assert torch.allclose(shift[0], torch.full_like(shift[0], dy))
        assert torch.allclose(shift[1], torch.full_like(shift[1], dx))


@pytest.mark.parametrize(
    ("state", "by"),
    [
        (((1, 0), (1, 1), (0, 1)), (3, 6)),
        (((-1, 0), (-1, -1), (0, -1)), (-3, -6)),
        (((1, -1), (-1, 0), (0, 1)), (-1, 3)),
    ],
)
def test_an_impulse_moves_against_the_displacement(state: tuple, by: tuple[int, int]) -> None:
    """State s puts a pixel where the base model puts the pixel at its place less the displacement."""
    net, _ = net_of(Unet())
    state = State(state)
    dy, dx = (int(d) for d in net.found.space.displacement(state))
    assert (dy, dx) == by
    x = torch.zeros(2, 3, 64, 64, dtype=torch.float64)
    net = Net.of(net.model, x[:1])
    x[0, :, 30, 28] = 1
    x[1, :, 30 - dy, 28 - dx] = 1
    run = net.engine().start(x)
    (moved,) = run.add([(0, state)])
    plain = run.plain[net.outputs[0]][1:]
    inner = (slice(None), slice(None), slice(10, 24), slice(10, 24))
    assert gap(moved[inner], plain[inner]) < 1e-12
    assert gap(moved, run.plain[net.outputs[0]][:1]) > 1e-3


# ---------------------------------------------------------------- innocence
def snapshot(model: nn.Module) -> tuple:
    modules = [
        (
            id(m), m.training, len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks),
            sorted(k for k in vars(m) if not k.startswith("_")),
        )
        for m in model.modules()
    ]  # fmt: skip
    values = [
        (k, v.data_ptr(), v._version, v.requires_grad, v.device, v.sum().item()) for k, v in model.named_parameters()
    ]
    buffers = [(k, v.data_ptr(), v.sum().item()) for k, v in model.named_buffers()]
    return modules, values, buffers


def test_success_leaves_the_model_alone() -> None:
    model = Residual().train()
    model.body.register_forward_hook(lambda m, a, o: None)
    model.head.weight.requires_grad_(False)
    before = snapshot(model)
    images = torch.randn(2, 3, 32, 32)
    kept = images.clone()
    graph = capture(model, images)
    found = find_layers(graph)
    run = Engine(graph, found, [n for n in graph.leaves if isinstance(n, torch.fx.Node)]).start(images)
    run.add([(0, some_states(found, 3)[-1])])
    assert snapshot(model) == before
    assert torch.equal(images, kept)


@pytest.mark.parametrize(
    "example", [torch.randn(3, 32, 32), torch.zeros(1, 3, 32, 32, dtype=torch.uint8), torch.randn(1, 4, 32, 32)]
)
def test_a_bad_example_leaves_the_model_alone(example: Tensor) -> None:
    model = Residual().train()
    before = snapshot(model)
    with pytest.raises(UnstrideError):
        capture(model, example)
    assert snapshot(model) == before


def test_a_raising_model_is_left_alone() -> None:
    class Raises(Residual):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise RuntimeError("no")

    model = Raises().train()
    before = snapshot(model)
    with pytest.raises(CaptureError, match="raised RuntimeError"):
        capture(model, torch.randn(1, 3, 32, 32))
    assert snapshot(model) == before


# ---------------------------------------------------------------- same out as in
@dataclass
class Out:
    logits: Tensor
    extra: Tensor


pytree.register_dataclass(Out)


@pytest.mark.parametrize(
    "shape",
    [
        lambda y: y,
        lambda y: (y, y * 2),
        lambda y: [y],
        lambda y: {"out": y, "aux": {"deep": y + 1}},
        lambda y: Out(y, y - 1),
    ],
)
def test_the_structure_comes_back(shape) -> None:
    class Shaped(Residual):
        def forward(self, x: Tensor):
            return shape(super().forward(x))

    net, images = net_of(Shaped())
    plain = net.engine().start(images).plain
    got = net.graph.rebuild([plain[leaf] if isinstance(leaf, torch.fx.Node) else leaf for leaf in net.graph.leaves])
    wanted = net.model(images)
    assert type(got) is type(wanted)
    for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(wanted), strict=True):
        assert gap(a, b) < 1e-12
