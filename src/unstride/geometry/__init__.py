"""Graph -> layers: what subsamples, what moves together, where every value lies on the image.

In: a `Graph`. Out: a `Subsampling` (`layers`: the state space, which operand each selection moves) and the `Report`
for users. `walk` sends coordinates (`positions`) through the graph by `rules`, a file per family of ops; `grids`
recognises regular ones; `find` takes the ops that subsample (`sites`), joins those that meet again (`groups`) and
makes layers of them; `edges` says what moves at the border; `states` names selections. Add here: a rule for a new op
(`rules`; see `unstride.extend`).
"""
