"""A local page: one image, what each forward pass saw, why the recipe stopped, and what it cost.

    with make_server(Studio(open_pipeline("timm:resnet18")), port=7860) as server:
        server.serve_forever()

`choices` lists what can be chosen, `passes` turns one image into plain data, `studio` does so once and remembers it,
`server` hands it to the page.
"""

from unstride.studio.server import make_server
from unstride.studio.studio import Studio

__all__ = ["Studio", "make_server"]
