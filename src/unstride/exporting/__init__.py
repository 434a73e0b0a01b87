"""A recipe as one file for other runtimes: `.onnx` with its gates inside, or `.pt2` without gates.

In: networks with a recipe. Out: one file, checked against them before it is there. `passes` lists the forward passes,
`networks` exports each network, `views` and `pixels` prepare their inputs, `loop` joins them into one graph, `checking`
compares the file with the recipe. Touch: a view that a graph can show, a runtime.
"""

from unstride.exporting.writing import ExportedFile, export

__all__ = ["ExportedFile", "export"]
