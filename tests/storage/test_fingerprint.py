"""Fingerprints: what counts and what does not."""

import pytest
import torch
from torch import nn

from unstride.errors import ArtefactError
from unstride.storage.fingerprint import check_model, digest, fingerprint


def test_digest_sees_names_shapes_types_and_bytes_only() -> None:
    w = torch.arange(12.0).reshape(3, 4)
    same = digest({"w": w, "b": w[0]})
    assert same == digest({"b": w[0].clone(), "w": w.T.contiguous().T})
    others = [
        {"v": w, "b": w[0]},
        {"w": w.reshape(4, 3), "b": w[0]},
        {"w": w.int(), "b": w[0]},
        {"w": w + 1e-6, "b": w[0]},
        {"w": w},
    ]
    assert len({same, *map(digest, others)}) == 6


def test_fingerprint_is_of_the_weights() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    before = fingerprint(model)
    assert fingerprint(model.train()) == fingerprint(model.eval()) == before
    model[1].running_mean[0] += 1e-3
    assert fingerprint(model) != before


def test_a_file_for_another_model_is_refused_with_both_names() -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    check_model("a.toml", fingerprint(one), one)
    for made_for in (fingerprint(one), None, 5):
        with pytest.raises(ArtefactError, match=f"a.toml.*{str(made_for)[:12]}.*{fingerprint(other)[:12]}"):
            check_model("a.toml", made_for, other)
