"""Labelled images -> something fitted.

In: an `Enhanced` and a loader. Out: a fitted aggregation (`fitting`: `sources` draw and keep maps, `training` moves the
weights, `report` says what happened) or a chosen set of states (`selecting`), both from `pools`: everything the network
says about an image, computed once and kept.
"""
