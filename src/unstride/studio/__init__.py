"""A local page to look inside: pick a model, a recipe and a photograph, watch the looks, the gates and the answer.

    studio = Studio("timm:resnet18", weights="default")
    with make_server(studio, "127.0.0.1", 7860) as server:
        server.serve_forever()

Data goes one way here, too: `choices` says what can be picked, `looking` turns one image into plain data for every
budget (`stages`: for every look and gate), `drawing` draws tasks without classes, `tuner` finds a recipe
on the sample, `room` does it all once and remembers it, `server` hands it to the page.
"""

from unstride.studio.room import Studio
from unstride.studio.server import make_server

__all__ = ["Studio", "make_server"]
