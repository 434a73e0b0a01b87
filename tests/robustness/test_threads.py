"""Several threads: right answers, and the user's model, streams and logs as they were, during and after."""

import contextlib
import io
import logging
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from procedure_nets import SmallNet, seeded
from torch import Tensor, nn

import unstride
from unstride.graph.evaluation import evaluating, evaluation_copy

PAPER: dict[str, Any] = {"recipe": "paper-refined", "task": "classification"}
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


class Normed(nn.Module):
    """Batch norm and dropout, also where no register shows them: in a list, a method, a function and a partial."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1), nn.Linear(8, 5)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(4))
        self.listed = [self.norms[0], nn.Dropout(0.5)]
        self.method = self.normed
        self.function = lambda x: self.norms[2](x)
        self.norms[3].register_forward_hook(lambda module, args, out: out + 0 * module.training)

    def normed(self, x: Tensor) -> Tensor:
        return self.norms[1](x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.method(self.listed[1](self.listed[0](self.a(x))).relu())
        return self.head(self.norms[3](self.function(self.b(x))).relu().mean((2, 3)))


def trained() -> Normed:
    torch.manual_seed(0)
    model = Normed()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(8, 3, 32, 32))
    return model.train()


def at_once(count: int, call: Callable[[int], Any]) -> list[Any]:
    start = threading.Barrier(count)

    def run(i: int) -> Any:
        start.wait()
        return call(i)

    with ThreadPoolExecutor(count) as pool:
        return [f.result() for f in [pool.submit(run, i) for i in range(count)]]


def state(model: nn.Module) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in model.state_dict().items()}


@contextlib.contextmanager
def innocent(model: nn.Module) -> Any:
    """The model is the same afterwards, and nobody saw it otherwise in between."""
    before, modes, seen, stop = state(model), [m.training for m in model.modules()], [], threading.Event()

    def watch() -> None:
        while not stop.is_set():
            seen.append([m.training for m in model.modules()] == modes)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()
    assert all(seen)
    assert [m.training for m in model.modules()] == modes
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("budget", [1, 4])
def test_a_model_in_training_mode_answers_as_in_evaluation(budget: int) -> None:
    model = trained()
    plain = Normed().eval()
    plain.load_state_dict(model.state_dict())
    plain.listed[1].eval()
    with torch.no_grad():
        wanted = unstride.enhance(plain, IMAGES[:1], **PAPER, budget=budget)(IMAGES)
    with innocent(model):
        better = unstride.enhance(model, IMAGES[:1], **PAPER, budget=budget)
        for got in at_once(4, lambda i: [better(IMAGES) for _ in range(5)]):
            for one in got:
                torch.testing.assert_close(one, wanted)


def test_threads_that_capture_at_once_leave_no_trace(capfd: pytest.CaptureFixture[str]) -> None:
    class Refused(SmallNet):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum() > 1e9 else super().forward(x)[:, : int(x.sum().abs()) % 3 + 1]

    def prepare(i: int) -> str:
        size = 32 + 8 * (i % 3)
        try:
            unstride.enhance(
                seeded(Refused() if i % 2 else SmallNet()), torch.randn(1, 3, size, size), **PAPER, budget=3
            )
        except unstride.errors.CaptureError as error:
            return f"refused: {error}"
        return "ready"

    streams, filters = (sys.stdout, sys.stderr), list(warnings.filters)
    handlers = [(h, list(h.filters)) for h in logging.root.handlers]
    found = at_once(6, prepare)
    assert [f.startswith("refused") for f in found] == [bool(i % 2) for i in range(6)]
    assert (sys.stdout, sys.stderr) == streams
    assert warnings.filters == filters
    assert [(h, list(h.filters)) for h in logging.root.handlers] == handlers
    assert logging.root.manager.disable == 0
    assert capfd.readouterr().err == ""


def test_other_threads_are_heard_while_one_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, stop = io.StringIO(), threading.Event()
    records: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    log, handler, printed = logging.getLogger("someone.else"), Keep(), 0
    logging.root.addHandler(handler)
    monkeypatch.setattr(sys, "stderr", stream)

    def speak() -> None:
        nonlocal printed
        while not stop.wait(0.001):
            print("here", file=sys.stderr)
            log.warning("here")
            printed += 1

    speaker = threading.Thread(target=speak)
    speaker.start()
    try:
        unstride.enhance(seeded(SmallNet()), IMAGES[:1], **PAPER, budget=3)
    finally:
        stop.set()
        speaker.join()
        logging.root.removeHandler(handler)
    assert printed > 0
    assert stream.getvalue().count("here") == printed == records.count("here")


def test_one_size_is_captured_once_and_many_sizes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from unstride.execution import graph_executor

    made: list[int] = []
    real = graph_executor.capture
    monkeypatch.setattr(graph_executor, "capture", lambda m, x: made.append(x.shape[-1]) or real(m, x))
    better = unstride.enhance(seeded(SmallNet()), torch.randn(1, 3, 32, 32), **PAPER, budget=3)
    images = [torch.randn(1, 3, 32 + 8 * (i % 3), 32) for i in range(9)]
    alone = [unstride.enhance(better.model, x, **PAPER, budget=3)(x) for x in images]
    made.clear()
    for got, wanted in zip(at_once(9, lambda i: better(images[i])), alone, strict=True):
        torch.testing.assert_close(got, wanted)
    assert len(made) == 2


class Tokens(nn.Module):
    """A patch embedding whose map becomes tokens, and a strided slice of them laid out as a map again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 8), nn.Linear(8, 5)
        self.down = nn.Conv2d(8, 8, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(self.embed(x).flatten(2).transpose(1, 2)).relu()
        x = x.transpose(1, 2).unflatten(2, (8, 8))
        return self.head(self.down(x).relu().mean((2, 3)))


@pytest.mark.parametrize("net", [SmallNet, Tokens])
@pytest.mark.parametrize("recipe", ["paper", "paper-refined", "default"])
def test_one_enhanced_model_in_many_threads(net: type[nn.Module], recipe: str) -> None:
    torch.manual_seed(0)
    better = unstride.enhance(net().eval(), IMAGES[:1], recipe=recipe, task="classification")
    images = [torch.randn(1 + i % 2, 3, 32, 32) for i in range(6)]
    wanted = [better(x) for x in images]
    for _ in range(5):
        for got, one in zip(at_once(6, lambda i: better(images[i])), wanted, strict=True):
            torch.testing.assert_close(got, one)


def test_a_model_that_is_used_while_it_is_captured() -> None:
    model = seeded(SmallNet())
    with torch.no_grad():
        wanted = model(IMAGES)
    stop, wrong = threading.Event(), []

    def use() -> None:
        while not stop.is_set():
            with torch.no_grad():
                got = model(IMAGES)
            if type(got) is not Tensor or not torch.allclose(got, wanted, atol=1e-5):
                wrong.append(got)

    user = threading.Thread(target=use)
    user.start()
    try:
        for size in (32, 40, 48):
            unstride.enhance(model, torch.randn(1, 3, size, size), **PAPER, budget=3)
    finally:
        stop.set()
        user.join()
    assert not wrong


def test_an_evaluation_copy_shares_weights_and_nothing_else() -> None:
    model = trained()
    other = evaluation_copy(model)
    assert evaluating(model) is not model and evaluating(model.eval()) is model
    model.train()
    theirs = {id(m) for m in model.modules()}
    assert not any(id(m) in theirs or m.training for m in other.modules())
    assert all(a is b for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert all(a is b for a, b in zip(model.buffers(), other.buffers(), strict=True))
    with innocent(model), torch.no_grad():
        assert torch.equal(other(IMAGES), other(IMAGES))


def test_an_answer_while_another_thread_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch says of all threads that they export when one does."""
    better = unstride.enhance(seeded(SmallNet()), IMAGES[:1], **PAPER, budget=3)
    wanted = better(IMAGES)
    inside, done = threading.Event(), threading.Event()
    export = torch.export.export

    def slow(model: nn.Module, *given: Any, **options: Any) -> Any:
        class Waits(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self, x: Tensor) -> Any:
                inside.set()
                done.wait(60)
                return self.model(x)

        return export(Waits(), *given, **options)

    monkeypatch.setattr(torch.export, "export", slow)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(unstride.enhance, seeded(SmallNet()), IMAGES[:1], **PAPER)
        assert inside.wait(60)
        try:
            assert torch.compiler.is_exporting()
            found = better(IMAGES)
        finally:
            done.set()
        other.result()
    torch.testing.assert_close(found, wanted)
