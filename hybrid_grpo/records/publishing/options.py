"""Settings of publishing: which model of a run is published, and where."""

from pydantic.dataclasses import dataclass

from hybrid_grpo.config.fields import SECTION, Name, Place, Switch, Text


@dataclass(frozen=True, config=SECTION)
class PublishOptionsConfig:
    """Which model of the run is published, and where: give `hub` or `folder`."""

    hub: Text | None = None
    """Repository on the Hugging Face hub, as `you/name`. It is created if necessary; one that holds anything but an
    earlier publication is refused. Log in first with `hf auth login`, or set HF_TOKEN."""
    folder: Place | None = None
    """Folder to write to instead of a repository, if the hub is not available. An earlier publication in it is
    replaced, and anything else refused."""
    private: Switch = True
    """Create the repository as a private one, so that nothing becomes public by mistake. One click on the hub's page
    makes it public. An existing repository stays as it is."""
    model: Name = "model"
    """Subfolder of the run with the model: `model` has the last weights, `model_best` the best ones by `eval.best`."""
    evaluation: Text | None = None
    """File with the JSON object that `hybrid-grpo eval` printed for this model. The card then shows its numbers and
    intervals instead of those that the run measured."""
    license: Text | None = None
    """License of the model, as the hub spells it: apache-2.0, mit, ... By default the card names none."""
