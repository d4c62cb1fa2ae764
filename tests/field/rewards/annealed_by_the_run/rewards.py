class Annealed:
    def __init__(self, start=1.0):
        self.start = start

    def __call__(self, completions, trainer_state=None, **kwargs):
        left = 1 - trainer_state.global_step / trainer_state.max_steps + trainer_state.epoch
        return [self.start * left for _ in completions]


def logs_steps(completions, trainer_state, **kwargs):
    return [float(trainer_state.logging_steps) for _ in completions]
