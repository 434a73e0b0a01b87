"""`unstride demo`: a story that is measured on the spot, offline, with the embedded networks and images.

from unstride.demo.story import run

for part in run(Path("unstride-demo")):
    print(part.title, part.skipped or part.figures)
"""
