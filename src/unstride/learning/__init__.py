"""Labelled pictures -> something fitted.

In: an `Enhanced` and a loader. Out: a fitted aggregation (`fitting`) or a chosen set of states (`selecting`), both
from `pools`: everything the network says about a picture, computed once and kept.
"""
