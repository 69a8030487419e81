"""cohort.train(loss=..., advantage=...): GRPO with a loss and with advantages by functions of Python."""
import json
import pathlib
import subprocess
import sys

import cohort
import numpy as np
import pytest

REWARDS = [{"name": "format", "pattern": ".*1.*"}, {"name": "task"}]
OFF_POLICY = {"rewards": REWARDS, "dtype": "f64", "num_iterations": 2, "num_minibatches": 2, "learning_rate": 1e-2}


def clip(batch):
    """The default loss: PPO's clip with epsilon 0.2, and its gradient."""
    logprob, old = np.asarray(batch.logprob), np.asarray(batch.old_logprob)
    ratio, advantage, weight = np.exp(logprob - old), np.asarray(batch.advantage), np.asarray(batch.weight)
    clipped = np.where(advantage > 0, ratio > 1.2, ratio < 0.8) & (advantage != 0)
    bounded = np.where(clipped, np.clip(ratio, 0.8, 1.2), ratio)
    return -advantage * bounded * weight, np.where(clipped, 0, -advantage * ratio * weight)


def model(run):
    """The values of the last checkpoint, of float64."""
    path = sorted(pathlib.Path(run).glob("checkpoints/step-*/model.safetensors"))[-1]
    data = path.read_bytes()
    return np.frombuffer(data[8 + int.from_bytes(data[:8], "little"):], np.float64)


def distance(a, b):
    return np.max(np.abs(model(a.dir) - model(b.dir)))


@pytest.fixture
def pair(small, tmp_path):
    """pair(keys, function, **functions): the runs of the built-in loss and of a function."""
    def runs(keys=None, **functions):
        return (cohort.train(small("grpo", **OFF_POLICY | (keys or {}), output_dir=str(tmp_path / "builtin")), progress=False),
                cohort.train(small("grpo", **OFF_POLICY, output_dir=str(tmp_path / "function")), progress=False, **functions))
    return runs


clip.arrays = "numpy"


def test_a_loss_in_numpy_gives_the_weights_of_the_built_in_one(pair):
    builtin, ours = pair(loss=clip)
    assert distance(builtin, ours) < 1e-12
    assert [m["clip_ratio/high"] > 0 for m in builtin.metrics].count(True) > 0  # some ratios are not 1
    assert all(m["ratio_deviation"] == 0 for m in ours.metrics)
    assert "loss: clip" in pathlib.Path(ours.dir, "config.yaml").read_text()


@pytest.mark.parametrize("keys, name", [({}, "clip"), ({"importance_sampling_level": "sequence"}, "gspo"),
                                        ({"surrogate": "cispo", "epsilon": 0.1, "epsilon_high": 0.1}, "cispo")])
def test_losses_in_torch_give_the_weights_of_the_built_in_ones(pair, keys, name):
    torch = pytest.importorskip("torch")

    def torch_clip(b):
        ratio = (b.logprob - b.old_logprob).exp()
        return -(torch.minimum(ratio * b.advantage, ratio.clip(0.8, 1.2) * b.advantage) * b.weight).sum()

    def torch_gspo(b):
        segments = b.segments.long()
        zeros = torch.zeros(int(segments.max()) + 1, dtype=b.logprob.dtype)
        count = zeros.index_add(0, segments, torch.ones_like(b.weight))
        mean = zeros.index_add(0, segments, (b.logprob - b.old_logprob).detach()) / count
        ratio = (mean[segments] + b.logprob - b.logprob.detach()).exp()
        return -(torch.minimum(ratio * b.advantage, ratio.clip(0.8, 1.2) * b.advantage) * b.weight).sum()

    def torch_cispo(b):
        ratio = (b.logprob - b.old_logprob).exp().detach().clip(0.9, 1.1)
        return -(ratio * b.advantage * b.logprob * b.weight).sum()

    builtin, ours = pair(keys, loss={"clip": torch_clip, "gspo": torch_gspo, "cispo": torch_cispo}[name])
    assert distance(builtin, ours) < 1e-12


def test_a_loss_may_depend_on_entropies_and_on_the_reference(pair, small, tmp_path):
    torch = pytest.importorskip("torch")

    def bonus(b):
        ratio = (b.logprob - b.old_logprob).exp()
        x = b.ref_logprob - b.logprob
        surrogate = -torch.minimum(ratio * b.advantage, ratio.clip(0.8, 1.2) * b.advantage)
        return ((surrogate + 0.3 * (x.exp() - x - 1) - 0.05 * b.entropy) * b.weight).sum()

    keys = OFF_POLICY | {"beta": 0.3}
    builtin = cohort.train(small("grpo", **keys, entropy_coef=0.05, output_dir=str(tmp_path / "a")), progress=False)
    ours = cohort.train(small("grpo", **keys, output_dir=str(tmp_path / "b")), loss=bonus, progress=False)
    assert distance(builtin, ours) < 1e-12


def mean(b):
    return np.mean(np.asarray(b.logprob)), np.full(len(b.logprob), 1 / len(b.logprob))


def standardised(b):
    """Its advantages are 0/0 where a sequence is alone."""
    with np.errstate(invalid="ignore"):
        advantage = (b.advantage - b.advantage.mean()) / b.advantage.std()
    return -(advantage * b.logprob * b.weight), -advantage * b.weight


def raises(b):
    raise ZeroDivisionError("in the loss")


@pytest.mark.parametrize("loss, error, message", [
    (mean, cohort.InputError, "loss mean: it is not a sum over sequences"),
    (standardised, cohort.InputError, "it is not a sum over sequences"),
    (lambda b: (0.0, np.zeros(len(b.logprob)), np.full(len(b.logprob), 1 / len(b.logprob))), cohort.InputError, "not a sum"),
    (lambda b: (np.zeros((len(b.logprob), 2)), np.zeros(len(b.logprob))), cohort.InputError, "a loss of shape"),
    (lambda b: ("x", np.zeros(len(b.logprob))), cohort.InputError, "returned x as the loss"),
    (lambda b: (0.0, [0.0]), cohort.InputError, "loss <lambda>: its gradient with respect to logprob is no array"),
    (raises, ZeroDivisionError, "in the loss"),
    (lambda b: None, cohort.InputError, "loss <lambda>: .*returned None; hint: a scalar of torch"),
    (lambda b: (0.0, np.zeros(3)), cohort.InputError, "gradient with respect to logprob is .*3.*one number for each"),
    (lambda b: (float("nan"), np.zeros(len(b.logprob))), cohort.InputError, "loss <lambda>: it returned nan"),
    (lambda b: (0.0, np.full(len(b.logprob), np.nan)), cohort.InputError, "gradient with respect to logprob is not finite"),
    (lambda b: (0.0, np.zeros(len(b.logprob)), np.full(len(b.logprob), np.inf)), cohort.InputError, "to entropy is not finite"),
])
def test_what_a_loss_does_wrong_ends_the_run_without_an_update(small, tmp_path, loss, error, message):
    loss.arrays = "numpy"
    with pytest.raises(error, match=message):
        cohort.train(small("grpo", rewards=REWARDS), loss=loss, progress=False)
    states = sorted((tmp_path / "run").glob("checkpoints/step-*/training/state.json"))
    assert [json.loads(path.read_text())["updates"] for path in states] in ([], [0])


def relative(b):
    """The default without a scale: the reward less the mean of its group."""
    rewards, group = np.array(b.rewards), np.array(b.group)
    return rewards - np.array([rewards[group == g].mean() for g in group])


def test_advantages_give_the_weights_of_the_built_in_ones(pair):
    builtin, ours = pair({"scale_rewards": "none"}, advantage=relative)
    assert distance(builtin, ours) < 1e-12
    text = pathlib.Path(ours.dir, "config.yaml").read_text()
    assert "advantage: relative" in text


def test_advantages_of_tokens_that_are_equal_are_those_of_the_completion(pair):
    seen = []

    def by_token(b):
        seen.append(b)
        return [[a] * n for a, n in zip(relative(b), b.lengths)]

    builtin, ours = pair({"scale_rewards": "none"}, advantage=by_token)
    assert distance(builtin, ours) < 1e-12
    assert len(seen) == 4
    for step, b in enumerate(seen):
        assert b.step == step and len(b.rewards) == 24 and b.group == [i // 6 for i in range(24)]
        assert set(b.each) == {"format", "task"} and all(len(v) == 24 for v in b.each.values())
        assert np.allclose(b.rewards, np.sum([b.each["format"], b.each["task"]], axis=0))
        assert all(n in (1, 2, 3, 4) for n in b.lengths) and all(x <= 0 for x in b.mean_logprob)
        assert b.turn_rewards == [[]] * 24 and len(b.fields) == 24


@pytest.mark.parametrize("function, message", [
    (lambda b: [0.0], "advantage <lambda>: it returned 1 values"),
    (lambda b: 3, "returned 3; hint: a list of a number"),
    (lambda b: [[0.0] * 9] * 24, "which has . sampled tokens"),
    (lambda b: [float("nan")] * 24, "for completion 0"),
    (lambda b: [None] * 24, "it returned 'null' for completion 0"),
    (lambda b: [1e300] * 24, "a number that is not finite for completion 0"),
])
def test_wrong_advantages_are_errors(small, function, message):
    with pytest.raises(cohort.InputError, match=message):
        cohort.train(small("grpo", rewards=REWARDS), advantage=function, progress=False)


def test_a_run_continues_with_its_functions_only(small, tmp_path):

    class Stop(cohort.Callback):
        def on_step(self, metrics):
            return metrics["step"] == 2

    functions = {"loss": clip, "advantage": relative}
    whole = cohort.train(small("grpo", **OFF_POLICY, output_dir=str(tmp_path / "whole")), progress=False, **functions)
    cut = cohort.train(small("grpo", **OFF_POLICY, output_dir=str(tmp_path / "cut")), progress=False, callbacks=[Stop()], **functions)
    with pytest.raises(cohort.InputError, match="loss: clip is a function of a Python program"):
        cohort.train(resume=cut.dir, advantage=relative, progress=False)
    with pytest.raises(cohort.InputError, match="advantage: relative is a function of a Python program"):
        cohort.train(resume=cut.dir, loss=clip, progress=False)
    with pytest.raises(cohort.InputError, match="loss: clip was given as mean"):
        cohort.train(resume=cut.dir, loss=mean, advantage=relative, progress=False)
    rest = cohort.train(resume=cut.dir, progress=False, **functions)
    assert distance(whole, rest) == 0
    replay = [sys.executable, "-m", "cohort", "replay", whole.dir, "--step", "1"]
    out = subprocess.run(replay, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert "log-probs; the update is not repeated" in out.stdout
    late = subprocess.run([*replay[:-1], "3"], capture_output=True, text=True)
    assert late.returncode != 0 and "--step 1" in late.stderr


def test_keys_of_the_built_in_ones_are_refused(small):
    for keys, functions, message in [({"entropy_coef": 0.1}, {"loss": clip}, "entropy_coef: belongs to the built-in loss"),
                                     ({"whiten_advantages": True}, {"advantage": relative}, "whiten_advantages: belongs")]:
        with pytest.raises(cohort.InputError, match=message):
            cohort.train(small("grpo", rewards=REWARDS, **keys), progress=False, **functions)
    with pytest.raises(TypeError, match="loss: expected a function"):
        cohort.train(small("grpo", rewards=REWARDS), loss=3, progress=False)


def test_a_loss_gets_every_sequence_and_what_it_writes_changes_nothing(pair, small, tmp_path):
    """Sequences with an advantage of 0 too, as an entropy bonus needs them."""
    torch = pytest.importorskip("torch")

    def bonus(b):
        ratio = (b.logprob - b.old_logprob).exp()
        surrogate = -torch.minimum(ratio * b.advantage, ratio.clip(0.8, 1.2) * b.advantage)
        loss = ((surrogate - 0.05 * b.entropy) * b.weight.clone()).sum()
        b.weight.zero_()
        return loss

    keys = OFF_POLICY | {"rewards": [{"name": "task"}]}
    builtin = cohort.train(small("grpo", **keys, entropy_coef=0.05, output_dir=str(tmp_path / "a")), progress=False)
    ours = cohort.train(small("grpo", **keys, output_dir=str(tmp_path / "b")), loss=bonus, progress=False)
    assert any(m["frac_reward_zero_std"] > 0 for m in builtin.metrics)
    assert distance(builtin, ours) < 1e-12


def test_a_mean_is_refused_where_each_micro_batch_has_one_sequence(small):
    mean.arrays = "numpy"
    with pytest.raises(cohort.InputError, match="it is not a sum over sequences"):
        cohort.train(small("grpo", rewards=REWARDS, micro_batch_tokens=8, num_generations=2), loss=mean, progress=False)


def test_advantages_within_a_completion_may_cancel(small):
    torch = pytest.importorskip("torch")

    def torch_clip(b):
        ratio = (b.logprob - b.old_logprob).exp()
        return -(torch.minimum(ratio * b.advantage, ratio.clip(0.8, 1.2) * b.advantage) * b.weight).sum()

    def centred(b):
        return [[(i - (n - 1) / 2) * 0.3 for i in range(n)] for n in b.lengths]

    for dtype in ("f32", "f64"):
        assert cohort.train(small("grpo", rewards=REWARDS, dtype=dtype), loss=torch_clip, advantage=centred, progress=False,
                            continues=False).finished


def test_a_loss_sees_the_distribution_that_was_sampled_from(small):
    seen = []

    def look(b):
        seen.append(np.abs(b.sampling_logprob - b.old_logprob).max())
        return 0.0, np.zeros(len(b.logprob))

    look.arrays = "numpy"
    cohort.train(small("grpo", rewards=REWARDS, top_k=3), loss=look, progress=False)
    assert max(seen) > 0.01


def test_a_function_without_a_stage_of_grpo_is_refused(small):
    with pytest.raises(cohort.InputError, match="loss: a function was given, and no stage has trainer: grpo"):
        cohort.train(small("sft", batch_size=4), loss=clip, progress=False)
