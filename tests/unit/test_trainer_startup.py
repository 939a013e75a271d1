"""Where the time before the first step went."""

from __future__ import annotations

from lora_trainer.startup import Phases, describe


def test_counters_do_not_make_a_phase_each():
    phases = Phases(10.0)
    phases.enter("importing libraries", 10.5)
    phases.enter("encoding 1/3 pictures", 12.0)
    phases.enter("encoding 2/3 pictures", 13.0)
    phases.enter("encoding 1/9 captions", 15.0)
    assert phases.close(16.0) == {"starting": 0.5, "importing libraries": 1.5, "encoding": 4.0}


def test_a_phase_that_comes_back_adds_to_its_time():
    phases = Phases(0.0)
    for now, name in enumerate(("reading", "encoding", "reading", "", "encoding"), 1):
        phases.enter(name, float(now))
    assert phases.close(7.0) == {"starting": 1.0, "reading": 3.0, "encoding": 3.0}


def test_all_phases_together_are_the_time_to_the_first_step():
    phases = Phases(3.0)
    phases.enter("reading 1/2 pictures of /data", 3.25)
    phases.enter("Training", 4.75)
    assert sum(phases.close(5.5).values()) == 2.5


def test_nothing_counts_after_the_first_step():
    phases = Phases(0.0)
    first = phases.close(1.0)
    phases.enter("saving step 3", 2.0)
    assert phases.close(9.0) == first == {"starting": 1.0}


def test_short_phases_are_left_out_of_the_line_for_people():
    assert describe({"starting": 0.01, "importing libraries": 3.14}) == "importing libraries 3.1 s"
