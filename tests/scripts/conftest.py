import pytest

from tests.eval import stand_ins


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    return stand_ins.saved(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def tiny():
    return stand_ins.tiny_model()
