"""transformers reads the files of all its models once, and knows the same classes."""

from transformers.utils import import_utils

from hybrid_grpo.model import listing


def test_the_list_of_models_is_the_one_that_reading_the_files_again_gives():
    whole = str(listing._MODELS / "__init__.py")
    assert import_utils.define_import_structure is listing.list_classes
    listed = listing.list_classes(whole)
    assert listed == listing._list_classes(whole) and sum(map(len, listed.values())) > 1000
    part = str(listing._MODELS / "qwen2" / "__init__.py")
    assert listing.list_classes(part) == listing._list_classes(part)
