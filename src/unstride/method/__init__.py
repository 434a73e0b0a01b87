"""The paper, one file a section: pure functions over tensors that know nothing of engines, files or commands.

"Deep Nets with Subsampling Layers Unwittingly Discard Useful Activations at Test-Time", ECCV 2024.
"""
