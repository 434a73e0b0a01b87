"""Prefixes that the search may go on from: rows of shared tensors, found by level and key, forgotten one by one."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from unstride.engine.movers import Batch
from unstride.geometry.states import Selection

Key = tuple[int, tuple[Selection, ...]]  # image and the selections up to a level: a node of the prefix trie


@dataclass(eq=False)
class _Block:
    """Values of some trie nodes of one level; `keys` names the row of each that is still wanted."""

    values: dict[Node, Tensor]
    keys: dict[Key, int]
    rows: int


class Store:
    """`store.put(level, keys, values)`, then `store.place(level, key, node)` -> (tensor, row).

    Rows that were computed together are not forgotten together, so a tensor is copied into a smaller one when half of
    its rows are.
    """

    def __init__(self, depth: int, batches: dict[Node, Batch]) -> None:
        self.levels: list[dict[Key, _Block]] = [{} for _ in range(depth + 1)]
        self.batches = batches

    def __contains__(self, at: tuple[int, Key]) -> bool:
        return at[1] in self.levels[at[0]]

    def put(self, level: int, keys: list[Key], values: dict[Node, Tensor]) -> None:
        block = _Block(values, {key: row for row, key in enumerate(keys)}, len(keys))
        self.levels[level].update(dict.fromkeys(keys, block))

    def place(self, level: int, key: Key, node: Node) -> tuple[Tensor, int]:
        block = self.levels[level][key]
        return block.values[node], block.keys[key]

    def forget(self, level: int, keys: Iterable[Key]) -> None:
        touched: dict[int, _Block] = {}
        for key in keys:
            block = self.levels[level].pop(key, None)
            if block is not None:
                del block.keys[key]
                touched[id(block)] = block
        for block in touched.values():
            if block.keys and len(block.keys) * 2 <= block.rows:
                self.put(level, list(block.keys), self._some(block, block.keys.values()))

    def _some(self, block: _Block, rows: Iterable[int]) -> dict[Node, Tensor]:
        out = {}
        for node, value in block.values.items():
            dim, m = self.batches[node].dim, self.batches[node].factor
            out[node] = torch.cat([value.narrow(dim, row * m, m) for row in rows], dim)
        return out
