"""Labelled images + a cost ceiling -> the best recipe and its proof.

In: a model, images (with labels, or without), a mean cost in plain forwards. Out: a `Tuned`: the recipe, the frontier
of recipes at other costs, and a table. `candidates` says which looks there are, `pool` holds what the network says in
each of them, `simulate` runs any recipe from the pool, `choose` picks, `certificate` says in words what is sure. Tasks
without one class are judged in `judges`, a class for each; `choose_looks` picks for all of them. Touch: candidates, a
way to choose, a judge.
"""
