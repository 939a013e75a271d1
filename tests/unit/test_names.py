"""Names of children are deterministic, and legal for every legal job name."""

from __future__ import annotations

import re

import pytest

from lora_api.job import is_legal_name
from lora_api.names import base_name, child_name, label_value

DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
LABEL_VALUE = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")

LEGAL = [
    "a",
    "0",
    "mascot",
    "9-lives",
    "team.mascot.v2",
    "1.2.3",
    "a-b",
    "x" * 40,
    "x" * 41,
    "x" * 63,
    "x" * 64,
    "x" * 253,
    "9" * 253,
    "a." * 126 + "a",
    "x" * 30 + "-" * 10 + "y",
    "x" * 31 + "." + "y" * 40,
]


@pytest.mark.parametrize("name", LEGAL, ids=lambda name: f"{name[:20]}({len(name)})")
def test_every_legal_job_name_gives_legal_child_names(name):
    assert is_legal_name(name)
    assert DNS_LABEL.fullmatch(base_name(name))
    assert len(base_name(name)) <= 40
    assert LABEL_VALUE.fullmatch(label_value(name))
    for attempt in (1, 9999):
        host = f"{child_name(name, attempt)}-{63}"  # the host name of a pod of an Indexed Job
        assert DNS_LABEL.fullmatch(host)


def test_a_name_that_fits_is_kept():
    assert child_name("mascot", 3) == "mascot-3"
    assert label_value("team.mascot") == "team.mascot"


def test_names_are_the_same_every_time():
    assert base_name("team.mascot") == base_name("team.mascot") == "team-mascot-" + base_name("team.mascot")[-8:]


def test_names_that_are_shortened_alike_still_differ():
    names = ["x" * 41, "x" * 42, "x" * 253, "a.b", "a-b.", "9a", "j-9a"]
    assert len({base_name(name) for name in names}) == len(names)


@pytest.mark.parametrize(
    "name", ["", "A", "a_b", "-a", "a-", ".a", "a.", "a..b", "a.-b", "a-.b", "a b", "a/b", "../a", "ä", "x" * 254]
)
def test_illegal_names_are_known_as_such(name):
    assert not is_legal_name(name)


def test_a_line_break_at_the_end_is_not_part_of_a_legal_name():
    assert not is_legal_name("mascot\n")
