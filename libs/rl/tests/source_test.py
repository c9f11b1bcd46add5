"""Rewards and the prompt source: who is asked what, what is dead, what is trained, and that a resume samples the same."""

import doctest
import json
import random
from itertools import count
from pathlib import Path

import pytest
import torch
from rl_cases import Letters, Scripted

from align import lean
from align.data import DataError
from align.objectives import count_units
from align.rl import (
    FunctionReward,
    LeanReward,
    RewardError,
    RlError,
    RolloutConfig,
    RolloutSource,
    Scored,
    VerifyReward,
    make_reward,
    readable,
)

ROWS = [{"prompt": str(10 + index), "answer": "1"} for index in range(6)]
PROMPTS = [[1, 10 + index] for index in range(6)]


class Constant:
    """Reward by the answer's first token."""

    def __init__(self, table):
        self.table = table

    def score(self, rows, completions):
        return [Scored(self.table(row, completion), "made") for row, completion in zip(rows, completions, strict=True)]

    def close(self):
        pass


class Plain:
    """Credit without a model; remembers the shaped rewards."""

    def __init__(self):
        self.shaped = []

    def annotate(self, rollouts):
        pass

    def assign(self, rollouts, rewards):
        self.shaped.append(rewards)
        for each, reward in zip(rollouts, rewards, strict=True):
            each.per_token["advantages"] = [reward] * len(each.ids)
        return {}


def random_answer(prompt, seed, j):
    draws = random.Random(f"{prompt} {seed} {j}")
    ids = [draws.randrange(3, 40) for _ in range(draws.randint(1, 5))]
    return ids, len(ids) == 5


def source(
    *,
    answer=random_answer,
    reward=lambda row, text: float(text.split()[0]) % 2,
    rank=0,
    world=1,
    gather=None,
    prompts=PROMPTS,
    per_answer=False,
    **options,
):
    fields = {"group": 4, "max_new_tokens": 5, **options}
    sampler, credit = Scripted(answer), Plain()
    made = RolloutSource(
        ROWS, prompts, config=RolloutConfig(**fields), sampler=sampler, tokenizer=Letters(), reward=Constant(reward), credit=credit,
        global_batch=8, micro_batch=4, seed=3, rank=rank, world=world, per_answer=per_answer, **({"gather": gather} if gather else {}),
    )  # fmt: skip
    return made, sampler, credit


def same(a, b):
    return len(a) == len(b) and all(
        x.keys() == y.keys() and all(bool(torch.as_tensor(x[k]).equal(torch.as_tensor(y[k]))) for k in x) for x, y in zip(a, b, strict=True)
    )


def test_a_step_holds_whole_groups_and_counts_what_it_trains():
    made, sampler, _ = source(dead_retries=0, mask_dead_groups=False)
    step = made.next_step()
    assert [batch["input_ids"].shape[0] for batch in step.micro_batches] == [4, 4]
    assert len({tuple(prompt) for prompt, _ in sampler.asked}) == 2 and len({seed for _, seed in sampler.asked}) == 2
    masked = sum(int(batch["loss_mask"].sum()) for batch in step.micro_batches)
    assert masked == step.trained_tokens == sum(len(each.ids) for each in made.samples)
    for batch, part in zip(step.micro_batches, (made.samples[:4], made.samples[4:]), strict=True):
        for row, each in enumerate(part):
            # position t predicts targets[t]: exactly the sampled ids, first and last included (R080, mask off by one)
            assert batch["targets"][row][batch["loss_mask"][row]].tolist() == each.ids
            length = len(each.prompt_ids) + len(each.ids) - 1
            assert batch["input_ids"][row, :length].tolist() == (each.prompt_ids + each.ids)[:-1]
            assert batch["lengths"][row] == length
            assert (batch["sampler_logprobs"][row][batch["loss_mask"][row]] == -0.5).all()


@pytest.mark.parametrize("per_answer", [False, True])
@pytest.mark.parametrize("overlong", ["keep", "mask", "penalty"])
def test_answers_without_a_token_train_nothing(per_answer, overlong):
    """All empty: a step without micro-batches or units, so that the optimizer is left alone. Some: units are those of the loss's mask."""
    rewards = count(0.0)  # no group is dead
    options = {"per_answer": per_answer, "overlong": overlong, "overlong_buffer": 2, "prompts": [[10 + index] for index in range(6)]}
    made, _, _ = source(answer=lambda prompt, seed, j: ([], j == 1), reward=lambda row, text: next(rewards), **options)
    for _ in range(2):
        step = made.next_step()
        assert (step.micro_batches, step.trained_tokens, step.tokens) == ([], 0, 8)
        assert (made.numbers["trained_answers"], made.numbers["answer_tokens"], made.numbers["surprisal"]) == (0, 0.0, 0.0)
        assert made.numbers["dead_groups"] == 0.0
    answer = lambda prompt, seed, j: ([], j == 1) if j else ([7, 2], False)  # noqa: E731
    made, _, _ = source(answer=answer, reward=lambda row, text: next(rewards), **options)
    step = made.next_step()
    over = "sequences" if per_answer else "tokens"
    assert [batch["input_ids"].tolist() for batch in step.micro_batches] == [[[*each.prompt_ids, 7]] for each in made.samples if each.ids]
    assert step.trained_tokens == sum(int(count_units(batch["loss_mask"], over=over)) for batch in step.micro_batches) > 0


def test_dead_groups_are_drawn_again_within_the_budget():
    """Prompts 12, 13, … are dead: they are replaced by fresh prompts until the rounds are used up; what stays dead trains nothing."""
    made, sampler, _ = source(dead_retries=2, reward=lambda row, text: float(text.split()[0]) % 2 if row["prompt"] in ("10", "11") else 0.0)
    for _ in range(4):
        asked = len(sampler.asked)
        step = made.next_step()
        assert 2 <= len(sampler.asked) - asked <= 6 and made.numbers["retry_rounds"] <= 2
        for each in made.samples:
            group = {other.reward for other in made.samples if other.group == each.group}
            assert each.trained == (len(group) > 1)
        assert step.trained_tokens == sum(len(each.ids) for each in made.samples if each.trained)


def test_an_all_dead_batch_has_nothing_to_train():
    """R147: no micro-batch, no trained token, whatever becomes of dead groups; the retries were spent and the cursor moved on."""
    for mask in (True, False):
        made, sampler, _ = source(dead_retries=2, mask_dead_groups=mask, reward=lambda row, text: 1.0)
        step = made.next_step()
        assert step.trained_tokens == 0 and step.micro_batches == [] and len(sampler.asked) == 6
        assert made.numbers["dead_groups"] == 1.0 and made.numbers["dead_low"] == 0.0
    made, _, _ = source(dead_retries=0, reward=lambda row, text: 0.0)
    made.next_step()
    assert made.numbers["dead_low"] == 1.0


def test_dead_is_judged_by_the_raw_reward_and_the_penalty_by_length():
    """R089: all wrong with different lengths is dead, though the penalty tells the answers apart. DAPO's equation 13 by hand."""
    lengths = {0: 1, 1: 3, 2: 4, 3: 5}
    made, _, credit = source(
        answer=lambda prompt, seed, j: ([7] * lengths[j], j == 3), reward=lambda row, text: 0.0, overlong="penalty", overlong_buffer=2
    )
    assert made.next_step().trained_tokens == 0
    assert credit.shaped[-1] == [0.0, 0.0, -0.5, -1.0] * 2


def test_every_sample_is_of_the_weights_of_its_step():
    made, sampler, _ = source(dead_retries=0)
    for step in range(2):
        made.next_step()
        assert sampler.weights_version == step
    answered = sampler.generate

    def behind(*args, **more):
        sampler.weights_version -= 1
        return answered(*args, **more)

    sampler.generate = behind
    with pytest.raises(RlError, match="weights of step 1, the model is at step 2"):
        made.next_step()


def test_overlong_answers_can_be_left_out():
    """R079: out of the mask means out of the count."""
    made, _, _ = source(answer=lambda prompt, seed, j: ([5 + j] * (5 if j == 0 else 2), j == 0), overlong="mask", dead_retries=0)
    step = made.next_step()
    assert step.trained_tokens == 2 * 3 * 2 == sum(int(batch["loss_mask"].sum()) for batch in step.micro_batches)
    kept, _, _ = source(answer=lambda prompt, seed, j: ([5 + j] * (5 if j == 0 else 2), j == 0), overlong="keep", dead_retries=0)
    assert kept.next_step().trained_tokens == 2 * (5 + 3 * 2)


@pytest.mark.parametrize("inner_steps", [1, 3])
def test_a_restored_source_goes_on_the_same(inner_steps):
    """R113, R118: saved after any step, also between inner steps, and through JSON; twice over (three legs)."""
    whole, _, _ = source(inner_steps=inner_steps)
    wanted = [whole.next_step() for _ in range(8)]
    for k in range(8):
        first, _, _ = source(inner_steps=inner_steps)
        for _ in range(k):
            first.next_step()
        second, _, _ = source(inner_steps=inner_steps)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        middle = min(k + 2, 8)
        for step in range(k, middle):
            got = second.next_step()
            assert same(got.micro_batches, wanted[step].micro_batches) and got.trained_tokens == wanted[step].trained_tokens
        third, _, _ = source(inner_steps=inner_steps)
        third.load_state_dict(json.loads(json.dumps(second.state_dict())))
        for step in range(middle, 8):
            assert same(third.next_step().micro_batches, wanted[step].micro_batches)


def test_other_prompts_or_another_seed_are_refused_on_resume():
    made, _, _ = source()
    state = made.state_dict()
    changed = RolloutSource(
        ROWS[:-1], PROMPTS[:-1], config=RolloutConfig(group=4), sampler=Scripted(random_answer), tokenizer=Letters(), reward=Constant(None),
        credit=Plain(), global_batch=8, micro_batch=4, seed=3,
    )  # fmt: skip
    with pytest.raises(DataError, match="rows changed"):
        changed.load_state_dict(state)
    with pytest.raises(RlError, match="rollout source"):
        made.load_state_dict({"cursor": {}})


def test_two_ranks_train_on_the_answers_that_one_would():
    """R088 and the split over ranks: the same groups, each answer on exactly one rank, the same count on both."""
    import threading

    alone, _, _ = source(dead_retries=1)
    wanted = [alone.next_step() for _ in range(3)]
    barrier, box = threading.Barrier(2), [None, None]

    def gather_of(rank):
        def gather(value):
            box[rank] = value
            barrier.wait()
            out = list(box)
            barrier.wait()
            return out

        return gather

    steps = [[], []]

    def work(rank):
        made, _, _ = source(dead_retries=1, rank=rank, world=2, gather=gather_of(rank))
        steps[rank] = [made.next_step() for _ in range(3)]

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, step in enumerate(wanted):
        both = [steps[rank][number] for rank in range(2)]
        assert [each.trained_tokens for each in both] == [step.trained_tokens] * 2
        if step.trained_tokens:
            assert same(both[0].micro_batches + both[1].micro_batches, step.micro_batches)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"group": 3}, "global_batch 8 is not a multiple of rollout.group 3; try 6"),
        ({"group": 9}, "rollout.group is 9; it must be at most train.global_batch 8$"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": float("inf")}, "rollout.temperature is inf; it must be a finite number"),
        ({"temperature": float("nan")}, "rollout.temperature is nan; it must be a finite number"),
        ({"inner_steps": 0}, "inner_steps is 0"),
        ({"dead_retries": -1}, "dead_retries"),
        ({"overlong": "penalty", "overlong_buffer": 6}, "overlong_buffer"),
    ],
)
def test_options_that_no_run_can_have_are_named(options, told):
    with pytest.raises(RlError, match=told):
        source(**options)


def test_the_verifier_s_reward_has_its_reason_and_refuses_what_it_cannot_read():
    """R090: 0.0 is a reward."""
    rows = [{"prompt": "p", "answer": "3"}] * 4
    answers = [r"1+2=3. \boxed{3}", r"\boxed{4}", "3", r"\boxed{3"]
    scored = VerifyReward().score(rows, answers)
    assert [(each.reward, each.reason) for each in scored[:3]] == [(1.0, "equal"), (0.0, "different"), (0.0, "no_answer")]
    assert scored[3].reward == 0.0
    bad = {"prompt": "what?", "answer": r"\frac{"}
    assert not readable(bad) and readable(rows[0])
    with pytest.raises(RewardError, match="what"):
        VerifyReward().score([bad], [r"\boxed{3}"])


def test_a_proof_is_rewarded_by_the_kernel_s_verdict():
    """The completion goes on after ":= by", or states the theorem again; reasons are kept; a row that Lean can't read is refused."""
    asked = []

    class Judge:
        pool = None

        def __call__(self, pairs):
            asked.extend(pairs)
            says = {"rfl": ("accept", "accepted"), "boom": ("crash", "died"), "bad": ("crash", "bad_statement")}
            return [lean.Verdict(*says.get(submission.split()[-1], ("reject", "error")), "said so") for _, submission in pairs]

        def score(self, verdict):
            return {"accept": 1.0, "reject": 0.0, "crash": None}[verdict.status]

    row = {"prompt": "…", "answer": "theorem two : 1 + 1 = 2", "header": ""}
    reward = LeanReward(Judge())
    found = reward.score([row] * 4, ["rfl", "simp", "boom", "theorem two : 1 + 1 = 2 := rfl"])
    assert found == [Scored(1.0, "accepted"), Scored(0.0, "error"), Scored(0.0, "died"), Scored(1.0, "accepted")]
    assert [submission for _, submission in asked][0:4:3] == ["theorem two : 1 + 1 = 2 := by\nrfl", "theorem two : 1 + 1 = 2 := rfl"]
    assert len(asked) == 4 and reward.score([row] * 3, ["rfl"] * 3) == [Scored(1.0, "accepted")] * 3 and len(asked) == 5
    assert {problem.name for problem, _ in asked} == {"two"} and {problem.statement for problem, _ in asked} == {"1 + 1 = 2"}
    with pytest.raises(RewardError, match="bad_statement"):
        reward.score([row], ["bad"])


USER = """
import sys
def length(prompt, completion, row):
    print("noise")
    return len(completion) / 10 + row.get("bonus", 0)
def sometimes(prompt, completion, row):
    if completion == "bad":
        raise KeyError("hint")
    return {"none": None, "nan": float("nan"), "true": True, "text": "0.5"}.get(completion, 1.0)
def exits(prompt, completion, row):
    sys.exit(3)
def sleeps(prompt, completion, row):
    import time
    time.sleep(60)
"""


def test_a_user_s_function_is_called_with_prompt_completion_and_row(tmp_path):
    (tmp_path / "mine.py").write_text(USER)
    reward = make_reward(f"{tmp_path}/mine.py:length")
    try:
        assert [each.reward for each in reward.score([{"prompt": "p", "bonus": 2}, {"prompt": "q"}], ["abc", "é\n"])] == [2.3, 0.2]
    finally:
        reward.close()
    with FunctionReward_closed(f"{tmp_path}/mine.py:sometimes") as reward:
        assert reward.score([{"prompt": "p"}], ["fine"]) == [Scored(1.0, "1")]
        for completion, told in (
            ("none", "None"),
            ("nan", "nan"),
            ("true", "True"),
            ("text", "0.5"),
            ("bad", r"KeyError: 'hint' \(line 8\)"),
        ):
            with pytest.raises(RewardError, match=told) as caught:
                reward.score([{"prompt": "the row"}], [completion])
            assert "the row" in str(caught.value)


class FunctionReward_closed(FunctionReward):
    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("verifyy", "path/file.py:function"),
        ("absent.py:f", "no file"),
        ("mine.py:absent", "absent"),
        ("broken.py:f", "SyntaxError"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_told_before_the_run(tmp_path, spec, told):
    (tmp_path / "mine.py").write_text(USER)
    (tmp_path / "broken.py").write_text("def f(:\n")
    with pytest.raises(RewardError, match=told):
        make_reward(spec, locate=lambda name: tmp_path / name)


def test_a_function_that_ends_its_process_or_never_comes_back_is_an_error(tmp_path):
    (tmp_path / "mine.py").write_text(USER)
    for name, told in (("exits", "exit code 3"), ("sleeps", "more than 1 s")):
        with FunctionReward_closed(f"{tmp_path}/mine.py:{name}", timeout_s=30 if name == "exits" else 1) as reward:
            with pytest.raises(RewardError, match=told):
                reward.score([{"prompt": "p"}], ["x"])
            assert reward._process is None, "the process must not be left behind"


def test_statistics_are_of_the_first_round_and_by_reason():
    made, _, _ = source(dead_retries=2)
    made.next_step()
    numbers = made.numbers
    assert 0 <= numbers["reward"] <= 1 and numbers["reason_made"] == 1.0
    assert numbers["surprisal"] == pytest.approx(0.5) and 1 <= numbers["answer_tokens"] <= 5
    assert torch.tensor(list(numbers.values())).isfinite().all()
    made.numbers["reason_gone"] = 0.25  # of the step before
    made.load_state_dict(json.loads(json.dumps(made.state_dict())))
    made.next_step()
    assert made.numbers["reason_gone"] == 0 and made.numbers["reason_made"] == 1.0


def test_the_readme_s_example():
    results = doctest.testfile(str(Path(__file__).absolute().parents[1] / "README.md"), module_relative=False)
    assert results.attempted > 10 and results.failed == 0
