"""What long runs need: files, a resumable cache, fingerprints, locks, processes and progress.

`cache` keeps what is computed image by image; `computation` and `fingerprint` say what it depends on; `artefacts` are
checked safetensors files; `provenance` records how a result was made. Nothing here knows what the work is.
"""
