"""Layers + requests -> values.

In: images and (image, state) requests. Out: the values of the tapped nodes, a shared prefix computed once, and the
MACs it took. `segments` cut the graph at the layers, `movers` move operands, `store` holds prefixes, `fused` (with
`packing`, `transposed` and `norms`) and `compiled` make segments quick. It knows nothing of classes or confidence.
Touch: kernels and memory, never numbers.
"""
