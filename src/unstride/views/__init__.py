"""Image -> tensors.

In: a file, a PIL image, a tensor. Out: what the model wants to see: `images` opens and prepares, `policies` say which
views of an image there are, `views` makes them and maps results back. Touch: a new view (`unstride.extend`).
"""
