import gc
import weakref

from hybrid_grpo.run.training import loaded_objects_kept


class Knot:
    """Refers to itself: only a collection ends it."""

    def __init__(self) -> None:
        self.own = self


def test_what_was_loaded_is_left_out_and_what_comes_later_is_collected():
    with loaded_objects_kept():
        frozen = gc.get_freeze_count()
        later = weakref.ref(Knot())
        gc.collect()
        assert later() is None
        # Objects that were loaded may end by themselves meanwhile: other tests of the process leave some.
        assert 10_000 < gc.get_freeze_count() <= frozen
    assert gc.get_freeze_count() == 0
