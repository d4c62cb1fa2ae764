"""What a setting says about itself beside its type and its meaning: whom it concerns, and when."""

from dataclasses import dataclass


@dataclass(frozen=True)
class About:
    """A mark in the `Annotated` type of a setting, or the attribute `about` of a section, for what its settings leave
    open. `config.composition.about` looks it up."""

    unused_by: str | None = None
    """Commands that do not use the setting, separated by spaces; those that read part of a recipe refuse it."""
    may_change: bool | None = None
    """Whether the setting may change when a run resumes: it decides how the run is computed, saved and shown, and not
    what is learned from which data, as all others, which need run.allow_changes."""
    is_place: bool | None = None
    """Whether the setting says where a run is and what is kept of it, and nothing of what is learned."""
    rank: int | None = None
    """Importance where runs differ: 0 model, 1 learning rate, 2 sizes of a step, 3 form of the objective, 4 rewards, 5
    data, 6 sampling, 7 features, 8 to 11 the rest of objective, model and data, run and engine. Others come last."""
    usual: int | None = None
    """Place among the settings to know first, which a command's help shows; equals are in the order of sections."""
    in_eval: int | None = None
    in_plan: int | None = None
    """The same in the help of `eval` and of `plan`."""


MAY_CHANGE = About(may_change=True)
OF_PLACE = About(may_change=True, is_place=True)
