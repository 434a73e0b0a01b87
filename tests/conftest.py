import unstride  # noqa: F401  (before torchvision and timm, see unstride/_torchvision.py)
