"""transformers reads the files of all its models once, and knows the same classes."""

import subprocess
import sys

from transformers.utils import import_utils

from hybrid_grpo.model import listing

_READINGS = """
from hybrid_grpo import engine
from hybrid_grpo.model.listing import _list_classes
before = _list_classes.cache_info().misses
import transformers.models, transformers.processing_utils
from hybrid_grpo.model import listing
assert _list_classes(listing._MODELS, prefix="models")
print(_list_classes.cache_info().misses - before)
"""


def test_the_list_of_models_is_the_one_that_reading_the_files_again_gives():
    assert import_utils.define_import_structure is listing.list_classes
    for whole in (listing._MODELS, str(listing._MODELS / "__init__.py")):
        listed = listing.list_classes(whole)
        assert listed == listing._list_classes(whole) and sum(map(len, listed.values())) > 1000
    part = str(listing._MODELS / "qwen2" / "__init__.py")
    assert listing.list_classes(part) == listing._list_classes(part)


def test_a_rank_that_has_imported_the_engine_reads_them_no_more():
    found = subprocess.run([sys.executable, "-c", _READINGS], capture_output=True, text=True, check=True)
    assert found.stdout == "0\n"
