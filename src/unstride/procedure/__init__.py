"""Values -> predictions.

In: what the engine computed for each state. Out: a `Prediction` per image. `search` asks for states, `stopping` ends
it, `align` and `stitch` lay maps on one grid, `aggregate` merges them, `meaning` says what an output means, task by
task, `tasks` which output and which map of a network that is, `features` makes finer maps, `run` is the loop,
`static` the same for a fixed set of states in one exportable module, `windows` for large images. Touch: a way to merge,
a rule to stop.
"""
