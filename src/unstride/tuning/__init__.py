"""`tune` finds the best recipe for a compute budget on labelled images, tests it, and says whether to use it.

candidates  what is tried               pool      every forward pass of every image, computed once
simulate    a recipe run on the pool    pixels    of maps, a sample of the labelled pixels
objectives  what each image loses       choose    the search, and the one-standard-error rule
tune        folds, decision, table      result    what is returned and saved
"""
