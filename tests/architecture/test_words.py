"""The project speaks the field's own words: image, pass, flip, confident, cost. Private ones do not come back."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "unstride"
CODE = sorted(
    path for folder in ("src", "examples", "benchmarks", "tests", "docs") for path in (ROOT / folder).rglob("*.py")
)
CODE.remove(Path(__file__))  # the list itself
OTHERS = (
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "CITATION.cff",
    "Makefile",
    "pyproject.toml",
)
PAGES = [path for kind in ("html", "js", "css") for path in sorted(SOURCE.rglob(f"*.{kind}"))]
PROSE = [*(ROOT / name for name in OTHERS), *PAGES, *sorted((ROOT / "docs").rglob("*.md"))]

# word: what to say instead
PRIVATE = {
    r"look(s|ed|ing)? (again|at it again)|looking again|(a|another|one|further|second|the) look": "pass, forward pass",
    r"looks": "passes",
    r"pictures?": "image",
    r"mirror(s|ed|ing)?": "flip",
    r"surest|sureness|unsure(ness)?": "confident, confidence, uncertain",
    r"surely|measurably": "significant",
    r"(un)?likelier": "lower NLL, better calibrated",
    r"dearer|dearest": "more expensive",
    r"plain (network|answer|forwards?(?! pass))": "base model, its prediction, forward passes of the base model",
    r"(held|natural) edges?": "pinned edges",
    r"laws?": "invariant",
    r"rooms?": "package",
    r"house": "architecture",
    r"doubts|doubtful": "warning, uncertain",
    r"louder|speaks? louder|tamed?": "overconfident, temperature-matched",
    r"undecided": "uncertain",
    r"(not )?proved|unproved|proofs?": "tested, inconclusive, evaluation",
    r"asked back": "an error",
}
# (file, what is matched there): why it is right in its place
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("tests/cli/test_main.py", "looks"): "a task is guessed from how the output looks",
    ("tests/engine/test_packed.py", "looks"): "a rewriting looks for shapes",
    ("tests/graph/test_functional.py", "looks"): "a tensor that looks like a view",
    ("tests/oracle.py", "looks"): "an axis that looks like the image's",
    ("tests/recipe/test_view.py", "mirror"): "an unknown view, and the error that it gives",
    ("tests/test_enhanced.py", "mirror"): "an unknown recipe, and the error that it gives",
    ("tests/views/test_transforms.py", "mirror"): "PIL's name for a flip",
    ("tests/test_monai.py", "mirror"): "nnU-Net's word, as in its options",
    ("tests/test_monai.py", "mirroring"): "nnU-Net's word, as in its options",
}
CLASSES = {
    "Looked",
    "Looking",
    "Seen",
    "Opened",
    "Heard",
    "Told",
    "Asked",
    "Settled",
    "Judged",
    "Said",
    "Lost",
    "Gathered",
}
VARIABLES = {"told", "heard", "said", "mine", "surest", "loud", "laid", "warmed", "doubts"}


def text_of(path: Path) -> Iterator[tuple[int, str]]:
    """Names, strings and comments of a Python file, names in words; the lines of any other."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from enumerate(text.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", token.string)
        elif token.type in (tokenize.STRING, tokenize.COMMENT):
            yield from enumerate(token.string.splitlines(), token.start[0])


PATTERNS = {re.compile(rf"\b({words})\b", re.IGNORECASE): instead for words, instead in PRIVATE.items()}


@pytest.mark.parametrize("path", [*CODE, *PROSE], ids=lambda path: str(path.relative_to(ROOT)))
def test_no_private_word(path: Path) -> None:
    name, problems = str(path.relative_to(ROOT)), []
    for line, text in text_of(path):
        for pattern, instead in PATTERNS.items():
            for match in pattern.finditer(text):
                if (name, match[0].lower()) not in EXCEPTIONS:
                    problems.append(f"{name}:{line}: {match[0]!r} in {text.strip()[:80]!r}; say {instead}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_say_what_they_are(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    classes = {n.name for n in ast.walk(tree) if isinstance(n, ast.ClassDef)}
    variables = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    variables |= {a.arg for n in ast.walk(tree) if isinstance(n, ast.arguments) for a in (*n.args, *n.kwonlyargs)}
    assert not classes & CLASSES and not variables & VARIABLES


def test_every_exception_is_needed() -> None:
    for (name, word), reason in EXCEPTIONS.items():
        assert reason
        assert any(word in text.lower() for _, text in text_of(ROOT / name)), (name, word)
