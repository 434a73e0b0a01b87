"""Images without labels, however many -> a table of answers (and masks), in one pass that can be killed and resumed.

In: a model, a recipe, images as they lie on disk. Out: predictions.jsonl, .csv or .parquet, and what made it.
`inputs` lists images one by one, `reading` decodes them ahead, `rows` says what a row holds, `parts` are the finished
runs of rows and how they become one file, `run` is the loop. Touch: a kind of input, a column, a format.
"""

from unstride.predicting.run import Predicted, predict

__all__ = ["Predicted", "predict"]
