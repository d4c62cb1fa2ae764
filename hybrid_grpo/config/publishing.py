"""Settings of publishing: which model of a run goes where."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from hybrid_grpo.config.fields import SECTION, Name, Switch, Text


@dataclass(frozen=True, config=SECTION)
class PublishOptionsConfig:
    """Which model of the run is published, and where: give `hub` or `folder`."""

    hub: Text | None = None
    """Repository on the Hugging Face hub, as `you/name`. It is made where there is none; one that holds anything but an
    earlier publication is refused. Log in before with `hf auth login`, or set HF_TOKEN."""
    folder: Text | None = None
    """Folder to write in place of a repository, where no hub is to be had. An earlier publication in it is replaced,
    and anything else refused."""
    private: Switch = True
    """Make a new repository private, so that nothing is shown to everybody by mistake: the hub's page makes it public
    with a click. A repository that exists stays as it is."""
    model: Name = "model"
    """Folder of the run with the model: `model` has the last weights, `model_best` those of `eval.best`."""
    evaluation: Text | None = None
    """File with the JSON object that `hybrid-grpo eval` has printed of this model. Its numbers and intervals stand in
    the card in place of those that the run measured."""
    license: Text | None = None
    """License of the model, as the hub spells it: apache-2.0, mit, ... Default: the card names none."""
