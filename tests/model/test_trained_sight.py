"""A tower that is trained, in the engine: on one rank and on two, at several ZeRO stages, and with adapters."""

import json

import pytest
from launching import ranks
from seeing import make_seeing, pictures

REWARD = """
def kinds(completions, images, **_):
    return [len(set(str(c))) / 20 + sum(image.open().width for image in i or ()) for c, i in zip(completions, images)]
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What one rank saw of every case, and what two ranks saw, of which one has no picture in most micro-batches."""
    folder = tmp_path_factory.mktemp("trained")
    make_seeing("qwen3_vl", folder / "model")
    for number, picture in enumerate(pictures()):
        picture.save(folder / f"{number}.png")
    rows = [{"prompt": f"row {n}", "images": ["0.png", f"{n // 4}.png"] if n % 4 == 0 else None} for n in range(16)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "kinds.py").write_text(REWARD)
    return {world: ranks(world, "trained", folder, programs="sight_programs.py") for world in (1, 2)}


@pytest.mark.process
@pytest.mark.ranks
def test_ranks_and_stages_learn_the_same_and_a_resumed_step_is_the_step(seen):
    (alone,), (one, two) = seen[1], seen[2]
    for number, case in enumerate(alone):
        for of in (case, one[number], two[number]):
            assert of["resumed"] == of["steps"][2], "to the bit"
            assert of["follows"] and of["exported"] and of["moved"] == of["of"] > 8
            assert all(step["parity/logp_abs_diff_mean"] < 1e-5 for step in of["steps"]), "the sampler is the trainer"
        # The first three cases are stages of one run, the last has adapters.
        for of in (one[number], alone[0] if number < 3 else case):
            for step, expected in zip(of["steps"], case["steps"], strict=True):
                for name in ("policy/loss", "policy/grad_norm", "policy/kl", "reward/mean"):
                    assert step[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), (number, name)
