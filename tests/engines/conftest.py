"""A pair whose target the servers of these tests are asked for."""

import pytest

from tests.support.decoding import random_pair


@pytest.fixture(scope="module")
def pair():
    return random_pair("llama")
