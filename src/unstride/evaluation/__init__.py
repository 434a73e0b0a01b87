"""How good a recipe is on labelled images, what it costs, and whether to use it.

`evaluate` measures, `scoring` and `metrics` say how good, `intervals` and `decisions` how certain, `rows` and `report`
show it, `timing` compares times.
"""
