"""Images without labels, however many, become a table of predictions (and masks) that can be killed and resumed.

`inputs` and `containers` list images one by one, `reading` decodes them ahead, `parts` computes 256 at a time,
`rows` says what a row holds, `tables` writes the formats, `run` is the loop, `ray` runs it on a cluster, and `compare`
finds the images that two recipes disagree on.
"""

from unstride.predicting.ray import RayPredictor

__all__ = ["RayPredictor"]
