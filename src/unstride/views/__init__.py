"""Picture -> tensors.

In: a file, a PIL image, a tensor. Out: what the model wants to see: `images` opens and prepares, `policies` say which
views of a picture there are, `views` makes them and maps results back. Touch: a new view (`unstride.extend`).
"""
