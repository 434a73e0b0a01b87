"""Serve what `unstride export --from-pixels` wrote: pip install onnxruntime pillow aiohttp; serve.py FILE PORT."""

import asyncio
import io
import json
import sys

import numpy as np
import onnxruntime as ort
from aiohttp import web
from PIL import Image, ImageOps

BYTES, PIXELS, BATCH, WAITING = 10_000_000, 25_000_000, 32, 256  # at most: upload, image, images at once, waiting


def decoded(body):
    with Image.open(io.BytesIO(body), formats=["JPEG", "PNG", "WEBP", "BMP"]) as image:
        if image.width * image.height > PIXELS:
            raise ValueError(f"more than {PIXELS:,} pixels")
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))


def create_app(path):
    session, lock, waiting = ort.InferenceSession(path), asyncio.Lock(), []
    classes = json.loads(session.get_modelmeta().custom_metadata_map["unstride.classes"])

    def run(images):
        scores, *rest = session.run(None, {"images": np.stack(images)})
        best = [classes[k] if classes else int(k) for k in scores.argmax(1)]
        rows = zip(best, *(values.tolist() for values in rest), strict=True)
        return [dict(zip(("class", "confidence", "pass_count", "cost"), row, strict=True)) for row in rows]

    async def handle(request):
        if request.path == "/health":
            return web.json_response({"waiting": len(waiting)})
        body = await request.read()  # 413 beyond BYTES
        try:
            image = await asyncio.to_thread(decoded, body)
        except Exception as error:  # decoders raise nearly anything
            return web.json_response({"error": f"not an image: {error}"}, status=400)
        if len(waiting) >= WAITING:
            return web.json_response({"error": "too many requests"}, status=503)
        waiting.append((image, answer := asyncio.get_running_loop().create_future()))
        async with lock:  # what arrives while a batch is computed becomes the next batch, of images of one size
            while not answer.done():
                batch = [entry for entry in waiting if entry[0].shape == image.shape][:BATCH]
                (done,) = await asyncio.gather(asyncio.to_thread(run, [e[0] for e in batch]), return_exceptions=True)
                results = done if isinstance(done, list) else [None] * len(batch)
                [entry[1].set_result(result) for entry, result in zip(batch, results, strict=True)]
                waiting[:] = [entry for entry in waiting if not entry[1].done()]
        return web.json_response(answer.result(), status=500 if answer.result() is None else 200)

    app = web.Application(client_max_size=BYTES)
    app.add_routes([web.post("/predict", handle), web.get("/health", handle)])
    return app


if __name__ == "__main__":
    web.run_app(create_app(sys.argv[1]), port=int(sys.argv[2])) if sys.argv[2:] else print(__doc__)
