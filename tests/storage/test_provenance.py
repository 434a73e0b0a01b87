"""The record beside a result."""

import json
import sys

import torch

from unstride.storage.provenance import provenance


def test_it_names_the_command_versions_threads_and_processor(monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/unstride", "evaluate", "a b"])
    record = json.loads(json.dumps(provenance()))
    assert record["command"] == "unstride evaluate 'a b'"
    monkeypatch.setattr(sys, "argv", ["unstride", "evaluate", "\udcff"])
    assert provenance()["command"] == r"unstride evaluate '\udcff'"
    assert record["versions"]["torch"] == torch.__version__
    assert {"python", "unstride", "numpy", "pillow"} <= set(record["versions"])
    assert record["threads"] == torch.get_num_threads()
    assert record["cpu"]
    before = record["versions"]
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    assert provenance()["versions"] == before != {}  # it does not depend on what this process has imported
