"""Measures the completions of each language."""

from collections.abc import Mapping, Sequence

import torch

from hybrid_grpo.config import BatchPlan, TrainConfig
from hybrid_grpo.config.errors import UserError, refuse
from hybrid_grpo.data.batch import Numbers, Prompt, Rollout, Scores
from hybrid_grpo.data.words import language, language_code, language_codes, last_asked
from hybrid_grpo.features.languages.settings import OTHER, LanguagesConfig
from hybrid_grpo.run.feature import Feature
from hybrid_grpo.run.inputs import RunInputs


class Languages(Feature):
    """Adds the metrics `language/<language>/...`."""

    name = "languages"

    def __init__(self, config: TrainConfig, plan: BatchPlan, inputs: RunInputs) -> None:
        super().__init__(config, plan, inputs)
        self._own = config.of(LanguagesConfig)
        self._known: dict[str, str] = {}
        if self._own.column is not None:
            for prompt in inputs.prompts:
                self.language_of(prompt)
            return
        for name in self._own.names:
            refuse(
                name not in language_codes(),
                f"languages.names {name} is not a code that a language can be detected by: write a code of ISO 639-1,"
                " such as en, de or zh, or set languages.column",
            )

    @property
    def names(self) -> Mapping[str, Sequence[str]]:
        return {"<language>": [*self._own.names, OTHER]}

    def language_of(self, prompt: Prompt) -> str:
        """The prompt's language, by its column or its text, among the languages that are measured."""
        if (column := self._own.column) is not None:
            refuse(
                column not in prompt.columns,
                f"languages.column {column}: row {prompt.id} of the data has no such column: add it, or take the"
                " setting out, to detect languages",
            )
            found = str(prompt.columns[column] or OTHER)
            if found not in (*self._own.names, OTHER):
                try:
                    found = language_code(found)
                except ValueError as error:
                    raise UserError(f"languages.column {column}: row {prompt.id}: {error}, or {OTHER}") from error
        else:
            text = last_asked(prompt.text)
            found = self._known.get(text) or self._known.setdefault(text, language(text) or OTHER)
        return found if found in self._own.names else OTHER

    def measure(self, rollout: Rollout, scores: Scores) -> Numbers:
        """Return the metrics of this rank's completions by the policy."""
        of_prompt = list(map(self.language_of, rollout.prompts))
        of_row = [name for name in of_prompt for _ in range(rollout.num_generations)]
        outcome_B = scores.right_B(self.inputs.outcome, rollout.prompts)
        numbers: Numbers = {}
        for name in dict.fromkeys(of_prompt):
            own = [row for row, c in enumerate(rollout.completions) if of_row[row] == name and not c.writer]
            right_N = outcome_B[own][~outcome_B[own].isnan()]
            lengths_N = torch.tensor([rollout.lengths[row] for row in own], dtype=torch.float64)
            found = [language(rollout.completions[row].text) for row in own] if name in language_codes() else []
            same_N = torch.tensor([code == name for code in found if code is not None], dtype=torch.float64)
            threshold = self.config.eval.threshold
            numbers[f"language/{name}/prompts"] = of_prompt.count(name), 1
            numbers[f"language/{name}/accuracy"] = (right_N >= threshold).double().mean(), len(right_N)
            numbers[f"language/{name}/length_mean"] = lengths_N.mean(), len(own)
            numbers[f"language/{name}/same_frac"] = same_N.mean(), len(same_N)
        return numbers
