"""model + example -> Graph.

In: a model and an example tensor. Out: a `Graph`, functional, for any batch size, that reads the model's live weights.
`capture` exports, `verify` checks, `evaluation` copies a model without its weights, `functional` removes in-place ops,
`guards` answers what export cannot read, `freshness` notices a changed model, `rewrite` makes a faster graph with
copies of the weights, `ops` says what an op is. The user's model is never touched. Add here: an exact rewrite.
"""
