"""Records with a chosen and a rejected answer become sequences in which they alternate."""

import json
import math
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerFast

from hetero_mpi.data.batch import IGNORED
from hetero_mpi.data.chat_template import choose_template
from hetero_mpi.data.dataset import Dataset, SequenceSettings
from hetero_mpi.data.record_sequences import RecordSequences, build_record_sequences
from hetero_mpi.data.record_shapes import BadRecord, BadRecords
from hetero_mpi.data.records import read_records
from hetero_mpi.data.tokenizer import train_bpe
from hetero_mpi.engine.placement import training_share
from hetero_mpi.job.training_tables import TrainTable
from hetero_mpi.model.layer.loss import summed_loss, target_losses
from hetero_mpi.model.layer.micro_batch import Comparison
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from tests.support.errors import refuses

ASKED = {"role": "user", "content": "grass"}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


PLAIN = {"prompt": "grass", "chosen": "green", "rejected": "red"}


def read(tmp_path: Path, *values: Any) -> Any:
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, values)))
    return read_records([str(tmp_path / "pairs.jsonl")], preference="pairs").records


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": [ASKED], "chosen": [said("green")], "rejected": [said("red")]},
        {"chosen": [ASKED, said("green")], "rejected": [ASKED, said("red")]},
        {"prompt": "grass", "chosen": [ASKED, said("green")], "rejected": [ASKED, said("red")]},
        {"prompt": "grass", "chosen": [said("green")], "rejected": [said("red")], "score": 3},
    ],
)
def test_shapes_of_a_pair(tmp_path: Path, value: dict[str, Any]) -> None:
    expected = [record.messages for record in read(tmp_path, PLAIN)]
    assert [record.messages for record in read(tmp_path, value)] == expected
    assert [message.content for message in expected[1]] == ["grass", "red"]
    assert len(read(tmp_path, value, {**PLAIN, "rejected": " "})) == 2, "a pair with an empty answer is left out"


def test_the_prompt_is_there_once(tmp_path: Path) -> None:
    """Whatever stands in ``prompt``, conversations that begin with it are whole."""
    system = {"role": "system", "content": "Be brief"}
    second = [system, {**ASKED, "name": None}, said("b")]
    pair = read(tmp_path, {"prompt": "grass ", "chosen": [system, ASKED, said("a")], "rejected": second})
    assert [[message.content for message in one.messages] for one in pair] == [
        ["Be brief", "grass", "a"], ["Be brief", "grass", "b"]]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "kind", "shown"),
    [
        ({"prompt": "grass", "chosen": "green"}, "record.preference_key_missing", "'rejected'"),
        ({"prompt": "grass", "chosen": 3, "rejected": "red"}, "record.text", "'chosen'"),
        ({"chosen": "green", "rejected": "red"}, "record.prompt_missing", "'chosen'"),
        ({"chosen": [ASKED, said("a")], "rejected": [said("b")]}, "record.first_role", "rejected"),
        (
            {"chosen": [ASKED, said("a"), ASKED, said("b")], "rejected": [ASKED, said("c"), ASKED, said("d")]},
            "record.prompts_differ",
            "",
        ),
        ([1], "record.not_an_object", "list"),
    ],
)
def test_bad_pairs_are_named(tmp_path: Path, value: Any, kind: str, shown: str) -> None:
    with refuses(kind, "data.records", "line 2: ", shown):
        read(tmp_path, PLAIN, value)


def test_a_pair_whose_last_answer_is_not_learnt_is_left_out(tmp_path: Path) -> None:
    turns = [ASKED, said("shared"), ASKED]
    silent = {"chosen": [*turns, {**said("a"), "train": False}], "rejected": [*turns, {**said("b"), "train": False}]}
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, (PLAIN, silent))))
    found = read_records([str(tmp_path / "pairs.jsonl")], preference="pairs")
    assert len(found.records) == 2 and len(found.untrained) == 1


def test_a_bad_pair_counts_once() -> None:
    bad = BadRecords(1)
    for _ in range(2):
        bad.add("pairs.jsonl, line 3", BadRecord("template.refused", "the template refused it"))
    bad.check("data.records")
    assert len(bad.problems) == 1


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_bpe(["## Task\ngrass\n\n## Answer\ngreen blue red a b c d e f g h\n"] * 3, 400)


def built(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, length: int, *values: Any, packing: bool = True, **more: Any
) -> Dataset:
    records = read(tmp_path, *values)
    form = choose_template(tokenizer, "plain", records)
    settings = SequenceSettings(length, packing, 0.0, 0)
    return build_record_sequences(
        [("data.records", records)], RecordSequences(tokenizer, form, settings, preference="pairs", **more)
    )


def parts(dataset: Dataset, row: int) -> list[tuple[list[int], list[int], list[int]]]:
    """(tokens, targets, answers) of each record of a row."""
    assert dataset.positions is not None and dataset.answers is not None
    begins = [*np.flatnonzero(dataset.positions[row] == 0), len(dataset.tokens[row])]
    columns = dataset.tokens[row], dataset.targets[row], dataset.answers[row]
    return [tuple(list(map(int, column[a:b])) for column in columns) for a, b in pairwise(begins)]  # type: ignore[misc]


def test_a_row_holds_whole_pairs(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    turns = {"chosen": [ASKED, said("blue"), ASKED, said("a b")], "rejected": [ASKED, said("blue"), ASKED, said("c")]}
    dataset = built(tokenizer, tmp_path, 400, PLAIN, turns)
    assert len(dataset.tokens) == 1 and dataset.records_per_row == 4
    batch = dataset.gather(dataset.train)
    assert batch.compared is not None and batch.compared.count == batch.divisor == 2
    records = parts(dataset, 0)[:4]
    of_chosen = sum(target != IGNORED for _, targets, _ in records[::2] for target in targets)
    assert batch.compared.likelihood_weight == 2 / of_chosen
    for number, (tokens, targets, answers) in enumerate(records):
        compared = [target for target, answer in zip(targets, answers, strict=True) if answer]
        text = tokenizer.decode(compared)
        assert text == ["green", "red", "a b", "c"][number] + "<|end|>"
        assert targets[-1] == IGNORED
        learnt = [target for target in targets if target != IGNORED]
        assert learnt == (tokens[1:] if number % 2 == 0 else compared)  # ORPO learns the chosen record's prompt, too
    assert dataset.answers is not None
    for learns_chosen, counted in ((False, dataset.answers > 0), (True, dataset.targets != IGNORED)):
        notes = built(tokenizer, tmp_path, 400, PLAIN, turns, learns_chosen=learns_chosen).notes
        assert f" {np.count_nonzero(counted)} " in notes[0].partition(";")[2]


def test_answers_before_that_are_not_learnt_are_no_targets(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Not of the chosen record, all of which ORPO learns else; and a batch that compares answers has no weights."""
    plain, silent = ([ASKED, {**said("blue"), **own}, ASKED] for own in ({}, {"weight": 0}))
    pairs = [{"chosen": [*turns, said("a")], "rejected": [*turns, said("b")]} for turns in (plain, silent)]
    dataset = built(tokenizer, tmp_path, 64, *pairs, packing=False)
    batch = dataset.batch(0, 2)
    assert dataset.weights is None and batch.weighed is None and batch.divisor == 2
    of_plain, of_silent = (parts(dataset, row)[0] for row in (0, 1))
    assert of_plain[0] == of_silent[0] and of_plain[2] == of_silent[2] and of_plain[1].count(IGNORED) == 1
    missing = [a for a, b in zip(of_plain[1], of_silent[1], strict=True) if a != b]
    assert tokenizer.decode(missing).strip().startswith("blue") and of_silent[1].count(IGNORED) == 1 + len(missing)


def test_the_longer_answer_is_cut_first(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    long = " ".join("abcdefgh" * 20)
    whole = built(tokenizer, tmp_path, 400, PLAIN)
    first, second = (len(tokens) for tokens, _, _ in parts(whole, 0)[:2])
    for value, sizes in (
        ({**PLAIN, "chosen": long}, (100 - second, second)),
        ({**PLAIN, "rejected": long}, (first, 100 - first)),
        ({**PLAIN, "chosen": long, "rejected": long}, (50, 50)),
    ):
        dataset = built(tokenizer, tmp_path, 99, value)
        found = [len(tokens) for tokens, _, _ in parts(dataset, 0)]
        found[1] += 1  # a row's last label stands behind its tokens
        assert tuple(found) == sizes
    with refuses("records.all_cut"):
        built(tokenizer, tmp_path, 12, PLAIN)


def test_rows_without_sequences_compare_nothing(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    dataset = built(tokenizer, tmp_path, 100, *[PLAIN] * 3, packing=False)
    plan = Plan((PipelinePlan((StagePlan((0,), 0, 4, 0),), 2, 4),), 4, 100, 4)
    share = training_share(plan, 0, dataset.gather(np.array([0, 1])))
    assert share.batch.compared is not None
    assert list(share.batch.compared.answers.any(axis=1)) == [True, True, False]


def logits_of(tokens: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*tokens.shape, 500, generator=generator, requires_grad=True)


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


BETA, MARGIN, SMOOTHING = 0.3, 0.4, 0.1
"""Of the formulas below."""


def of_pair(method: str, sums: list[float], counts: list[int], reference: list[float]) -> float:
    """The loss of one pair by its method's paper, without the likelihood of the chosen record. ``sums``: log-likelihoods."""
    gained = [own - before for own, before in zip(sums, reference, strict=True)]
    means = [own / count for own, count in zip(sums, counts, strict=True)]
    if method == "orpo":
        odds = [mean - math.log(1 - math.exp(mean)) for mean in means]
        return -BETA * math.log(sigmoid(odds[0] - odds[1]))
    if method == "ipo":
        return (gained[0] / counts[0] - gained[1] / counts[1] - 1 / (2 * BETA)) ** 2
    scores = BETA * (means[0] - means[1]) - MARGIN if method == "simpo" else BETA * (gained[0] - gained[1])
    return -(1 - SMOOTHING) * math.log(sigmoid(scores)) - SMOOTHING * math.log(sigmoid(-scores))


@pytest.mark.parametrize("method", ["dpo", "ipo", "simpo", "orpo"])
def test_losses_of_pairs_one_by_one(tokenizer: PreTrainedTokenizerFast, tmp_path: Path, method: Any) -> None:
    """Against the formulas of the papers, written for one pair in plain numbers; a row without a second pair counts nothing."""
    dataset = built(
        tokenizer, tmp_path, 50, PLAIN, {**PLAIN, "chosen": "blue"}, {**PLAIN, "prompt": "a b c", "rejected": "d"}
    )
    batch = dataset.gather(dataset.train)
    assert batch.compared is not None and batch.compared.count == 3 and batch.compared.answers.shape[0] == 2
    tokens, targets = torch.from_numpy(batch.tokens).long(), torch.from_numpy(batch.targets).long()
    assert batch.positions is not None
    positions = torch.from_numpy(batch.positions)
    reference = torch.tensor([[-14.5, -15.0, -7.0, -6.0], [-20.0, -22.0, 7.0, 0.0]])
    train = TrainTable(
        preference=method, preference_beta=BETA, preference_margin=MARGIN, preference_smoothing=SMOOTHING
    )
    answers, weight = torch.from_numpy(batch.compared.answers), batch.compared.likelihood_weight
    logits = logits_of(tokens)
    loss, sums = Comparison(train, answers, reference, weight).loss(target_losses(logits, targets), positions)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert torch.isfinite(gradient).all() and gradient.abs().sum() > 0
    expected, likelihood = 0.0, 0.0
    rewards: list[list[float]] = []
    for row in range(2):
        begin, found = 0, []
        for _, own, marks in parts(dataset, row):
            losses = -F.log_softmax(logits[row, begin : begin + len(own)].double(), 1)
            chosen = [float(losses[i, target]) for i, target in enumerate(own) if marks[i]]
            if chosen:
                found.append((-sum(chosen), len(chosen), float(reference[row, len(found)])))
                if len(found) % 2:
                    likelihood += sum(float(losses[i, target]) for i, target in enumerate(own) if target != IGNORED)
            begin += len(own)
        for pair in range(0, len(found), 2):
            sums_of, counts, before = (list(column) for column in zip(*found[pair : pair + 2], strict=True))
            expected += of_pair(method, sums_of, counts, before)
            scores = zip(sums_of, counts, before, strict=True)
            rewards.append([BETA * (s / n if method in ("simpo", "orpo") else s - r) for s, n, r in scores])
    if method == "orpo":
        expected += weight * likelihood
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    better = [chosen > rejected for chosen, rejected in rewards]
    assert len(better) == 3
    told = [*map(sum, zip(*rewards, strict=True)), sum(better)]
    assert sums.tolist() == pytest.approx(told, rel=1e-5)


def test_losses_of_targets_in_pieces() -> None:
    targets = torch.arange(24).view(2, 12) * 7 % 50
    targets[0, 3] = IGNORED
    logits = torch.randn(2, 12, 50, generator=torch.Generator().manual_seed(0), requires_grad=True)
    weights = torch.rand(2, 12, generator=torch.Generator().manual_seed(2))
    found = []
    for piece in (None, 50 * 5):
        losses = target_losses(logits, targets, piece)
        found.append((losses, *torch.autograd.grad((losses * weights).sum(), logits)))
    assert all(torch.equal(whole, cut) for whole, cut in zip(*found, strict=True))
    assert found[0][0][0, 3] == 0
    assert float(found[0][0].sum()) == pytest.approx(float(summed_loss(logits, targets)))


def test_an_answer_that_is_certain_has_a_gradient() -> None:
    orpo = partial(Comparison, TrainTable(preference="orpo"))
    positions, targets = torch.tensor([[0, 1, 0, 1]]), torch.tensor([[IGNORED, 3, IGNORED, 2]])
    for gap in (10.0, 17.0, 40.0):
        logits = torch.zeros(1, 4, 8)
        logits[0, 1, 3] = logits[0, 3, 2] = gap
        logits.requires_grad_(True)
        answers = torch.tensor([[0, 1, 0, 1]])
        loss = orpo(answers, torch.zeros(1, 2), 1.0).loss(target_losses(logits, targets), positions)[0]
        (gradient,) = torch.autograd.grad(loss, logits)
        assert torch.isfinite(loss) and torch.isfinite(gradient).all()


def labelled(prompt: str, completion: str, label: Any) -> dict[str, Any]:
    return {"prompt": prompt, "completion": completion, "label": label}


def test_records_with_labels(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Each record has a row of its own kind, and behind it its prompt with the answer of the prompt before."""
    values = [labelled("grass", "green", True), labelled("a b c", "red", 0), {**PLAIN, "prompt": "d"}]
    (tmp_path / "labels.jsonl").write_text("\n".join(map(json.dumps, values)))
    records = read_records([str(tmp_path / "labels.jsonl")], preference="labels").records
    assert [record.desirable for record in records] == [True, False, True, False]
    form = choose_template(tokenizer, "plain", records)
    for packing, length, count in ((False, 60, 4), (True, 120, 1)):
        made = RecordSequences(tokenizer, form, SequenceSettings(length, packing, 0.0, 0), preference="labels")
        dataset = build_record_sequences([("data.records", records)], made, evaluation=records)
        assert list(dataset.train) == [2 * row for row in range(count)]
        assert sorted(dataset.held_out) == [2 * row for row in range(count, 2 * count)]
        rows = [parts(dataset, row) for row in range(2 * count)]
        own = [record for row in rows[::2] for record in row if any(record[2])]
        other = [record for row in rows[1::2] for record in row if any(record[2])]
        assert [max(answers) for _, _, answers in own] == [2, 3, 2, 3]

        def text(record: Any, answer: bool) -> str:
            tokens, targets, answers = record
            kept = [target for target in targets if target != IGNORED]
            assert kept == [target for target, mark in zip(targets, answers, strict=True) if mark]
            return tokenizer.decode(kept if answer else tokens[: answers.index(max(answers)) + 1])

        assert [text(record, True).removesuffix("<|end|>") for record in own] == ["green", "red", "green", "red"]
        assert [text(record, True) for record in other] == [
            text(record, True) for record in (own[2], own[0], own[1], own[1])
        ]
        assert [text(record, False) for record in other] == [text(record, False) for record in own]
        compared = dataset.gather(dataset.train).compared
        assert compared is not None and (compared.count, compared.chosen, compared.rejected) == (4, 2, 2)


def test_mismatched_answers_are_those_of_another_prompt(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Pairs, and records of one prompt in a row: none gets an answer to its own prompt."""
    values = [PLAIN, {"prompt": "sky", "chosen": "blue", "rejected": "low"}, labelled("a", "b", True)]
    (tmp_path / "labels.jsonl").write_text("\n".join(map(json.dumps, values)))
    records = read_records([str(tmp_path / "labels.jsonl")], preference="labels").records
    form = choose_template(tokenizer, "plain", records)
    made = RecordSequences(tokenizer, form, SequenceSettings(60, False, 0.0, 0), preference="labels")
    dataset = build_record_sequences([("data.records", records)], made)
    found = [tokenizer.decode([one for one in row if one != IGNORED]) for row in dataset.targets.tolist()]
    assert [text.removesuffix("<|end|>") for text in found[1::2]] == ["b", "b", "green", "red", "blue"]
    learnt = dataset.targets[::2] != IGNORED
    used = int((learnt.cumsum(axis=1).argmax(axis=1) + 2).sum())
    assert f"{100 * used / (5 * 61):.0f} %" in dataset.notes[0] and f"{np.count_nonzero(learnt)} " in dataset.notes[0]
    for label in ("true", None, 2):
        with refuses("record.label", "'label'"):
            (tmp_path / "labels.jsonl").write_text(json.dumps(labelled("grass", "green", label)))
            read_records([str(tmp_path / "labels.jsonl")], preference="labels")
    with refuses("records.too_few_prompts"):
        build_record_sequences([("data.records", records)], made, evaluation=records[:2])


def test_the_loss_of_single_answers() -> None:
    """Kahneman-Tversky optimization, with two answers in one row and a row that holds nothing."""
    train = TrainTable(preference="kto", preference_beta=BETA, desirable_weight=2.0, undesirable_weight=0.5)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]])
    answers = torch.tensor([[0, 2, 2, 0, 0, 3], [0, 0, 0, 0, 0, 0]], dtype=torch.uint8)
    losses = torch.tensor([[9.0, 1.0, 0.5, 9.0, 9.0, 2.0], [0.0] * 6])
    reference = torch.tensor([[-2.0, -1.0], [0.0, 0.0]])
    loss, sums = Comparison(train, answers, reference, 0.0, 0.7).loss(losses, positions)
    gained = (-1.5 + 2.0, -2.0 + 1.0)
    expected = 2.0 * (1 - sigmoid(BETA * (gained[0] - 0.7))) + 0.5 * (1 - sigmoid(BETA * (0.7 - gained[1])))
    assert float(loss) == pytest.approx(expected, rel=1e-6)
    assert sums.tolist() == pytest.approx([BETA * gained[0], BETA * gained[1], 0.0])
