"""Reading tokens, and the order in which a run sees them."""

import itertools
import lzma

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_run import N_LONG, N_SHORT, TINY, VOCABULARY

from irminsul.errors import InputError
from training.text import TrainingText, read_sequences


def numbered(n_long, n_short) -> TrainingText:
    """Sequences that are all of one token each, a token for each sequence."""
    long = np.repeat(np.arange(n_long, dtype=np.uint16)[:, None], 6, axis=1)
    short = np.repeat(np.arange(n_short, dtype=np.uint16)[:, None] + 1000, 3, axis=1)
    return TrainingText(long, short, {})


def taken(text, n, *, skip=0) -> list[list[int]]:
    return [batch.tolist() for batch in itertools.islice(text.batches(6, skip), n)]


def test_files_are_joined_and_held_out_text_has_its_kind(data):
    text = TrainingText.read(data, TINY, VOCABULARY)
    assert text.long.shape == (N_LONG, 48)
    assert text.short.shape == (N_SHORT, 16)
    assert {kind: rows.shape for kind, rows in text.held_out.items()} == {"noise": (2, 48)}


def test_a_compressed_file_is_read_like_a_plain_one(data):
    plain = data / "train_2k.bin"
    packed = data / "packed.bin.xz"
    packed.write_bytes(lzma.compress(plain.read_bytes()))
    np.testing.assert_array_equal(read_sequences(packed, 16, VOCABULARY), read_sequences(plain, 16, VOCABULARY))


@pytest.mark.parametrize("missing", ["train_8k", "train_2k", "eval_noise"])
def test_a_missing_kind_of_file_is_named(data, missing):
    (data / f"{missing}.bin").unlink()
    with pytest.raises(InputError, match=rf"data has no {missing.split('_')[0]}_"):
        TrainingText.read(data, TINY, VOCABULARY)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.bin", b"", "has 0 bytes, which are not whole sequences of 16 tokens"),
        ("a.bin", bytes(34), "has 34 bytes, which are not whole sequences of 16 tokens"),
        ("a.bin.xz", b"not compressed", "cannot be read"),
        ("a.bin.xz", lzma.compress(bytes(320))[:-9], "cannot be read"),
        ("a.bin", b"\x40\x01" * 16, "has the token 320, but the vocabulary has 320"),
    ],
)
def test_a_bad_file_is_refused_in_one_sentence(tmp_path, name, content, told):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=rf"a\.bin.* {told}"):
        read_sequences(path, 16, VOCABULARY)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"gone\.bin cannot be read"):
        read_sequences(tmp_path / "gone.bin", 16, VOCABULARY)


def test_a_pool_smaller_than_a_batch_is_refused():
    with pytest.raises(InputError, match="1 sequences of 3 are fewer tokens than 6"):
        numbered(4, 1).batches(6, 0)


@given(n_long=st.integers(1, 9), n_short=st.integers(2, 9))
def test_an_epoch_is_every_sequence_once_but_for_a_rest(n_long, n_short):
    text = numbered(n_long, n_short)
    per_epoch = n_long + n_short // 2
    batches = taken(text, per_epoch)
    assert {(len(batch), len(batch[0])) for batch in batches} == {(1, 6), (2, 3)}
    seen = [row[0] for batch in batches for row in batch]
    assert len(seen) == len(set(seen)) == n_long + n_short // 2 * 2
    assert set(range(n_long)) <= set(seen)


@given(n_long=st.integers(1, 5), n_short=st.integers(2, 7), skip=st.integers(0, 30))
def test_skipped_batches_are_those_that_a_straight_run_would_have_seen(n_long, n_short, skip):
    text = numbered(n_long, n_short)
    assert taken(text, 5, skip=skip) == taken(text, skip + 5)[skip:]


def test_epochs_differ():
    text = numbered(6, 6)
    first, second = taken(text, 9), taken(text, 18)[9:]
    assert first != second
    assert sorted(row for batch in first for row in batch) == sorted(row for batch in second for row in batch)


def test_watched_sequences_come_from_all_over_the_text(text):
    watched = text.watched(TINY)
    assert [len(row) for row in watched] == [40, 40, 40]
    for row, at in zip(watched, (0, 4, 8), strict=True):
        np.testing.assert_array_equal(row.numpy(), text.long[at, :40])
