"""Stored rows are found again, whatever was forgotten around them; memory follows what is left."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import Graph, Node

from unstride.engine.engine import Key, Store
from unstride.engine.movers import Batch


def a_store(rows: int, batch: Batch) -> tuple[Store, Node, list[Key], Tensor]:
    node = Graph().placeholder("x")
    store, keys = Store(1, {node: batch}), [(i, ((0, 0),)) for i in range(rows)]
    shape = [2, 2, 2]
    shape[batch.dim] = rows * batch.factor
    value = torch.randn(shape)
    store.put(1, keys, {node: value})
    return store, node, keys, value


@given(st.integers(1, 9), st.data(), st.sampled_from([Batch(0, 1), Batch(0, 3), Batch(1, 2)]))
def test_rows_stay_what_they_were(rows: int, data: st.DataObject, batch: Batch) -> None:
    store, node, keys, value = a_store(rows, batch)
    gone = data.draw(st.lists(st.lists(st.sampled_from(keys), unique=True), max_size=4))
    for part in gone:
        store.forget(1, part)
    left = [key for key in keys if all(key not in part for part in gone)]
    assert set(store.levels[1]) == set(left)
    blocks = {id(block): block for block in store.levels[1].values()}.values()
    assert sum(block.rows for block in blocks) < max(1, 2 * len(left))
    for key in left:
        tensor, row = store.place(1, key, node)
        stored = tensor.narrow(batch.dim, row * batch.factor, batch.factor)
        assert torch.equal(stored, value.narrow(batch.dim, key[0] * batch.factor, batch.factor))


def test_a_smaller_copy_keeps_the_layout() -> None:
    node = Graph().placeholder("x")
    store, keys = Store(1, {node: Batch(0, 1)}), [(i, ((0, 0),)) for i in range(4)]
    store.put(1, keys, {node: torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)})
    store.forget(1, keys[:3])
    tensor, row = store.place(1, keys[3], node)
    assert (tensor.shape[0], row) == (1, 0) and tensor.stride() == (75, 1, 15, 3)
