"""From images to tensors.

In: a file, a PIL image or a tensor, and a View. Out: the tensor that the model takes. `images` opens files and prepares
them, `source` renders views of a batch of images, `transforms` holds the TTA ops and maps their outputs back. Which
views there are is data (`recipe/view.py`). Touch: a new op (`unstride.extend`).
"""
