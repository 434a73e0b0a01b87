"""What each field of a recipe is, in words, and which presets there are: what a page of help needs, quick to load."""

DOCS = {
    "name": "what it is called",
    "task": "what the network's output means: classification, multilabel, segmentation, dense, embedding, ...",
    "stages": "looks (views in states) that are taken one after the other, each behind its gate, for images or tiles",
    "merge": "what looks become one by: the mean of logits, probabilities, values or directions, or a median",
    "temperature": "the merged logits are divided by it: it changes how sure, never which",
    "budget": "states of each image in the paper's search, the plain one included; 1 is the model itself",
    "layers": "subsampling layers that are searched, such as 2-4; by default the paper's for this network",
    "criterion": "which state is expanded next: by entropy, displacement, random, or learned (fitted)",
    "order": "which layer of it: paper (the first), or cost (the cheapest)",
    "states": "these states instead of a search",
    "stop": "ends an image's search early",
    "seed": "of the random criterion",
    "aggregate": "how the states of the search are merged: mean, entropy, max, or attention (fitted)",
    "space": "where: in the last map, or as logits; by default the map where it lies on a grid",
    "align": "maps are moved onto one grid: on, off, or stitch, which makes a finer one (segmentation)",
    "border": "where an aligned map has no source",
    "precision": "autocast to bfloat16 or float16; by default it computes as the images are",
    "fitted": "file with the learned aggregation, beside the recipe's own",
}

PRESETS = ("default", "plain", "paper", "paper-learned", "flip", "multiscale-flip")
