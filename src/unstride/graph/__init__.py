"""model + example -> Graph.

In: a model and an example tensor. Out: a `Graph`, functional, for any batch size, the user's model untouched.
`capture` exports and checks, `functional` removes in-place ops, `questions` answers what export asks of the batch
size, `optimise` rewrites exactly, `ops` says what an op is. Touch: a rewriting that keeps every number (`optimise`).
"""
