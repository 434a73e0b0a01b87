"""Fingerprints: what counts and what does not."""

import torch
from torch import nn

from unstride.jobs.fingerprint import digest, fingerprint


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
