"""Several datasets on a tiny model: weights that change, regularisation sets, and that resuming changes no bit."""

from __future__ import annotations

import pytest
import torch

from lora_api.exit_codes import ExitCode
from lora_trainer.course import Course
from lora_trainer.data.stream import BatchMaker
from lora_trainer.losses import loss_of
from tests.trainer.jobs import Job, make_pictures
from tests.trainer.test_resume import same_training

ELASTIC = ([{"value": 1}, {"at_step": 8, "value": 0}], [{"value": 0}, {"at_step": 8, "value": 1}])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    old = make_pictures(root / "old")
    new = make_pictures(root / "new", [(64, 64)] * 3)
    for file in new.glob("*.txt"):
        file.write_text("a [trigger] of the class")
    return old, new


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def job(tmp_path, tiny_model_folder, folders, cache):
    def make(old=None, new=None, **train) -> Job:
        found = Job(tmp_path / "whole", tiny_model_folder("zimage"), folders[0], cache)
        shared = {"resolution": [64], "caption_dropout": 0.5}
        found.config["datasets"] = [
            {"folder_path": str(folder)} | shared | (own or {}) for folder, own in zip(folders, (old, new), strict=True)
        ]
        found.config["trigger_word"] = "sks"
        found.config["train"] = {"steps": 8, "dtype": "fp32", "lr": 1e-3} | train
        return found

    return make


@pytest.fixture
def orders(monkeypatch):
    """The orders that are made."""
    found = []
    original = Course._order

    def order(course, stage, share, seed):
        made = original(course, stage, share, seed)
        found.append((made, course._samples))
        return made

    monkeypatch.setattr(Course, "_order", order)
    return found


@pytest.fixture
def batches(monkeypatch):
    """The batches that are made."""
    found = []
    original = BatchMaker.make

    def make(maker, iteration, micro):
        found.append(original(maker, iteration, micro))
        return found[-1]

    monkeypatch.setattr(BatchMaker, "make", make)
    return found


def test_the_new_dataset_comes_in_as_the_old_one_goes_and_resuming_changes_no_bit(job, orders):
    whole = job({"weight": ELASTIC[0]}, {"weight": ELASTIC[1]}, gradient_accumulation=2)
    assert whole.run() == ExitCode.DONE
    order, samples = orders[0]
    seen = [samples[order.batch(position)[0]].dataset for position in range(16)]
    assert seen[:3] == [0, 0, 0]
    assert seen[-2:] == [1, 1]
    wanted = sum(step / 8 for step in range(8) for _ in range(2))
    assert abs(sum(seen) - wanted) < 1
    broken = whole.copy("broken")
    assert broken.run(stop_after=4) == ExitCode.PREEMPTED
    assert broken.run(crash_after=7) == 1
    assert broken.run() == ExitCode.DONE
    assert same_training(whole, broken)


def test_without_weights_and_regularisation_nothing_is_weighed_and_the_order_is_that_of_all_samples(
    job, orders, batches
):
    assert job(reg_weight=1.0).run() == ExitCode.DONE
    assert type(orders[0][0]).__name__ == "BatchOrder"
    assert {batch.loss_weight for batch in batches} == {None}


def test_regularisation_pictures_get_no_trigger_word_and_their_own_weight(job, orders, batches):
    known = job(None, {"is_reg": True}, reg_weight=0.25, batch_size=2)
    assert known.run() == ExitCode.DONE
    order, samples = orders[0]
    assert {(s.caption, s.dropped_caption) for s in samples if s.is_reg} == {("a  of the class", "")}
    assert all(s.caption.startswith("sks, ") and s.dropped_caption == "sks" for s in samples if not s.is_reg)
    weights = [[0.25 if samples[n].is_reg else 1.0 for n in order.batch(position)] for position in range(8)]
    assert [batch.loss_weight.tolist() for batch in batches] == weights
    assert {weight for batch in weights for weight in batch} == {0.25, 1.0}


def test_a_batch_of_both_has_the_loss_of_prior_preservation():
    """L = |e|^2 + lambda |e_prior|^2 over as many of each (Ruiz et al. 2023, equation 2), halved by the batch's mean."""
    prediction, target = torch.randn(4, 3, 4, 4), torch.randn(4, 3, 4, 4)
    new, prior = ((prediction - target)[:2] ** 2).mean(), ((prediction - target)[2:] ** 2).mean()
    found = loss_of(prediction, target, weight_B=torch.tensor([1.0, 1.0, 0.3, 0.3]))
    torch.testing.assert_close(found.trained, (new + 0.3 * prior) / 2)
