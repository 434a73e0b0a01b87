"""Labelled images -> a recipe with fitted numbers: the learned aggregation of the paper, and learned TTA.

`fitting` is the way in. `images` opens and splits the data, `attention` trains the paper's module on maps of the frozen
network, `tta` and `gps` fit weights of views on their logits.
"""
