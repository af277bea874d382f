"""A checkpoint's index is read without running what it may say."""

import os
import pickle

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItemType

from zerotune.zero_runtime.checkpoint_reader import SafeReader
from zerotune.zero_runtime.errors import CheckpointError


class Call:
    """Pickles as a call of `function`."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def read(folder, payload):
    (folder / ".metadata").write_bytes(payload)
    return SafeReader(folder).read_metadata()


@pytest.mark.parametrize(
    "payload",
    [
        pickle.dumps(Call(os.system, "true")),
        pickle.dumps(Call(getattr, torch.Tensor, "backward")),
        pickle.dumps(Call(eval, "1")),
        # What a module of DCP's happens to import, by its dotted name.
        b"\x80\x04\x8c\x27torch.distributed.checkpoint.filesystem\x8c\x09os.system\x93\x8c\x04true\x85R.",
        b"\x80\x04\x8c\x27torch.distributed.checkpoint.filesystem\x8c\x05queue\x93.",
    ],
)
def test_an_index_that_names_anything_else_is_refused(tmp_path, payload):
    with pytest.raises(CheckpointError):
        read(tmp_path, payload)


def test_enum_members_of_every_python_are_read(tmp_path):
    from torch.distributed.checkpoint.metadata import Metadata

    member = Call(getattr, WriteItemType, "SHARD")
    metadata = Metadata({}, storage_data={MetadataIndex("weight"): member, "plain": WriteItemType.TENSOR})
    found = read(tmp_path, pickle.dumps(metadata)).storage_data
    assert found == {MetadataIndex("weight"): WriteItemType.SHARD, "plain": WriteItemType.TENSOR}


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_pipe_in_the_place_of_a_file_is_refused_at_once(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"no regular file; choose"):
        SafeReader(tmp_path).read_metadata()


@pytest.mark.parametrize("payload", [b"", b"\x80\x04", b"not a pickle"])
def test_a_broken_index_is_refused(tmp_path, payload):
    with pytest.raises(CheckpointError):
        read(tmp_path, payload)
