"""The page of the paper's claims says what its rows say."""

from dataclasses import replace

import pytest

from benchmarks.claims import FAST, ClaimRow, read_rows, write_rows
from benchmarks.claims_page import CLAIMS, PAGE, page

BUDGET = ClaimRow("resnet20", "budget", "B = 10", "base model", 0, 200, 91.0, 0.3, 4.8, 1.0, 0.2, 1.8)
# The page turns this one round: what was measured is the mean over the entropy, what is claimed the opposite.
MEAN = replace(
    BUDGET, exhibit="aggregation", recipe="aggregate=mean", against="as printed", gain=0.5, low=0.1, high=0.9
)


def line(text: str, start: str) -> list[str]:
    (found,) = [line for line in text.splitlines() if line.startswith(f"| {start}")]
    return [cell.strip() for cell in found.split("|")[1:-1]]


def test_the_page_is_made_of_its_rows() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(read_rows())


def test_rows_go_to_a_file_and_back(tmp_path) -> None:
    write_rows(tmp_path / "rows.csv", [BUDGET, MEAN])
    assert read_rows(tmp_path / "rows.csv") == [BUDGET, MEAN]


def test_a_claim_is_turned_so_that_more_is_as_the_paper_says() -> None:
    text = page([BUDGET, MEAN])
    assert line(text, "10 states beat the network alone")[2] == "**+1.0 (+0.2 to +1.8)**"
    assert line(text, "entropy weights beat the mean")[2] == "**-0.5 (-0.9 to -0.1)**"
    assert "Of 2 comparisons 1 are significantly as the paper claims, 1 are significantly the opposite" in text


def test_what_was_measured_and_what_was_not_comes_from_the_rows() -> None:
    one = replace(BUDGET, exhibit="learned", recipe=FAST, against="aggregate=mean", learned_on=400)
    seeds = [replace(one, gain=0.0, moved=0), replace(one, seed=1, gain=2.0)]
    text = page([BUDGET, MEAN, *seeds])
    assert line(text, "ResNet-20, CIFAR-10 | 200") == ["ResNet-20, CIFAR-10", "200", "200", "-", "400", "-", "90.0"]
    assert "| 2 of 5 | 1 of 2 | +1.00 ± 1.41 | 0.3000 ± 0.0000 | 0.3000 |" in text
    assert "- Networks: ResNet-56, CIFAR-10; MobileNetV2" in text
    assert "; 30 states beat 4." in text.partition("## Not measured")[2]


@pytest.mark.parametrize("claim", [c for claims in CLAIMS.values() for c in claims], ids=lambda c: c.text)
def test_a_claims_size_is_a_number_of_points(claim) -> None:
    """The differences of the paper's accuracies: a cell that is not found would be an error, a wrong one is large."""
    assert claim.paper is None or abs(claim.paper) < 10
