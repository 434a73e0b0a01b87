"""Layers + requests -> values.

In: images and (image, state) requests. Out: the values of the tapped nodes, a shared prefix computed once, and the
MACs it took. `segments` cut the graph at the layers, `movers` move operands, `store` keeps prefixes, `packed` and
`compiled` make the segments of a frozen graph faster. Nothing here depends on classes or confidence. Add here: a faster
kernel or less memory, never other numbers.
"""
